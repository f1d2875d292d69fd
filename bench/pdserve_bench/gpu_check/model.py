"""A Qwen3 of random weights, written as a Hugging Face folder that a node can load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> int:
        """Of what a decode step reads, in bfloat16; the embedding is the output matrix too."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return 2 * (self.num_layers * layer + self.hidden_size * self.vocab_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """In bfloat16, all layers."""
        return 4 * self.num_layers * self.num_kv_heads * self.head_dim


QWEN3_0_6B = Shape(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
)
TINY = Shape(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32
)


def write_model(folder: Path, shape: Shape, max_model_len: int) -> None:
    """config.json, model.safetensors (bfloat16) and a tokenizer that nobody uses."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    save_file(_weights(shape), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(shape: Shape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5).bfloat16()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": matrix(shape.vocab_size, hidden), "model.norm.weight": ones(hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": ones(hidden),
            f"{prefix}post_attention_layernorm.weight": ones(hidden),
            f"{prefix}self_attn.q_proj.weight": matrix(queries, hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(keys, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(keys, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, queries),
            f"{prefix}self_attn.q_norm.weight": ones(shape.head_dim),
            f"{prefix}self_attn.k_norm.weight": ones(shape.head_dim),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights
