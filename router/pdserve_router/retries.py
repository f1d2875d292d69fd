"""When an attempt that failed is followed by another one, and which nodes that one leaves out. Pure.

Another attempt gets the tokens that the client has already seen as a forced prefix. Sampling is a function of seed,
choice and position, so it goes on as the first one would have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_router.errors import NodeFailed, NodeLost
from pdserve_router.lifecycle import Half

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pdserve_router.errors import RouterError

MAX_RETRIES = 2
"""Of one choice. A request that kills whoever computes it takes no more nodes along than these and the first."""

_ELSEWHERE = ("stale_boot", "draining", "overloaded", "handoff")


def is_worth_another(error: RouterError) -> bool:
    """Whether other nodes, or fewer, may do what these could not. What a node says of the request itself is final."""
    return isinstance(error, NodeLost) or (isinstance(error, NodeFailed) and error.node_code in _ELSEWHERE)


def to_avoid(error: RouterError, nodes: Mapping[Half, str], decode_nodes: Collection[str]) -> set[str]:
    """Names of nodes that the next attempt leaves out. Dead ones need not be named: they are not there.

    Args:
        nodes: of the attempt that failed.
        decode_nodes: that are there.
    """
    if not isinstance(error, NodeFailed):
        return set()
    if error.node_code != "handoff":
        return {error.node_name}
    # It may be the fault of either. Without another decode node this one can still do without the hand-off.
    others = set(decode_nodes) - {nodes.get(Half.DECODE)}
    return {name for half, name in nodes.items() if half is Half.PREFILL or others}
