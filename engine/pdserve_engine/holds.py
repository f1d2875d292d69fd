"""Holds: prompts that this node has started for receivers which have not granted them yet, and what may become of them.

Each receiver has a share of the blocks: one that does not grant cannot fill the node for the others. A finished prompt
without a grant is only a pinned piece of prefix cache. It goes on generating when there is no prompt to run, and it is
unpinned, the oldest first, when a prompt that has a grant needs room. Knows nothing of messages or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve_engine.request import RequestEvent, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve_engine.kv_cache_manager import KVCacheManager
    from pdserve_engine.request import Request

SHARE = 0.5
"""Of all blocks, for the prompts of one receiver that were started and not granted."""


@dataclass(slots=True)
class HoldChanges:
    """Ids of prompts that were started without a grant, of holds that were unpinned, and that decode on."""

    started: list[str] = field(default_factory=list)
    unpinned: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)


class Holds:
    """Prompts without a grant, in the order in which they were started."""

    def __init__(self, kv: KVCacheManager, decode_on_after_s: float) -> None:
        self._kv = kv
        self._decode_on_after_s = decode_on_after_s
        self._share = int(kv.pool.num_blocks * SHARE)
        self._requests: dict[str, Request] = {}
        self._changes = HoldChanges()

    def add(self, request: Request) -> None:
        """A prompt is started without a grant."""
        self._requests[request.request_id] = request
        self._changes.started.append(request.request_id)

    def discard(self, request: Request) -> None:
        """It is granted, or over."""
        self._requests.pop(request.request_id, None)

    def may_start(self, request: Request) -> bool:
        """Whether the share of its receiver is not full, if it needs one."""
        if not request.hands_over or request.granted:
            return True
        blocks = (self._kv.num_blocks(r.request_id) for r in self._requests.values() if r.receiver == request.receiver)
        return sum(blocks) < max(1, self._share)

    def unpin_oldest(self) -> bool:
        """Gives the blocks of the oldest finished prompt back, though they stay cached; False where there is none."""
        oldest = next(self._finished(), None)
        if oldest is None:
            return False
        self._kv.free(oldest.request_id)
        oldest.num_computed_tokens = 0
        self._changes.unpinned.append(oldest.request_id)
        return True

    def to_decode_on(self, now: float) -> list[Request]:
        """Finished prompts that have waited long enough, and have room for one more token."""
        return [
            request
            for request in self._finished()
            if now - request.events[RequestEvent.HELD] >= self._decode_on_after_s
            and self._kv.append(request, request.num_tokens)
        ]

    def resumed(self, request: Request) -> None:
        """The next token of it is being generated."""
        self._changes.resumed.append(request.request_id)

    def take_changes(self) -> HoldChanges:
        """What has happened since the last time."""
        changes, self._changes = self._changes, HoldChanges()
        return changes

    def _finished(self) -> Iterator[Request]:
        for request in self._requests.values():
            if request.status is RequestStatus.HELD and self._kv.num_blocks(request.request_id):
                yield request
