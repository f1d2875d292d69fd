"""What the nodes say of themselves, as metrics of the router: each asked when it is scraped, with a deadline.

A node that does not answer in time is left out, and so is what a node says that is no metric. Names begin with
``pdserve_node_``; ``node`` is the address that the router was given, ``peer`` how the node calls its peer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from itertools import accumulate
from typing import TYPE_CHECKING

from pdserve_protocol.errors import ProtocolError
from pdserve_protocol.node import GetStatus, NodeStatus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from pdserve_router.registry import Node

log = logging.getLogger(__name__)

DEADLINE_S = 1.0
FRESH_S = 1.0
"""Scrapes that follow one another faster see the same numbers."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_BLOCK_STATES = ("free", "cached", "held", "in_use")


class NodeMetrics(Collector):
    """Args:
    nodes: gives those that are there.
    """

    def __init__(self, nodes: Callable[[], Sequence[Node]]) -> None:
        self._nodes = nodes
        self._statuses: dict[str, NodeStatus] = {}
        self._asked_at = -FRESH_S
        self._asking = asyncio.Lock()

    async def refresh(self) -> None:
        """Ask all nodes at once, unless that was done just now. Takes no longer than the deadline."""
        async with self._asking:
            if time.monotonic() - self._asked_at < FRESH_S:
                return
            nodes = [node for node in self._nodes() if node.info is not None]
            statuses = await asyncio.gather(*map(_ask, nodes))
            self._statuses = {node.name: status for node, status in zip(nodes, statuses, strict=True) if status}
            self._asked_at = time.monotonic()

    def collect(self) -> Iterable[Metric]:
        """Of the last answers. A metric has the values of all nodes."""
        families: dict[str, Metric] = {}
        for node, status in self._statuses.items():
            for family in _families(node, status):
                known = families.setdefault(family.name, family)
                if known is not family and known.type == family.type:
                    known.samples += family.samples
        return families.values()


async def _ask(node: Node) -> NodeStatus | None:
    try:
        status: NodeStatus = await node.client.ask(GetStatus(), DEADLINE_S)
    except ProtocolError as error:
        log.warning("no status from %s: %s", node.name, error)
        return None
    return status


def _families(node: str, status: NodeStatus) -> Iterator[Metric]:
    """One value of each metric, or one a peer."""
    load = status.load
    for state in _BLOCK_STATES:
        yield _gauge("blocks", "KV blocks by state", getattr(load, f"blocks_{state}"), node=node, state=state)
    for name in ("running", "waiting", "handoffs"):
        yield _gauge(name, f"Requests: {name}", getattr(load, name), node=node)
    for name, value in status.gauges.items():
        if _NAME.fullmatch(name):
            yield _gauge(name, "At the moment", value, node=node)
    for name, value in status.counters.items():
        if _NAME.fullmatch(name):
            yield _counter(name, "Since the node's start", value, node=node)
    for peer, counters in status.peer_counters.items():
        for name, value in counters.items():
            if _NAME.fullmatch(name):
                yield _counter(f"peer_{name}", "By peer, since the node's start", value, node=node, peer=peer)
    for name, histogram in status.histograms.items():
        bounds, counts = histogram.bounds, histogram.counts
        if _NAME.fullmatch(name) and len(counts) == len(bounds) + 1 and bounds == sorted(set(bounds)):
            name = f"pdserve_node_handoff_{name.removesuffix('_s')}_seconds"
            family = HistogramMetricFamily(name, "Part of a hand-off", labels=["node"])
            names = [*map(str, bounds), "+Inf"]
            family.add_metric([node], list(zip(names, map(float, accumulate(counts)), strict=True)), histogram.sum)
            yield family


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(f"pdserve_node_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, value: float, **labels: str) -> Metric:
    family = CounterMetricFamily(f"pdserve_node_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
