"""What both ends of a link between two node processes have in common: envelope, heartbeat and silence.

A link runs from one boot of a node to one boot of another and has one sender. The same two nodes may have a second link
in the other direction. Each end is a pure state machine; the coordinator around it owns sockets, clock and mover.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pdserve_protocol.handoff import PeerMessage, StaleBoot

from pdserve_kv_transfer.effects import Transmit
from pdserve_kv_transfer.state_exchange import StateExchange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve_protocol.handoff import PeerBody, ReceiverSays, SenderSays
    from pdserve_protocol.node import NodeIdentity

    from pdserve_kv_transfer.deadlines import Deadlines


def stale_boot(boot_id: str, message: PeerMessage) -> PeerMessage | None:
    """The answer of process ``boot_id`` to a message for its predecessor; None if there is nothing to answer.

    It speaks in the name of the process that was meant, so that it finds the link that this process was on.
    """
    if message.to_boot == boot_id or isinstance(message.body, StaleBoot):
        return None
    return PeerMessage(
        from_boot=message.to_boot,
        to_boot=message.from_boot,
        from_sender=not message.from_sender,
        link=message.link,
        body=StaleBoot(boot_id=boot_id),
    )


class Heartbeat:
    """States to the peer at an interval, and how long it has been silent, of one link."""

    def __init__(self, identity: NodeIdentity, peer_boot: str, *, is_sender: bool, deadlines: Deadlines) -> None:
        self.link = 0
        self._boot_id = identity.boot_id
        self._peer_boot = peer_boot
        self._is_sender = is_sender
        self._deadlines = deadlines
        self.restart(0, -math.inf)

    def restart(self, link: int, now: float) -> None:
        """Begins link number ``link``."""
        self.link = link
        self._states = StateExchange()
        self._heard_at = now
        self._ticked_at = now
        self._slept = False
        self._state_at = now

    def transmit(self, body: PeerBody, *, link: int | None = None) -> Transmit:
        """``body`` in its envelope."""
        return Transmit(
            PeerMessage(
                from_boot=self._boot_id,
                to_boot=self._peer_boot,
                from_sender=self._is_sender,
                link=self.link if link is None else link,
                body=body,
            )
        )

    def heard(self, now: float) -> None:
        """The peer gave a sign of life."""
        self._heard_at = now

    def take(self, body: Any) -> tuple[list[PeerBody], list[str]] | None:
        """What a State says and which ids ended; None for an old one."""
        return self._states.take(body)

    def slept(self, now: float) -> bool:
        """Whether this process itself was asleep since the last tick: what the peer has said then may lie unread, so no
        deadline of its may be looked at before the next tick. Call at every tick; never says so twice in a row.
        """
        slept_before, self._slept = self._slept, now - self._ticked_at > 2 * self._deadlines.state_interval_s
        self._ticked_at = now
        if self._slept:
            self._heard_at = max(self._heard_at, now - 2 * self._deadlines.state_interval_s)
        return self._slept and not slept_before

    def silent(self, now: float) -> bool:
        """Whether the peer has been silent for too long."""
        return now - self._heard_at > self._deadlines.dead_after_s

    @property
    def due_at(self) -> float:
        """When the next State is due."""
        return self._state_at

    def state(self, described: Mapping[str, Sequence[SenderSays | ReceiverSays]], now: float) -> Transmit:
        """The next State."""
        self._state_at = now + self._deadlines.state_interval_s
        return self.transmit(self._states.make(described))
