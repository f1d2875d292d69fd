"""Tiny random models as Hugging Face folders: the four architectures, made in milliseconds, readable by transformers.

The weights are wide enough that greedy output is varied and far from ties. ``tiny_model`` adds a tokenizer.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def tiny_llama(folder: Path, **options: Any) -> Path:
    """Writes a tiny Llama; options as in ``write_model``. Returns the folder."""
    return write_model(folder, "llama", **options)


def tiny_qwen2(folder: Path, **options: Any) -> Path:
    """Writes a tiny Qwen2 (biases on q, k and v)."""
    return write_model(folder, "qwen2", **options)


def tiny_qwen3(folder: Path, **options: Any) -> Path:
    """Writes a tiny Qwen3 (norms on each head of q and k)."""
    return write_model(folder, "qwen3", **options)


def tiny_mistral(folder: Path, *, sliding_window: int | None = None, **options: Any) -> Path:
    """Writes a tiny Mistral, with attention to the last ``sliding_window`` tokens alone where that is given."""
    return write_model(folder, "mistral", sliding_window=sliding_window, **options)


def tiny_model(folder: Path, architecture: str = "llama", *, vocab_size: int = 512, **options: Any) -> Path:
    """Writes a tiny model and a tokenizer of its vocabulary into one folder."""
    from support.tokenizers import write_tokenizer

    write_model(folder, architecture, vocab_size=vocab_size, **options)
    write_tokenizer(folder, vocab_size)
    return folder


def write_model(
    folder: Path,
    architecture: str,
    *,
    vocab_size: int = 512,
    hidden: int = 64,
    intermediate: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_position_embeddings: int = 4096,
    eos_token_id: int | list[int] | None = 2,
    **config: Any,
) -> Path:
    """Writes config.json, generation_config.json and model.safetensors.

    Args:
        architecture: llama, qwen2, qwen3 or mistral.
        config: further keys of config.json, such as rope_scaling or sliding_window.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": eos_token_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(fields | config, indent=1))
    generation = {"bos_token_id": 1, "eos_token_id": eos_token_id, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    def linear(rows: int, columns: int) -> torch.Tensor:
        return normal(rows, columns, std=2.0 * columns**-0.5)

    def norm(size: int) -> torch.Tensor:
        return (1.0 + 0.2 * torch.randn(size, generator=generator)).to(dtype)

    tensors = {"model.embed_tokens.weight": normal(vocab_size, hidden, std=0.5), "model.norm.weight": norm(hidden)}
    if not tied:
        tensors["lm_head.weight"] = normal(vocab_size, hidden, std=0.5)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": norm(hidden),
            prefix + "post_attention_layernorm.weight": norm(hidden),
            prefix + "self_attn.q_proj.weight": linear(heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": linear(kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": linear(kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": linear(hidden, heads * head_dim),
            prefix + "mlp.gate_proj.weight": linear(intermediate, hidden),
            prefix + "mlp.up_proj.weight": linear(intermediate, hidden),
            prefix + "mlp.down_proj.weight": linear(hidden, intermediate),
        }
        if architecture == "qwen2":
            tensors |= {
                prefix + "self_attn.q_proj.bias": normal(heads * head_dim, std=0.5),
                prefix + "self_attn.k_proj.bias": normal(kv_heads * head_dim, std=0.5),
                prefix + "self_attn.v_proj.bias": normal(kv_heads * head_dim, std=0.5),
            }
        if architecture == "qwen3":
            tensors |= {
                prefix + "self_attn.q_norm.weight": norm(head_dim),
                prefix + "self_attn.k_norm.weight": norm(head_dim),
            }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
