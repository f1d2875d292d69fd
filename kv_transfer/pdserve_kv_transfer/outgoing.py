"""One hand-off as its sender sees it: what is promised, computed, written and said. No decisions about time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve_protocol.handoff import Offer, Sent, Stopping

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve_protocol.handoff import Final, Grant, NotNeeded, Resend, SenderSays, Stopped

    from pdserve_kv_transfer.effects import Outcome


@dataclass(slots=True)
class Outgoing:
    """``outcome`` is set when the end is decided, ``told`` when the engine knows: no write is under way any more.

    ``word`` is what the receiver is told about the end, again and again until it shows that it knows. ``tries`` counts
    the writes after the first of a position. ``last_said``: a last Sent has gone out, perhaps before a Resend.
    """

    id: str
    num_tokens: int
    eta_s: float
    progress_at: float
    needed: frozenset[int] | None = None
    slots: dict[int, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    writing: set[int] = field(default_factory=set)
    digests: dict[int, bytes] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    final: Final | None = None
    last_said: bool = False
    outcome: Outcome | None = None
    word: Stopped | NotNeeded | None = None
    told: bool = False

    @property
    def complete(self) -> bool:
        """All tokens are known and every needed piece is written: the last Sent may go."""
        return self.final is not None and self.needed is not None and self.needed <= self.digests.keys()

    def offer(self) -> Offer:
        return Offer(id=self.id, num_tokens=self.num_tokens, eta_s=self.eta_s, finished=self.final is not None)

    def sent(self, positions: Iterable[int]) -> Sent:
        """What is to be said of these positions, as the last Sent where everything is written."""
        complete = self.complete
        self.last_said = self.last_said or complete
        return Sent(
            id=self.id,
            digests={position: self.digests[position] for position in positions},
            final=self.final if complete else None,
            tries=dict(self.tries),
        )

    def describe(self) -> list[SenderSays]:
        """What a State says of it."""
        if self.outcome is not None:
            return self.ending()
        return [self.offer()] if self.needed is None else [self.sent(self.digests)]

    def ending(self) -> list[SenderSays]:
        """What there is to say once the end is decided."""
        if not self.told:
            return [Stopping(id=self.id)]
        return [self.word] if self.word is not None else []

    def to_write(self) -> dict[int, int]:
        """Position -> slot of what can be written now."""
        return {
            position: slot
            for position, slot in self.slots.items()
            if position in self.ready and position not in self.writing and position not in self.digests
        }

    def fault_of_grant(self, grant: Grant, block_size: int, num_slots: int) -> str | None:
        """What is wrong with a grant; None for a good one."""
        for position in grant.needed:
            if position % block_size or not 0 <= position < self.num_tokens:
                return f"no block of {self.num_tokens} tokens begins at position {position}"
        if not grant.slots.keys() <= set(grant.needed):
            return "slots for positions that are not needed"
        if self.needed is not None and self.needed != set(grant.needed):
            return "the needed positions have changed"
        for slot in grant.slots.values():
            if not 0 <= slot < num_slots:
                return f"slot {slot} of {num_slots}"
        return None

    def take_resend(self, resend: Resend) -> str | None:
        """Marks the positions to be written again, each try once; what is wrong with it, None for a good one."""
        for position, number in resend.tries.items():
            done = self.tries.get(position, 0)
            if number <= done:
                continue
            if number > done + 1 or position not in self.digests:
                return f"position {position} has not been sent for the {number}th time"
            self.tries[position] = number
            del self.digests[position]
        return None
