"""Placement: which nodes take a request, and why it is only one where it could be two.

Joins what the registry knows of nodes with the policies. Sends nothing.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from pdserve_protocol.node import mismatch

from pdserve_router.errors import NotReady
from pdserve_router.lifecycle import Half
from pdserve_router.policy import ALIKE, InTurn, Load, decode_costs, is_quicker_alone, prefill_costs

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pdserve_router.backlog import Backlog
    from pdserve_router.metrics import RouterMetrics
    from pdserve_router.proof import Mode, Reason
    from pdserve_router.registry import Node, ServedModel

log = logging.getLogger(__name__)

_MAX_REMEMBERED_PAIRS = 4096


class Placed(NamedTuple):
    """The nodes of a request by half. ``reason``: why a decode node has it alone, where there are prefill nodes."""

    mode: Mode
    nodes: dict[Half, Node]
    reason: Reason | None = None


class Placement:
    """Args:
    disaggregated: prefill nodes are configured, whether they are there or not.
    local_prefill: decode nodes also compute prompts where that starts a stream earlier.
    """

    def __init__(self, metrics: RouterMetrics, backlog: Backlog, *, disaggregated: bool, local_prefill: bool) -> None:
        self._metrics = metrics
        self._backlog = backlog
        self._disaggregated = disaggregated
        self._local_prefill = local_prefill
        self._prefill_turn, self._decode_turn, self._alone_turn = InTurn(ALIKE), InTurn(), InTurn(ALIKE)
        self._pairs: dict[tuple[str | None, str | None], bool] = {}

    def place(self, served: ServedModel, num_tokens: int, max_tokens: int, avoid: Collection[str] = ()) -> Placed:
        """Nodes for a prompt of ``num_tokens``, after which ``max_tokens`` are generated, without those to ``avoid``.

        Raises:
            NotReady: no node can take it.
        """
        prefill_nodes = [node for node in served.prefill if node.name not in avoid]
        decode_nodes = [node for node in served.decode if node.name not in avoid]
        if max_tokens == 1 and prefill_nodes:
            return Placed("prefill_only", {Half.PREFILL: self._pick_prefill(prefill_nodes, num_tokens)})
        if not decode_nodes:
            raise NotReady("No decode node is up")
        partners = {node.name: [p for p in prefill_nodes if self._match(p, node)] for node in decode_nodes}
        # A link that is not up may be at the start, or never come up: whoever takes it waits.
        linked = {node.name: [p for p in partners[node.name] if _is_linked(p, node)] for node in decode_nodes}
        if any(linked.values()):
            partners = linked
        paired = [node for node in decode_nodes if partners[node.name]]
        decode = self._pick_decode(paired or decode_nodes)
        if not paired:
            reason: Reason = "mismatch" if prefill_nodes else "avoided" if served.prefill else "no_prefill_node"
            return Placed("aggregated", {Half.DECODE: decode}, self._fall_back(decode, reason))
        prefill = self._pick_prefill(partners[decode.name], num_tokens)
        alone = self._quicker_alone(prefill, decode_nodes, num_tokens)
        if alone is not None:
            self._metrics.fallbacks.labels("prefill_busy").inc()
            return Placed("aggregated", {Half.DECODE: alone}, "prefill_busy")
        return Placed("disaggregated", {Half.PREFILL: prefill, Half.DECODE: decode})

    def _pick_prefill(self, nodes: Sequence[Node], num_tokens: int) -> Node:
        return nodes[self._prefill_turn.choose(prefill_costs([self._load(node) for node in nodes], num_tokens))]

    def _pick_decode(self, nodes: Sequence[Node]) -> Node:
        return nodes[self._decode_turn.choose(decode_costs([self._load(node) for node in nodes]))]

    def _quicker_alone(self, prefill: Node, decode_nodes: Sequence[Node], num_tokens: int) -> Node | None:
        """A decode node that would start the same stream clearly earlier than ``prefill``."""
        if not self._local_prefill:
            return None
        busy = self._load(prefill)
        quicker = [
            node
            for node in decode_nodes
            if _gives_the_same(prefill, node) and is_quicker_alone(busy, self._load(node), num_tokens)
        ]
        if not quicker:
            return None
        costs = prefill_costs([self._load(node) for node in quicker], num_tokens)
        return quicker[self._alone_turn.choose(costs)]

    def _fall_back(self, decode: Node, reason: Reason) -> Reason | None:
        if not self._disaggregated:
            return None
        self._metrics.fallbacks.labels(reason).inc()
        log.warning("no usable prefill node (%s): decode node %s takes the whole request", reason, decode.name)
        return reason

    def _load(self, node: Node) -> Load:
        said, info = node.load, node.info
        rate = said.prompt_tokens_per_s if said else 0.0
        free_tokens = info.kv_capacity_tokens if info else 0
        if said and info:
            free_tokens = (said.blocks_free + said.blocks_cached) * info.identity.layout.block_size
        return Load(
            attempts=self._backlog.attempts(node.name),
            pending_tokens=self._backlog.pending_tokens(node.name),
            # A node's numbers are foreign.
            tokens_per_s=rate if 0 < rate < inf else 0.0,
            computed_share=self._backlog.computed_share(node.name),
            free_tokens=free_tokens,
            requests=self._backlog.pending_attempts(node.name) + (said.running + said.waiting if said else 0),
            max_num_seqs=info.max_num_seqs if info else 0,
        )

    def _match(self, prefill: Node, decode: Node) -> bool:
        """Whether KV of one can be used by the other; said once in the log where it cannot."""
        if prefill.info is None or decode.info is None:
            return False
        pair = (prefill.boot_id, decode.boot_id)
        if pair not in self._pairs:
            if len(self._pairs) >= _MAX_REMEMBERED_PAIRS:
                self._pairs.clear()
            difference = mismatch(prefill.info.identity, decode.info.identity)
            self._pairs[pair] = difference is None
            if difference is not None:
                log.error("%s and %s are not paired: %s", prefill.name, decode.name, difference)
        return self._pairs[pair] and not _link(prefill, decode).startswith("refused")


def _link(prefill: Node, decode: Node) -> str:
    """What the prefill node last said of the link between the two; empty where it said nothing."""
    return prefill.load.links.get(decode.boot_id or "", "") if prefill.load else ""


def _is_linked(prefill: Node, decode: Node) -> bool:
    """Whether the link is up, as far as is known: a node that has not answered a ping yet has said nothing."""
    return prefill.load is None or _link(prefill, decode) == "up"


def _gives_the_same(prefill: Node, decode: Node) -> bool:
    """Whether ``decode`` alone makes what it makes after ``prefill``: load must not decide which answer it is."""
    if prefill.info is None or decode.info is None:
        return False
    ours, theirs = prefill.info.identity, decode.info.identity
    return ours.numerics == theirs.numerics and ours.kv_wire_dtype in ("auto", ours.layout.dtype)
