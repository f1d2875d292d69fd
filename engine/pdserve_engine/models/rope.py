"""RoPE tables: cosines and sines of the angle of each position and pair of dimensions.

Sources: Su et al., RoFormer (2021); linear scaling: Chen et al., Position Interpolation (2023); llama3: the release of
Llama 3.1 by Meta; yarn: Peng et al., YaRN (2023). Computed in float32 throughout, as transformers does, since the
rounding of an angle at a high position is part of what a model computes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pdserve_engine.models.config import DecoderConfig, RopeConfig


def rope_tables(config: DecoderConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each float32 [num_positions, head_dim / 2]."""
    frequencies, factor = _frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return angles.cos() * factor, angles.sin() * factor


def _frequencies(rope: RopeConfig, dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """Radians per position [dim / 2], and the factor of cosines and sines."""
    frequencies = 1.0 / torch.pow(rope.theta, torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    options = rope.options
    if rope.kind == "default":
        return frequencies, 1.0
    if rope.kind == "linear":
        return frequencies / options["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, rope), 1.0
    factor = options["factor"]
    original = options.get("original_max_position_embeddings") or max_positions
    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return _yarn(frequencies, rope, dim, original), attention_factor


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    options = rope.options
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    turns = options["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return _blend(frequencies, options["factor"], keep)


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, dim: int, original: int) -> torch.Tensor:
    """As _llama3, but the blend is linear in the dimension instead of in the number of turns."""

    def dimension_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension_with(rope.options.get("beta_fast", 32.0))
    high = dimension_with(rope.options.get("beta_slow", 1.0))
    if rope.options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    return _blend(frequencies, rope.options["factor"], 1 - ramp.clamp(0.0, 1.0))


def _blend(frequencies: torch.Tensor, factor: float, keep: torch.Tensor) -> torch.Tensor:
    return (1 - keep) * frequencies / factor + keep * frequencies
