"""Who a node is, how loaded it is, and the tokenizer it hands to routers."""

from __future__ import annotations

import math
from typing import Literal

from pdserve_protocol.codec import PROTOCOL_VERSION, Message, Record

Role = Literal["prefill", "decode"]


KV_ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int8": 1, "fp8": 1}
SCALED_KV_DTYPES = {"int8", "fp8"}
"""Codes of 8 bits, fp8 being e4m3: each row of head_dim of them has a float32 scale, and a number is code * scale."""

MAX_HEAD_DIM = 1024


def kv_block_bytes(num_rows: int, head_dim: int, dtype: str) -> int:
    """Bytes of ``num_rows`` rows; where they have scales, these follow from a multiple of four bytes on."""
    values_bytes = num_rows * head_dim * KV_ITEM_BYTES[dtype]
    return -(-values_bytes // 4) * 4 + 4 * num_rows if dtype in SCALED_KV_DTYPES else values_bytes


class KVLayout(Record, frozen=True):
    """Shape of one KV block, one contiguous run.

    Attributes:
        dtype: of KV_ITEM_BYTES.
        block_bytes: as ``kv_block_bytes`` has it.
        order: of its axes, the outermost first: G KV heads, L layers, 2 K|V, S tokens, D dimension, which is last.
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_bytes: int
    order: str = "GL2SD"

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes in the order in which they lie."""
        sizes = {
            "G": self.num_kv_heads,
            "L": self.num_layers,
            "2": 2,
            "S": self.block_size,
            "D": self.head_dim,
        }
        return tuple(sizes[axis] for axis in self.order)

    def fault(self) -> str | None:
        """What is wrong with a layout that somebody else sent."""
        sizes = (self.block_size, self.num_layers, self.num_kv_heads, self.head_dim)
        if min(sizes) < 1 or self.head_dim > MAX_HEAD_DIM:
            return f"no block has {self}"
        if self.dtype not in KV_ITEM_BYTES:
            return f"unknown dtype {self.dtype}"
        if sorted(self.order) != sorted("GL2SD") or not self.order.endswith("D"):
            return f"unknown order {self.order}"
        if self.block_bytes != kv_block_bytes(2 * math.prod(sizes[:3]), self.head_dim, self.dtype):
            return f"{self.block_bytes} bytes are not {self}"
        return None


class NodeIdentity(Record, frozen=True):
    """What must agree between two nodes, or between a node and a router, and what tells them apart.

    Attributes:
        boot_id: fresh at each start of the process.
        model_id: hash of configuration and weights.
        tokenizer_id: hash of tokenizer, chat template, end ids and generation defaults.
        numerics: fingerprint of what decides the bits of a result: kernel path and version, dtype.
        digest: name of the digest of landed blocks.
        connectors: names of the KV connectors the node can use, best first.
        kv_wire_dtype: how numbers of KV travel from and to this node; ``auto``: as the sender caches them.
        kv_encrypt: blocks are sealed on the way.
    """

    boot_id: str
    role: Role
    model_id: str
    tokenizer_id: str
    numerics: str
    layout: KVLayout
    digest: str
    connectors: list[str]
    version: int = PROTOCOL_VERSION
    kv_wire_dtype: str = "auto"
    kv_encrypt: bool = False


_MUST_AGREE = {
    "version": "",
    "model_id": " (configuration, rope or weights)",
    "tokenizer_id": " (vocabulary, chat template or end ids)",
    "digest": "",
    "kv_wire_dtype": "",
    "kv_encrypt": "",
}
_MUST_AGREE_OF_LAYOUT = ("num_layers", "num_kv_heads", "head_dim")


def mismatch(ours: NodeIdentity, theirs: NodeIdentity) -> str | None:
    """Why KV of one node cannot be used by the other, naming the first difference; None where it can.

    Unlike block sizes, orders of axes and dtypes are no difference: they are converted when a block lands.
    """
    for name, what in _MUST_AGREE.items():
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name}{what} differs: {getattr(ours, name)} and {getattr(theirs, name)}"
    for name in _MUST_AGREE_OF_LAYOUT:
        if getattr(ours.layout, name) != getattr(theirs.layout, name):
            return f"KV {name} differs: {getattr(ours.layout, name)} and {getattr(theirs.layout, name)}"
    for identity in (ours, theirs):
        fault = identity.layout.fault()
        if fault is not None:
            return f"KV layout of a {identity.role} node: {fault}"
    if not set(ours.connectors) & set(theirs.connectors):
        return f"no KV connector in common: {ours.connectors} and {theirs.connectors}"
    return None


