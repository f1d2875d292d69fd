"""The sending half of KV hand-offs over one link, as a pure state machine.

It decides what is offered, which blocks may be written where, and when each hand-off has ended. It does not know
blocks, memory or sockets: positions are token positions of the first token of a block, slots are numbers in the
receiver's region, and every answer is a list of effects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve_protocol.handoff import Cancel, Done, Gone, Grant, NotNeeded, Offer, Refuse, Sent, Stopped

from pdserve_kv_transfer.deadlines import Deadlines
from pdserve_kv_transfer.effects import (
    BreakLink,
    Cancelled,
    Effect,
    Ended,
    Failed,
    HandedOver,
    Outcome,
    Refused,
    Send,
    Unneeded,
    Write,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve_protocol.handoff import Final, ReceiverSays, Region, SenderSays


@dataclass(slots=True)
class _HandOff:
    """``outcome`` is set when the end is decided, ``told`` when the engine knows: no write is under way any more.

    ``word`` is what the receiver is told about the end, again and again until it shows that it knows.
    """

    id: str
    num_tokens: int
    eta_s: float
    offered_at: float
    progress_at: float
    needed: frozenset[int] | None = None
    slots: dict[int, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    writing: set[int] = field(default_factory=set)
    digests: dict[int, bytes] = field(default_factory=dict)
    final: Final | None = None
    outcome: Outcome | None = None
    word: Stopped | NotNeeded | None = None
    told: bool = False

    @property
    def complete(self) -> bool:
        """All tokens are known and every needed piece is written: the last Sent may go."""
        return self.final is not None and self.needed is not None and self.needed <= self.digests.keys()


class Sender:
    """Hand-offs from here to one receiver.

    Ids are fresh for every attempt. Each id that is offered gets exactly one ``Ended``, when none of its writes is
    under way.
    """

    def __init__(self, *, block_size: int, deadlines: Deadlines | None = None) -> None:
        self._block_size = block_size
        self._deadlines = deadlines or Deadlines()
        self._region: Region | None = None
        self._handoffs: dict[str, _HandOff] = {}
        self._blocked: dict[str, float] = {}

    @property
    def open_ids(self) -> list[str]:
        """Ids that have not ended for the engine yet."""
        return [handoff.id for handoff in self._handoffs.values() if not handoff.told]

    def set_region(self, region: Region) -> None:
        """The region into which grants point from now on."""
        self._region = region

    # What the engine says.

    def offer(self, id: str, num_tokens: int, eta_s: float, now: float) -> list[Effect]:
        """A prompt of ``num_tokens`` is at the head of the queue; its KV is expected in ``eta_s`` seconds."""
        if id in self._blocked:
            return [Ended(id, Cancelled())]
        if id in self._handoffs:
            return []
        handoff = _HandOff(id=id, num_tokens=num_tokens, eta_s=eta_s, offered_at=now, progress_at=now)
        self._handoffs[id] = handoff
        return [Send(self._offer_of(handoff))]

    def ready(self, id: str, positions: Iterable[int], now: float) -> list[Effect]:
        """The blocks at these positions are computed and final, and stay where they are until Ended."""
        handoff = self._running(id)
        if handoff is None:
            return []
        handoff.ready.update(positions)
        return self._write(handoff, now)

    def finish(self, id: str, final: Final, now: float) -> list[Effect]:
        """All tokens so far; goes with the last Sent, once every needed piece is written."""
        handoff = self._running(id)
        if handoff is None or handoff.final is not None:
            return []
        handoff.final = final
        handoff.progress_at = now
        return [Send(self._sent_of(handoff, {}))] if handoff.complete else []

    def not_needed(self, id: str, now: float) -> list[Effect]:
        """The output ended with the first token: the receiver has nothing to do."""
        handoff = self._running(id)
        return [] if handoff is None else self._end(handoff, Unneeded(), NotNeeded(id=id), now)

    def abort(self, id: str, reason: str, now: float) -> list[Effect]:
        """The request is over on this side."""
        handoff = self._running(id)
        return [] if handoff is None else self._fail(handoff, reason, now)

    # What the mover says.

    def on_written(self, id: str, digests: Mapping[int, bytes], now: float) -> list[Effect]:
        """The writes of these positions have ended; position -> digest of the block."""
        handoff = self._handoffs.get(id)
        if handoff is None:
            return []
        handoff.writing.difference_update(digests)
        if handoff.outcome is not None:
            return self._settle(handoff, now)
        handoff.digests.update(digests)
        handoff.progress_at = now
        return [Send(self._sent_of(handoff, dict(digests)))]

    def on_write_failed(self, id: str, positions: Iterable[int], reason: str, now: float) -> list[Effect]:
        """The writes of these positions are given up.

        What arrived of them, or still may, nobody knows, so the receiver is not told of the end: the link is given up.
        """
        handoff = self._handoffs.get(id)
        if handoff is None:
            return []
        handoff.writing.difference_update(positions)
        handoff.word = None
        reason = f"a write failed: {reason}"
        return [BreakLink(reason), *self._end(handoff, Failed(reason), None, now)]

    # What the receiver says.

    def on_message(self, body: ReceiverSays, now: float) -> list[Effect]:
        """One message, as itself or out of a State. Harmless when repeated, late or out of order."""
        handoff = self._handoffs.get(body.id)
        if handoff is None:
            return self._answer_unknown(body, now)
        if handoff.outcome is not None:
            return self._answer_ended(handoff, body, now)
        match body:
            case Grant():
                return self._on_grant(handoff, body, now)
            case Refuse(reason=reason):
                return self._end(handoff, Refused(reason), None, now)
            case Done():
                if not handoff.complete:
                    return self._fail(handoff, "the receiver said Done before everything was sent", now)
                return self._end(handoff, HandedOver(), None, now)
            case Cancel():
                return self._end(handoff, Cancelled(), Stopped(id=body.id, reason="cancelled"), now)
            case Gone():
                return self._end(handoff, Failed("the receiver does not know the hand-off any more"), None, now)

    # Time and the link.

    def tick(self, now: float) -> list[Effect]:
        """Lets deadlines pass."""
        self._blocked = {id: until for id, until in self._blocked.items() if until > now}
        effects: list[Effect] = []
        for handoff in list(self._handoffs.values()):
            effects += self._check(handoff, now)
        return effects

    def link_lost(self, reason: str, now: float) -> list[Effect]:
        """Nothing more can be said to the receiver: every hand-off ends as soon as its writes have."""
        effects: list[Effect] = []
        for handoff in list(self._handoffs.values()):
            handoff.word = None
            effects += self._end(handoff, Failed(reason), None, now)
        return effects

    def describe(self) -> dict[str, list[SenderSays]]:
        """What a State says: every id that is open or whose end the receiver may not know yet."""
        return {handoff.id: self._describe(handoff) for handoff in self._handoffs.values()}

    # Inside.

    def _running(self, id: str) -> _HandOff | None:
        handoff = self._handoffs.get(id)
        return handoff if handoff is not None and handoff.outcome is None else None

    def _offer_of(self, handoff: _HandOff) -> Offer:
        return Offer(id=handoff.id, num_tokens=handoff.num_tokens, eta_s=handoff.eta_s)

    def _sent_of(self, handoff: _HandOff, digests: dict[int, bytes]) -> Sent:
        return Sent(id=handoff.id, digests=digests, final=handoff.final if handoff.complete else None)

    def _describe(self, handoff: _HandOff) -> list[SenderSays]:
        if handoff.outcome is not None:
            return [handoff.word] if handoff.told and handoff.word is not None else []
        if handoff.needed is None:
            return [self._offer_of(handoff)]
        return [self._sent_of(handoff, dict(handoff.digests))]

    def _on_grant(self, handoff: _HandOff, grant: Grant, now: float) -> list[Effect]:
        if self._region is None or grant.region != self._region.name:
            return []
        fault = self._fault_of(handoff, grant, self._region.num_slots)
        if fault is not None:
            return self._fail(handoff, f"the receiver's grant is wrong: {fault}", now)
        effects: list[Effect] = []
        if handoff.needed is None:
            handoff.needed = frozenset(grant.needed)
            handoff.progress_at = now
            if handoff.complete:
                effects.append(Send(self._sent_of(handoff, {})))
        for position, slot in grant.slots.items():
            handoff.slots.setdefault(position, slot)
        return effects + self._write(handoff, now)

    def _fault_of(self, handoff: _HandOff, grant: Grant, num_slots: int) -> str | None:
        for position in grant.needed:
            if position % self._block_size or not 0 <= position < handoff.num_tokens:
                return f"no block of {handoff.num_tokens} tokens begins at position {position}"
        if not grant.slots.keys() <= set(grant.needed):
            return "slots for positions that are not needed"
        if handoff.needed is not None and handoff.needed != set(grant.needed):
            return "the needed positions have changed"
        for slot in grant.slots.values():
            if not 0 <= slot < num_slots:
                return f"slot {slot} of {num_slots}"
        return None

    def _write(self, handoff: _HandOff, now: float) -> list[Effect]:
        slots = {
            position: slot
            for position, slot in handoff.slots.items()
            if position in handoff.ready and position not in handoff.writing and position not in handoff.digests
        }
        if not slots:
            return []
        handoff.writing.update(slots)
        handoff.progress_at = now
        return [Write(handoff.id, slots)]

    def _answer_unknown(self, body: ReceiverSays, now: float) -> list[Effect]:
        if isinstance(body, Gone):
            return []
        if isinstance(body, Cancel):
            self._block(body.id, now)
        return [Send(Gone(id=body.id))]

    def _answer_ended(self, handoff: _HandOff, body: ReceiverSays, now: float) -> list[Effect]:
        """The end is decided: the receiver learns it when the writes have ended, or has ended the hand-off too."""
        if isinstance(body, Grant | Cancel):
            return [Send(handoff.word)] if handoff.told and handoff.word is not None else []
        handoff.word = None
        return self._settle(handoff, now)

    def _check(self, handoff: _HandOff, now: float) -> list[Effect]:
        limits = self._deadlines
        if handoff.told:
            if now - handoff.progress_at > limits.remember_ended_s:
                self._forget(handoff, now)
            return []
        if handoff.writing:
            if now - handoff.progress_at > limits.no_progress_s:
                return [BreakLink(f"no write ended for {limits.no_progress_s:g} s")]
            return []
        if handoff.needed is None:
            if now - handoff.offered_at > limits.offer_to_grant_s:
                return self._fail(handoff, f"no grant within {limits.offer_to_grant_s:g} s", now)
        elif handoff.complete and now - handoff.progress_at > limits.no_progress_s:
            return self._fail(handoff, f"not accepted within {limits.no_progress_s:g} s", now)
        return []

    def _fail(self, handoff: _HandOff, reason: str, now: float) -> list[Effect]:
        return self._end(handoff, Failed(reason), Stopped(id=handoff.id, reason=reason), now)

    def _end(self, handoff: _HandOff, outcome: Outcome, word: Stopped | NotNeeded | None, now: float) -> list[Effect]:
        if handoff.outcome is None:
            handoff.outcome = outcome
            handoff.word = word
        return self._settle(handoff, now)

    def _settle(self, handoff: _HandOff, now: float) -> list[Effect]:
        """Speaks the end once no write is under way, and drops what the receiver needs not be told (any more)."""
        if handoff.outcome is None or handoff.writing:
            return []
        effects: list[Effect] = []
        if not handoff.told:
            handoff.told = True
            handoff.progress_at = now
            if handoff.word is not None:
                effects.append(Send(handoff.word))
            effects.append(Ended(handoff.id, handoff.outcome))
        if handoff.word is None:
            self._forget(handoff, now)
        return effects

    def _forget(self, handoff: _HandOff, now: float) -> None:
        self._handoffs.pop(handoff.id, None)
        self._block(handoff.id, now)

    def _block(self, id: str, now: float) -> None:
        self._blocked[id] = now + self._deadlines.remember_ended_s
