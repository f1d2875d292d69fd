"""State: the heartbeat of a link, the lease of its hand-offs, and the only retransmission.

Knows numbers and ids; what a hand-off says about itself comes from the state machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_protocol.handoff import State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve_protocol.handoff import PeerBody, ReceiverSays, SenderSays


class StateExchange:
    """One side's numbering of States. A new link begins with a new one."""

    def __init__(self) -> None:
        self._number = 0
        self._last_seen = 0
        self._first_told: dict[str, int] = {}

    def make(self, described: Mapping[str, Sequence[SenderSays | ReceiverSays]]) -> State:
        """The next State, of all open ids and what there is to say about each."""
        self._number += 1
        self._first_told = {id: self._first_told.get(id, self._number) for id in described}
        return State(
            number=self._number,
            last_seen=self._last_seen,
            ids=list(described),
            entries=[entry for entries in described.values() for entry in entries],
        )

    def take(self, state: State) -> tuple[list[PeerBody], list[str]] | None:
        """What a State of the peer says, and the ids that have ended there; None for an old one.

        An id that the State does not name has ended only if the peer knew of it: it had seen a State of ours with it.
        """
        if state.number <= self._last_seen:
            return None
        self._last_seen = state.number
        named = set(state.ids)
        ended = [id for id, number in self._first_told.items() if number <= state.last_seen and id not in named]
        return list(state.entries), ended
