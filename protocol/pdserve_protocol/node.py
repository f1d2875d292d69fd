"""Who a node is, how loaded it is, and the tokenizer it hands to routers."""

from __future__ import annotations

from typing import Literal

from pdserve_protocol.codec import PROTOCOL_VERSION, Message, Record

Role = Literal["prefill", "decode"]


class KVLayout(Record, frozen=True):
    """Shape of one KV block, contiguous as [kv_head, layer, K|V, token, dim]."""

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_bytes: int


class NodeIdentity(Record, frozen=True):
    """What must agree between two nodes, or between a node and a router, and what tells them apart.

    Attributes:
        boot_id: fresh at each start of the process.
        model_id: hash of configuration and weights.
        tokenizer_id: hash of tokenizer, chat template, end ids and generation defaults.
        numerics: fingerprint of what decides the bits of a result: kernel path and version, dtype.
        digest: name of the digest of landed blocks.
        connectors: names of the KV connectors the node can use, best first.
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


def mismatch(ours: NodeIdentity, theirs: NodeIdentity) -> str | None:
    """Why KV of one node cannot be used by the other, naming the first difference; None where it can."""
    for name in ("version", "model_id", "tokenizer_id", "digest"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name} differs: {getattr(ours, name)} and {getattr(theirs, name)}"
    for name in KVLayout.__struct_fields__:
        if getattr(ours.layout, name) != getattr(theirs.layout, name):
            return f"KV {name} differs: {getattr(ours.layout, name)} and {getattr(theirs.layout, name)}"
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
    """

    identity: NodeIdentity
    served_model_name: str
    port: int
    advertise_host: str | None
    max_model_len: int
    kv_capacity_tokens: int
    vocab_size: int
    software: str


class Ping(Message, frozen=True):
    """Every second from each router, the router's sign of life; the node answers NodeLoad."""


class NodeLoad(Message, frozen=True):
    """How busy a node is. Blocks add up: free + cached + held + in_use = total.

    Attributes:
        blocks_cached: reusable, nobody's; evicted when room is needed.
        blocks_held: kept for a hand-off only.
        handoffs: open ones, both directions.
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


class GetTokenizer(Message, frozen=True):
    """Answered by TokenizerFiles."""


class TokenizerFiles(Message, frozen=True):
    """All that a router needs to turn text into tokens and back; ``files`` by name, as in a Hugging Face folder."""

    tokenizer_id: str
    files: dict[str, bytes]


class GetStatus(Message, frozen=True):
    """Answered by NodeStatus."""


class NodeStatus(Message, frozen=True):
    """For ``pdserve node status``.

    ``counters`` count since the start: prompt tokens by source, generated tokens, requests by their end, hand-offs.
    """

    info: NodeInfo
    load: NodeLoad
    uptime_s: float
    counters: dict[str, float]
    peers: dict[str, str]


class ResetPrefixCache(Message, frozen=True):
    """Forget all cached blocks; answered by PrefixCacheReset."""


class PrefixCacheReset(Message, frozen=True):
    """``blocks_left`` cached blocks could not be forgotten because they are in use."""

    blocks_forgotten: int
    blocks_left: int
