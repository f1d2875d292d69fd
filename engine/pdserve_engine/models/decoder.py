"""One decoder for Llama, Mistral, Qwen2 and Qwen3: weights as the backend wants them, and the forward pass.

Letters in shapes as in pdserve_kernels.interface; N: rows whose logits are wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pdserve_kernels.interface import AttentionSpec, DecoderWeights, LayerWeights

from pdserve_engine.models.errors import WeightsMismatch
from pdserve_engine.models.rope import rope_tables

if TYPE_CHECKING:
    from pdserve_kernels.interface import AttentionMetadata, Backend

    from pdserve_engine.models.config import DecoderConfig


class Decoder:
    """A loaded model.

    Args:
        weights: tensors by their Hugging Face names, all of one dtype. Taken out of the dict as they are packed, so
            that a weight is not in memory twice.
        max_model_len: positions the RoPE tables reach to.

    Raises:
        WeightsMismatch: a tensor is missing or has another shape than the config says.
    """

    def __init__(
        self, config: DecoderConfig, weights: dict[str, torch.Tensor], backend: Backend, max_model_len: int
    ) -> None:
        self.config = config
        self._backend = backend
        take = _Taker(weights)
        hidden, head_dim = config.hidden_size, config.head_dim
        embedding_VE = take("model.embed_tokens.weight", config.vocab_size, hidden)
        layers = [self._pack_layer(take, f"model.layers.{index}.") for index in range(config.num_layers)]
        norm_E = take("model.norm.weight", hidden)
        head_VE = embedding_VE if config.tied_embeddings else take("lm_head.weight", config.vocab_size, hidden)
        # Made on the CPU, so that an angle does not depend on the device.
        cos_MD, sin_MD = (table.to(embedding_VE.device) for table in rope_tables(config, max_model_len))
        spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            sliding_window=config.sliding_window,
            cos_MD=cos_MD,
            sin_MD=sin_MD,
            norm_eps=config.norm_eps,
        )
        head = backend.pack_linear(head_VE, float32_output=True)
        packed = DecoderWeights(embedding_VE=embedding_VE, layers=layers, norm_E=norm_E, head=head)
        self._forward = backend.decoder(packed, spec)

    def _pack_layer(self, take: _Taker, prefix: str) -> LayerWeights:
        config, pack = self.config, self._backend.pack_linear
        hidden, head_dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
        rows = {
            "q": config.num_heads * head_dim,
            "k": config.num_kv_heads * head_dim,
            "v": config.num_kv_heads * head_dim,
        }
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv_bias = output_bias = q_norm_D = k_norm_D = None
        if config.qkv_bias:
            qkv_bias = torch.cat([take(f"{attention}{name}_proj.bias", size) for name, size in rows.items()])
        if config.output_bias:
            output_bias = take(attention + "o_proj.bias", hidden)
        if config.architecture.qk_norm:
            q_norm_D = take(attention + "q_norm.weight", head_dim)
            k_norm_D = take(attention + "k_norm.weight", head_dim)
        qkv = torch.cat([take(f"{attention}{name}_proj.weight", size, hidden) for name, size in rows.items()])
        gate_up = torch.cat([take(f"{mlp}{name}_proj.weight", inner, hidden) for name in ("gate", "up")])
        return LayerWeights(
            input_norm_E=take(prefix + "input_layernorm.weight", hidden),
            qkv=pack(qkv, qkv_bias),
            q_norm_D=q_norm_D,
            k_norm_D=k_norm_D,
            output=pack(take(attention + "o_proj.weight", hidden, rows["q"]), output_bias),
            mlp_norm_E=take(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._backend.pack_gate_up(gate_up),
            down=pack(take(mlp + "down_proj.weight", hidden, inner)),
        )

    def forward(
        self,
        token_ids_T: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        logits_rows_N: torch.Tensor,
    ) -> torch.Tensor:
        """Computes the tokens of a step and writes their keys and values to ``kv_cache`` [B, G, L, 2, S, D].

        Args:
            token_ids_T: int32.
            logits_rows_N: rows of T whose logits are wanted, int64.

        Returns:
            Logits, float32 [N, V], valid until the next call.
        """
        return self._forward(token_ids_T, metadata, kv_cache, logits_rows_N)


class _Taker:
    """Takes tensors out of a dict and checks their shapes."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._weights.pop(name, None)
        if tensor is None or tuple(tensor.shape) != shape:
            raise WeightsMismatch(name, shape, tuple(tensor.shape) if tensor is not None else None)
        return tensor
