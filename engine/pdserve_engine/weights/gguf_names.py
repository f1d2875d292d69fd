"""What GGUF calls the fields and tensors of a decoder, and what Hugging Face calls them.

Sources: the tables of the ``gguf`` package; the reordering of Llama's q and k rows in llama.cpp, which is undone here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
} | {f"attn_{name}.{kind}": f"self_attn.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")}


def tensor_name(name: str) -> str | None:
    """The Hugging Face name; None for a tensor that is not known."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _LAYER:
        return None
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}"


def config_fields(fields: Mapping[str, Any], *, tied: bool, vocab_size: int) -> dict[str, Any]:
    """config.json of the metadata of a GGUF file.

    Raises:
        KeyError: a field is missing.
    """
    arch = str(fields["general.architecture"])
    class_name, model_type = ARCHITECTURES[arch]
    hidden, heads = fields[f"{arch}.embedding_length"], fields[f"{arch}.attention.head_count"]
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": fields[f"{arch}.feed_forward_length"],
        "num_hidden_layers": fields[f"{arch}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": fields.get(f"{arch}.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields[f"{arch}.context_length"],
        # The field is a float32; its shortest decimal is what the model was made with.
        "rms_norm_eps": float(f"{fields[f'{arch}.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields.get(f"{arch}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    scaling = fields.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling, "factor": fields[f"{arch}.rope.scaling.factor"]}
        original = fields.get(f"{arch}.rope.scaling.original_context_length")
        if original and scaling == "yarn":
            config["rope_scaling"]["original_max_position_embeddings"] = original
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = fields.get(f"tokenizer.ggml.{name}_token_id")
    return config


def heads_to_permute(arch: str, name: str, config: Mapping[str, Any]) -> int | None:
    """Heads of a tensor whose rows llama.cpp reordered for its own RoPE; None for one that it left alone."""
    if arch != "llama":
        return None
    if re.search(r"\.attn_q\.", name):
        return int(config["num_attention_heads"])
    if re.search(r"\.attn_k\.", name):
        return int(config["num_key_value_heads"])
    return None


def unpermute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Interleaved pairs of rows (x0 y0 x1 y1 ...) of each head back to two halves (x0 x1 ... y0 y1 ...)."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
