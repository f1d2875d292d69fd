"""The architectures, and what tells them apart from a plain Llama."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve_engine.models.errors import UnknownArchitecture


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How a decoder differs from its relatives.

    Attributes:
        name: as in config.json's ``architectures``.
        qkv_bias: the projections of q, k and v have a bias; None leaves it to config.json's ``attention_bias``.
        qk_norm: an RMS norm on each head of q and k.
        uses_window: config.json's ``sliding_window`` applies to all layers.
        default_window: the window where config.json does not say (transformers' default).
        default_head_dim: the same for ``head_dim``; None for hidden_size / num_attention_heads.
    """

    name: str
    qkv_bias: bool | None = None
    qk_norm: bool = False
    uses_window: bool = False
    default_window: int | None = None
    default_head_dim: int | None = None


_ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(name="LlamaForCausalLM"),
        Architecture(name="MistralForCausalLM", qkv_bias=False, uses_window=True, default_window=4096),
        Architecture(name="Qwen2ForCausalLM", qkv_bias=True),
        Architecture(name="Qwen3ForCausalLM", qk_norm=True, default_head_dim=128),
    )
}


def find_architecture(names: list[str]) -> Architecture:
    """The first known one of config.json's ``architectures``.

    Raises:
        UnknownArchitecture: none is known.
    """
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    raise UnknownArchitecture(names, sorted(_ARCHITECTURES))