class Hello(Message, frozen=True):
    """A router (or a command) introduces itself; the node answers NodeInfo."""

    version: int = PROTOCOL_VERSION


class NodeInfo(Message, frozen=True):
    """Who the node is and what it can take.

    Attributes:
        port: of the node's door.
        advertise_host: where peers reach the node, if the operator said so; else the host the router used.
        max_model_len: prompt and output tokens of one request at most.
        kv_capacity_tokens: tokens the KV cache holds; prompt + max_tokens beyond it never fit.
        max_num_seqs: requests that run at the same time at most; 0: not known.
    """

    identity: NodeIdentity
    served_model_name: str
    port: int
    advertise_host: str | None
    max_model_len: int
    kv_capacity_tokens: int
    vocab_size: int
    software: str
    max_num_seqs: int = 0


class Ping(Message, frozen=True):
    """Every second from each router, the router's sign of life; the node answers NodeLoad."""


class NodeLoad(Message, frozen=True):
    """How busy a node is. Blocks add up: free + cached + held + in_use = total.

    Attributes:
        blocks_cached: reusable, nobody's; evicted when room is needed.
        blocks_held: kept for a hand-off only.
        handoffs: open ones, both directions.
        links: boot id of a node that this one hands over to -> "connecting", "up", or "refused: " and why.
        prompt_tokens_per_s: at which it computes prompts by what the last steps took: alone on a prefill node, beside
            however many streams on a decode node. 0 where that is not measured yet.
    """

    boot_id: str
    draining: bool
    running: int
    waiting: int
    handoffs: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_in_use: int
    links: dict[str, str] = {}
    prompt_tokens_per_s: float = 0.0


class GetTokenizer(Message, frozen=True):
    """Answered by TokenizerFiles."""


class TokenizerFiles(Message, frozen=True):
    """All that a router needs to turn text into tokens and back; ``files`` by name, as in a Hugging Face folder."""

    tokenizer_id: str
    files: dict[str, bytes]


class GetStatus(Message, frozen=True):
    """Answered by NodeStatus."""


class Histogram(Record, frozen=True):
    """Counts of values up to each of ``bounds`` and above the one before; the last count is of those above all.

    ``sum`` is of the values.
    """

    bounds: list[float]
    counts: list[int]
    sum: float


class NodeStatus(Message, frozen=True):
    """For ``pdserve node status``.

    Attributes:
        counters: since the start: prompt tokens by source, generated tokens, requests by their end, hand-offs.
        peers: node -> state of the link.
        peer_counters: node -> what was handed over to it and taken over from it, since the start.
        histograms: seconds of hand-offs, by part.
        gauges: what is at the moment.
    """

    info: NodeInfo
    load: NodeLoad
    uptime_s: float
    counters: dict[str, float]
    peers: dict[str, str]
    peer_counters: dict[str, dict[str, float]] = {}
    histograms: dict[str, Histogram] = {}
    gauges: dict[str, float] = {}


class ResetPrefixCache(Message, frozen=True):
    """Forget all cached blocks; answered by PrefixCacheReset."""


class PrefixCacheReset(Message, frozen=True):
    """``blocks_left`` cached blocks could not be forgotten because they are in use."""

    blocks_forgotten: int
    blocks_left: int
