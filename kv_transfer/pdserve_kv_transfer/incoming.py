"""One hand-off as its receiver sees it: what is reserved, what may be written where, and what has landed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve_protocol.handoff import Done, Grant, Resend

from pdserve_kv_transfer.effects import Completed, HandedOver, Piece, Timings

if TYPE_CHECKING:
    from pdserve_protocol.handoff import Cancel, Final, Offer, ReceiverSays, Refuse, Region, Sent

    from pdserve_kv_transfer.effects import Outcome

MAX_TRIES = 2
"""A block that does not come right is written so often again; after that it is computed here."""


@dataclass(slots=True)
class Incoming:
    """``outcome`` is set when the end is decided, ``told`` when the engine knows: no landing pass is under way.

    ``held`` are positions whose slot may still be written, ``waiting`` those that need a slot, ``resent`` those that
    were asked for again and have not landed yet, ``bad`` those that are given up. ``alone``: nothing more comes from
    the sender. ``quiet``: it has shown that none of its writes is under way. ``word`` is repeated until then.
    """

    id: str
    progress_at: float
    num_tokens: int | None = None
    offer: Offer | None = None
    offered_at: float = 0.0
    wanted: bool = False
    needed: frozenset[int] | None = None
    slots: dict[int, int] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    held: set[int] = field(default_factory=set)
    landing: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    resent: set[int] = field(default_factory=set)
    tries: dict[int, int] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)
    num_mismatches: int = 0
    final: Final | None = None
    granted_at: float = 0.0
    sent_at: float = 0.0
    outcome: Outcome | None = None
    word: Done | Refuse | Cancel | None = None
    told: bool = False
    alone: bool = False
    stopping: bool = False
    quiet: bool = False

    @property
    def expected(self) -> bool:
        """The engine has this half."""
        return self.num_tokens is not None

    @property
    def complete(self) -> bool:
        """Everything has landed or is given up, and the tokens are known."""
        return self.final is not None and self.needed is not None and self.needed <= self.landed | self.bad

    def grant(self, region: Region | None) -> Grant:
        name = region.name if region is not None else ""
        return Grant(id=self.id, region=name, needed=sorted(self.needed or ()), slots=dict(self.slots))

    def resend(self) -> Resend:
        return Resend(id=self.id, tries={position: self.tries[position] for position in sorted(self.resent)})

    def describe(self, region: Region | None) -> list[ReceiverSays]:
        """What a State says of it."""
        if self.outcome is not None:
            return [self.word] if self.word is not None and not self.quiet else []
        if self.needed is None:
            return []
        return [self.grant(region), self.resend()] if self.resent else [self.grant(region)]

    def take_slots(self, free: deque[int], window: int) -> bool:
        """Takes free slots for positions that wait for one; whether there were any."""
        took = False
        while self.waiting and free and len(self.held) < window:
            position = self.waiting.popleft()
            self.slots[position] = free.popleft()
            self.held.add(position)
            took = True
        return took

    def pieces(self, sent: Sent) -> dict[int, Piece]:
        """What of a Sent is to be landed: what has not been, and is told of the write that was asked for last."""
        return {
            position: Piece(self.slots[position], digest)
            for position, digest in sent.digests.items()
            if position in self.held
            and position not in self.landing
            and position not in self.bad
            and sent.tries.get(position, 0) == self.tries.get(position, 0)
        }

    def ask_again(self, positions: frozenset[int]) -> frozenset[int]:
        """Positions that landed wrong and are asked for again; the others are given up."""
        again = frozenset() if self.alone else {p for p in positions if self.tries.get(p, 0) < MAX_TRIES}
        for position in again:
            self.tries[position] = self.tries.get(position, 0) + 1
        self.resent |= again
        self.bad |= positions - again
        return frozenset(again)

    def give_up_rest(self) -> None:
        """Nothing more comes: what has not landed is computed here."""
        self.alone = True
        self.resent.clear()
        self.waiting.clear()
        self.bad |= (self.needed or frozenset()) - self.landed - self.landing

    def completed(self, slot_bytes: int, now: float) -> Completed:
        """Ends it well."""
        assert self.final is not None, f"{self.id} is not complete"
        self.outcome = HandedOver()
        self.told = True
        self.word = None if self.quiet else Done(id=self.id)
        self.progress_at = now
        timings = Timings(
            grant_s=self.granted_at - self.offered_at,
            transfer_s=self.sent_at - self.granted_at,
            landing_s=now - self.sent_at,
        )
        return Completed(
            self.id,
            self.final,
            frozenset(self.bad),
            timings,
            num_blocks=len(self.landed),
            num_bytes=len(self.landed) * slot_bytes,
            num_mismatches=self.num_mismatches,
            num_resent=sum(self.tries.values()),
        )
