"""A door that loses, repeats and delays messages to other nodes, by a seed. For drills; a node says so when it starts.

What routers and commands are told is left alone: what they are to stand is not what a drill of the hand-off asks.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import time
from typing import TYPE_CHECKING

from pdserve_protocol.handoff import PeerMessage

from pdserve_engine.door import NodeDoor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve_kv_transfer.faults import Faults
    from pdserve_protocol.codec import Message

    from pdserve_engine.door import DoorEvent, Route

log = logging.getLogger(__name__)


class FaultyDoor(NodeDoor):
    """Late messages leave with the next call of ``send`` or ``set_load`` after their time, a tick at most."""

    def __init__(
        self, host: str, port: int, cluster_key: str | None, post: Callable[[DoorEvent], None], faults: Faults
    ) -> None:
        super().__init__(host, port, cluster_key, post)
        self._faults = faults
        # Other numbers than those of the writes.
        self._random = random.Random(f"messages {faults.seed}")
        self._late: list[tuple[float, int, Route, Message]] = []
        self._order_of_late = itertools.count()
        log.warning("messages to other nodes go wrong on purpose: %s", faults)

    def send(self, route: Route, message: Message) -> None:
        self._send_late()
        if not isinstance(message, PeerMessage):
            super().send(route, message)
            return
        copies = 1 + (self._random.random() < self._faults.repeat)
        if self._random.random() < self._faults.lose:
            copies -= 1
        for _ in range(copies):
            late_s = self._random.uniform(0.0, self._faults.late_ms / 1e3)
            if late_s:
                due_at = time.monotonic() + late_s
                heapq.heappush(self._late, (due_at, next(self._order_of_late), route, message))
            else:
                super().send(route, message)

    def set_load(self, load: Message) -> None:
        self._send_late()
        super().set_load(load)

    def _send_late(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, route, message = heapq.heappop(self._late)
            super().send(route, message)


def open_door(
    host: str,
    port: int,
    cluster_key: str | None,
    post: Callable[[DoorEvent], None],
    faults: Iterable[Faults | None],
) -> NodeDoor:
    """An ordinary door, or one with the first of these faults that says anything of messages.

    Raises:
        PortTaken, AddressError.
    """
    for one in faults:
        if one is not None and one.of_messages:
            return FaultyDoor(host, port, cluster_key, post, one)
    return NodeDoor(host, port, cluster_key, post)
