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
offset ``p % S``. A quantized cache holds codes, int8 or float8_e4m3fn, and has its scales between the blocks
(quantized_cache.py): keys and values are rounded as they are written, and attention sees what the codes say, rounded to
the dtype of the queries.

All operations run on the device of their arguments and return tensors of the dtype of ``x`` unless they say otherwise.
Sums are accumulated in float32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Quantization = Literal["int8"]
"""How the weights of the layers are kept, where not in the dtype of everything else."""


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
        norm_eps: of all norms.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """A layer of a decoder, its matrices as the backend packed them."""

    input_norm_E: torch.Tensor
    qkv: PackedLinear
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    output: PackedLinear
    mlp_norm_E: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """``head``: packed for float32 results."""

    embedding_VE: torch.Tensor
    layers: list[LayerWeights]
    norm_E: torch.Tensor
    head: PackedLinear


class DecoderForward(Protocol):
    """A step of a whole decoder."""

    def __call__(
        self,
        token_ids_T: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        logits_rows_N: torch.Tensor,
    ) -> torch.Tensor:
        """Computes the tokens of a step and writes their keys and values to ``kv_cache``.

        Args:
            token_ids_T: int32.
            logits_rows_N: rows of T whose logits are wanted, int64.

        Returns:
            Logits, float32 [N, V], valid until the next call.
        """
        ...


class Backend(Protocol):
    """The operations of a decoder. Stateless but for what it packs; steps do not overlap.

    Attributes:
        graph_safe: a step of one token for each request launches the same kernels whatever its tensors hold, and copies
            nothing from the host, so that a CUDA graph can repeat it. Rows that pad such a step to the size of a graph
            are known by slot -1 and length 0: they write nothing to the cache.
        kv_order: axes of a block in memory, the outermost first: G KV heads, L layers, 2 K|V, S tokens, D dimension.
            As a tensor every cache is [B, G, L, 2, S, D], a view where its memory has another order.
    """

    graph_safe: bool
    kv_order: str

    def set_threads(self, count: int) -> None:
        """Computes with this many threads from now on, in all of the process."""
        ...

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

    def pack_gate_up(self, weight_2FE: torch.Tensor) -> PackedLinear:
        """The weights of gate and up, gate first, made ready for ``gated_linear``."""
        ...

    def decoder(self, weights: DecoderWeights, spec: AttentionSpec) -> DecoderForward:
        """All operations below put together, in the order of operations.DecoderOfOperations."""
        ...

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, in] -> x @ weight.T + bias [T, out]."""
        ...

    def rms_norm(
        self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, residual_TE: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual) * weight, x + residual). Both [T, E]. May overwrite ``x`` and ``residual``."""
        ...

    def gated_linear(self, x_TE: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """silu(x @ gate.T) * (x @ up.T) [T, F]."""
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
