"""Configuration of an engine: frozen, keyword-only, each owned by the class that uses it, built once at wiring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve_kernels.interface import Quantization

    from pdserve_engine.device import Device

DType = Literal["bfloat16", "float32"]
CacheDType = Literal["auto", "int8", "fp8"]
"""How keys and values are cached: in the dtype of everything else, or as 8-bit codes with a scale for each row."""

MIN_LOGITS_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Where the model is and how it is computed. ``path`` is a Hugging Face folder (weights/ makes one of a GGUF)."""

    path: Path
    dtype: DType = "bfloat16"
    quantization: Quantization | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Size and dtype of the KV cache. Exactly one of the two sizes decides.

    Attributes:
        block_size: tokens per block.
        memory_bytes: bytes for all blocks.
        num_blocks: number of blocks, for tests that want a tiny pool.
    """

    block_size: int = 16
    dtype: CacheDType = "auto"
    memory_bytes: int | None = None
    num_blocks: int | None = None
    enable_prefix_caching: bool = True


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step.

    Attributes:
        max_num_seqs: requests running at the same time.
        max_num_batched_tokens: token budget of a step; a longer prompt is computed in chunks of at most this.
        itl_target_s: how long a step with decodes is to take at most; prompts beside them are computed in smaller
            chunks. None does not limit.
        decode_on_after_s: a finished prompt that is to be handed over waits so long for its receiver before this node
            generates its next tokens itself, while it has no prompt to run.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    itl_target_s: float | None = None
    decode_on_after_s: float = 0.3


def max_logits_rows(max_num_seqs: int) -> int:
    """Rows of logits in one step: one for each request, and enough that prompts whose log probabilities are wanted, a
    row a token, do not come in tiny chunks.
    """
    return max(max_num_seqs, MIN_LOGITS_ROWS)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """``enforce_eager``: no CUDA graphs."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    num_threads: int | None = None
    device: Device = "cpu"
    enforce_eager: bool = False

    @property
    def kv_dtype(self) -> str:
        """Of the KV cache, as KVLayout names it."""
        return self.model.dtype if self.cache.dtype == "auto" else self.cache.dtype
