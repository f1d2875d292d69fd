"""When a decode node reserves cache blocks for a prompt that is offered to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve_engine.kv_cache_manager import BlockUsage
    from pdserve_kv_transfer.receiver import GrantPolicy


class GrantWhenRoom:
    """Grants as long as every running request can still get its next block without preempting anyone.

    A request that is alone is granted whatever it needs: it fits, or it would have been refused.

    Args:
        when: blocks are asked for when the prompt is at the head of the sender's queue (``offer``), as soon as the
            request is here (``dispatch``), or not before the prompt is computed (``finished``).
    """

    def __init__(self, when: GrantPolicy = "offer") -> None:
        self.when: GrantPolicy = when

    def may_grant(self, num_blocks: int, usage: BlockUsage, num_running: int) -> bool:
        return usage.free + usage.cached >= num_blocks + num_running or usage.in_use + usage.held == 0
