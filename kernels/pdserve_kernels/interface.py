"""What a forward pass needs of a backend.

Letters in shapes:

    T   tokens of this step, all requests one after another
    R   requests of this step
    B   KV blocks of the cache
    P   KV blocks of the longest request of this step
    S   tokens per KV block
    L   layers
    H   query heads
    G   KV heads
    D   dimension of a head
    E   hidden size
    F   size of the feed-forward layer
    V   vocabulary
    M   positions in the RoPE tables

The KV cache is one contiguous tensor [B, G, L, 2, S, D], keys at index 0 and values at index 1, so that a block of all
layers, and a shard of its heads, is one run of memory. Token p of a request lies in block ``block_table[p // S]`` at
offset ``p % S``.

All operations run on the device of their arguments and return tensors of the dtype of ``x`` unless they say otherwise.
Sums are accumulated in float32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where the tokens of a step belong. int32 tensors, on the device, that the caller may reuse after the step.

    Attributes:
        positions_T: position of each token in its request, from 0.
        slots_T: where its keys and values go: block id * S + offset.
        query_start_R1: [R + 1], first token of each request in T, and T.
        seq_lens_R: tokens of each request whose KV exists after this step; its queries are the last ones of them.
        block_tables_RP: block ids; entries past a request's length mean nothing.
        query_lens: tokens of each request in this step, on the host.
        seq_lens: seq_lens_R on the host.
    """

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    query_start_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_tables_RP: torch.Tensor
    query_lens: list[int]
    seq_lens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What does not change between the steps and layers of a model.

    Attributes:
        scale: factor of the scores before the softmax.
        sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it; None sees all before it.
        cos_MD, sin_MD: float32 RoPE tables [M, D / 2].
        norm_eps: of the norms on the heads of q and k.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    cos_MD: torch.Tensor
    sin_MD: torch.Tensor
    norm_eps: float


Plan = Any
"""What a backend works out once per step and uses in every layer; opaque to callers."""

PackedLinear = Any
"""A weight in the order that suits a backend; opaque to callers."""


class Backend(Protocol):
    """The operations of a decoder. Stateless but for what it packs; steps do not overlap."""

    def fingerprint(self, dtype: torch.dtype) -> str:
        """Names all that decides the bits of a result beside weights and inputs. Equal strings mean equal bits."""
        ...

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, float32_output: bool = False
    ) -> PackedLinear:
        """A weight [out, in] and bias [out], made ready for ``linear``; the originals may be dropped.

        ``float32_output``: results are float32, not rounded to the dtype of the weight (logits).
        """
        ...

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, in] -> x @ weight.T + bias [T, out]."""
        ...

    def rms_norm(
        self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, residual_TE: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual) * weight, x + residual). Both [T, E]. May overwrite ``x`` and ``residual``."""
        ...

    def silu_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """[T, 2F], gate before up -> silu(gate) * up [T, F]."""
        ...

    def plan(self, metadata: AttentionMetadata, spec: AttentionSpec, kv_cache: torch.Tensor) -> Plan:
        """Everything about a step that all layers share."""
        ...

    def rope_and_write_kv(
        self,
        qkv: torch.Tensor,
        layer: int,
        plan: Plan,
        q_norm_D: torch.Tensor | None = None,
        k_norm_D: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norms each head of q and k (where weights are given), rotates q and k, and writes k and v to the cache.

        Rotation pairs dimension i with i + D / 2 (GPT-NeoX order).

        Args:
            qkv: [T, (H + 2G) * D], queries, keys, values.

        Returns:
            q [T, H, D].
        """
        ...

    def paged_attention(self, q_THD: torch.Tensor, layer: int, plan: Plan) -> torch.Tensor:
        """Each query attends to the cached tokens of its request up to itself. Returns [T, H * D]."""
        ...
