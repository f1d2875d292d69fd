"""What the hand-off state machines ask of the process around them, as values.

They know no socket, clock, thread or memory: a method returns a list of these, to be carried out in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_protocol.handoff import Final, PeerBody, PeerMessage, Region

    from pdserve_kv_transfer.wire import Wire


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The receiver has everything."""


@dataclass(frozen=True, slots=True)
class Unneeded:
    """The output ended with the first token."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The receiver's side of the request is over."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The receiver would not take it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Over for any other reason: a deadline, a lost link, a fault, or an end of the request on the sender's side."""

    reason: str


Outcome = HandedOver | Unneeded | Cancelled | Refused | Failed


@dataclass(frozen=True, slots=True)
class Ended:
    """The hand-off is over here, once per id: nothing touches its cache blocks any more; they may be released."""

    id: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Send:
    """Tell the other side. The link turns it into a Transmit."""

    body: PeerBody


@dataclass(frozen=True, slots=True)
class BreakLink:
    """Go on with this peer only over a new link and a new region. The link turns it into a LinkLost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Write:
    """Sender: write the blocks at these positions into these slots (position -> slot)."""

    id: str
    slots: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Granted:
    """Sender, once per id: from now on the blocks are promised, and what was given to others is computed again."""

    id: str


@dataclass(frozen=True, slots=True)
class WantBlocks:
    """Receiver, once per id: answer with ``grant`` (when there is room) or ``refuse``."""

    id: str


@dataclass(frozen=True, slots=True)
class Piece:
    """One landed block, not verified yet: where it lies and what its digest must be."""

    slot: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Land:
    """Receiver: verify these pieces and copy them into the cache blocks of their positions (position -> piece)."""

    id: str
    pieces: Mapping[int, Piece]


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a transfer took, in seconds of the receiver's clock.

    Attributes:
        grant_s: offer received to grant sent.
        transfer_s: grant sent to last Sent received.
        landing_s: last Sent received to last block landed.
    """

    grant_s: float
    transfer_s: float
    landing_s: float


@dataclass(frozen=True, slots=True)
class Completed:
    """Receiver: everything has landed; takes the place of Ended.

    Attributes:
        bad_positions: blocks that did not come, or never as they were sent; empty when all is well. From the first of
            them on the KV has to be computed here.
        num_blocks, num_bytes: verified and copied.
        num_mismatches: landed blocks whose digest did not match.
        num_resent: blocks that were asked for again, each time counted.
    """

    id: str
    final: Final
    bad_positions: frozenset[int]
    timings: Timings
    num_blocks: int
    num_bytes: int
    num_mismatches: int = 0
    num_resent: int = 0


@dataclass(frozen=True, slots=True)
class Transmit:
    """Link: send this to the peer; it may be lost."""

    message: PeerMessage


@dataclass(frozen=True, slots=True)
class NeedRegion:
    """Receiver link: open a landing region for this wire with this connector.

    Answer ``region_ready`` or ``region_failed``.
    """

    connector: str
    wire: Wire


@dataclass(frozen=True, slots=True)
class FenceRegion:
    """Receiver link: make the region unreachable, whatever the peer may still be writing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Connect:
    """Sender link: connect to this region with this connector; answer ``connected`` or ``connect_failed``."""

    connector: str
    region: Region
    wire: Wire


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link is over and its hand-offs have failed.

    A sender link: disconnect the mover (writes under way then end, well or not) and keep the link until its ids have
    ended. A receiver link goes on with the peer's next LinkHello. ``silent``: nothing was heard of the peer for too
    long, so the lease of its hand-offs has run out.
    """

    reason: str
    silent: bool = False


Effect = (
    Ended
    | Send
    | BreakLink
    | Write
    | Granted
    | WantBlocks
    | Land
    | Completed
    | Transmit
    | NeedRegion
    | FenceRegion
    | Connect
    | LinkLost
)
