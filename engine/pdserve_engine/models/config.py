"""config.json, read and checked: what a decoder needs to know, and a refusal by name of what is not built.

Sources: the configuration classes of transformers (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config), both the
older fields ``rope_theta`` and ``rope_scaling`` and the newer ``rope_parameters``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve_engine.models.errors import BadConfig, UnsupportedConfig
from pdserve_engine.models.registry import Architecture, find_architecture

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """``kind``: default, linear, llama3 or yarn. ``options``: the further fields of that kind."""

    theta: float
    kind: str = "default"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder.

    Attributes:
        max_position_embeddings: positions the model was made for.
        sliding_window: tokens that a token sees, itself included; None for all before it.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    sliding_window: int | None


def read_config(folder: Path) -> DecoderConfig:
    """Reads ``folder``/config.json.

    Raises:
        UnknownArchitecture, UnsupportedConfig, BadConfig
    """
    return parse_config(json.loads((folder / "config.json").read_text()))


def parse_config(fields: dict[str, Any]) -> DecoderConfig:
    """The meaning of a config.json. Raises as read_config does."""
    architecture = find_architecture(list(fields.get("architectures") or []))
    _refuse(fields)
    hidden_size = _positive(fields, "hidden_size")
    num_heads = _positive(fields, "num_attention_heads")
    num_kv_heads = _positive(fields, "num_key_value_heads", num_heads)
    head_dim = _positive(fields, "head_dim", architecture.default_head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise BadConfig("num_attention_heads", f"({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})")
    if head_dim % 2:
        raise BadConfig("head_dim", f"({head_dim}) is odd")
    attention_bias = bool(fields.get("attention_bias", False))
    qkv_bias = attention_bias if architecture.qkv_bias is None else architecture.qkv_bias
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(fields, "intermediate_size"),
        num_layers=_positive(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_positive(fields, "max_position_embeddings"),
        rope=_rope(fields),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        output_bias=qkv_bias and architecture.qkv_bias is None,
        sliding_window=_window(fields, architecture),
    )


def _refuse(fields: dict[str, Any]) -> None:
    if fields.get("hidden_act", "silu") != "silu":
        raise UnsupportedConfig("hidden_act", fields["hidden_act"], "silu")
    if fields.get("mlp_bias"):
        raise UnsupportedConfig("mlp_bias", True, "false")
    if fields.get("use_sliding_window"):
        raise UnsupportedConfig("use_sliding_window", True, "false")
    if fields.get("quantization_config"):
        raise UnsupportedConfig("quantization_config", fields["quantization_config"], "none")
    layer_types = set(fields.get("layer_types") or [])
    if len(layer_types) > 1:
        raise UnsupportedConfig("layer_types", sorted(layer_types), "the same for all layers")


def _window(fields: dict[str, Any], architecture: Architecture) -> int | None:
    if not architecture.uses_window or ("sliding_window" in fields and fields["sliding_window"] is None):
        return None
    return _positive(fields, "sliding_window", architecture.default_window)


def _positive(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise BadConfig(name, "is missing")
    if not isinstance(value, int) or value < 1:
        raise BadConfig(name, f"({value!r}) is not a positive integer")
    return value


def _rope(fields: dict[str, Any]) -> RopeConfig:
    source = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    options = dict(fields.get(source) or {})
    if any(isinstance(value, dict) for value in options.values()):
        raise UnsupportedConfig(source, options, "the same for all layers")
    theta = options.pop("rope_theta", None) or fields.get("rope_theta") or 10000.0
    older_kind = options.pop("type", None)
    kind = options.pop("rope_type", older_kind) or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedConfig(f"{source}.rope_type", kind, "default, linear, llama3, yarn")
    partial = options.pop("partial_rotary_factor", None) or fields.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedConfig("partial_rotary_factor", partial, "1.0")
    options = {name: value for name, value in options.items() if value is not None}
    known = {
        "default": set(),
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        "yarn": {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
        },
    }[kind]
    for name in sorted(set(options) - known):
        raise UnsupportedConfig(
            f"{source}.{name}", options[name], f"for {kind}: {', '.join(sorted(known)) or 'nothing'}"
        )
    required = {
        "default": set(),
        "linear": {"factor"},
        "llama3": known,
        "yarn": {"factor"},
    }[kind]
    for name in sorted(required - set(options)):
        raise BadConfig(f"{source}.{name}", f"is missing for {kind}")
    return RopeConfig(theta=float(theta), kind=kind, options=options)
