"""WaitingQueue: requests that wait for their first or next step, in the order in which they get one.

First those whose KV has arrived, which have their blocks; then preempted ones, the latest first; then granted ones;
then all others by priority. Equals come in the order in which they were added. Whose grammar is being compiled waits
behind them all. Knows nothing of blocks or steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from pdserve_engine.request import RequestEvent, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve_engine.request import Request

_ARRIVED, _PREEMPTED, _GRANTED, _NEW, _NOT_READY = range(5)


def _rank(request: Request) -> tuple[int, int]:
    if request.waits_for_grammar:
        return _NOT_READY, 0
    if request.status is RequestStatus.PREEMPTED:
        return _PREEMPTED, 0
    if RequestEvent.KV_ARRIVED in request.events:
        return _ARRIVED, 0
    return (_GRANTED, 0) if request.granted else (_NEW, request.priority)


class WaitingQueue:
    """Requests that are WAITING or PREEMPTED. What their order follows from changes only while they are not here."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_arrived(self) -> int:
        """Of these, those whose KV has arrived."""
        return self._num_before(_PREEMPTED)

    @property
    def has_preempted(self) -> bool:
        """Whether one that gave up its blocks waits for new ones."""
        head = next(self.to_start(), None)
        return head is not None and head.status is RequestStatus.PREEMPTED

    def first_arrived(self) -> Request | None:
        """The first one whose KV has arrived."""
        return self._requests[0] if self.num_arrived else None

    def to_start(self) -> Iterator[Request]:
        """Those that need blocks."""
        return (self._requests[index] for index in range(self.num_arrived, self._num_before(_NOT_READY)))

    def add(self, request: Request) -> None:
        """Puts a request in its place."""
        find = bisect_left if request.status is RequestStatus.PREEMPTED else bisect_right
        self._requests.insert(find(self._requests, _rank(request), key=_rank), request)

    def discard(self, request: Request) -> bool:
        """It does not wait any more; False where it did not."""
        if request not in self._requests:
            return False
        self._requests.remove(request)
        return True

    def _num_before(self, rank: int) -> int:
        return bisect_left(self._requests, (rank, 0), key=_rank)
