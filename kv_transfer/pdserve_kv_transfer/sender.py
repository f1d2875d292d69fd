"""The sending half of KV hand-offs over one link, as a pure state machine.

It decides what is offered, which blocks may be written where, and when each hand-off has ended. It does not know
blocks, memory or sockets: positions are token positions of the first token of a block, slots are numbers in the
receiver's region, and every answer is a list of effects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_protocol.handoff import Cancel, Done, Gone, Grant, NotNeeded, Refuse, Resend, Stopped, Stopping

from pdserve_kv_transfer.deadlines import Deadlines
from pdserve_kv_transfer.effects import (
    BreakLink,
    Cancelled,
    Effect,
    Ended,
    Failed,
    Granted,
    HandedOver,
    Outcome,
    Refused,
    Send,
    Unneeded,
    Write,
)
from pdserve_kv_transfer.outgoing import Outgoing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve_protocol.handoff import Final, ReceiverSays, Region, SenderSays


class Sender:
    """Hand-offs from here to one receiver.

    Ids are fresh for every attempt. Each id that is offered gets exactly one ``Ended``, when none of its writes is
    under way.
    """

    def __init__(self, *, block_size: int, deadlines: Deadlines | None = None) -> None:
        self._block_size = block_size
        self._deadlines = deadlines or Deadlines()
        self._region: Region | None = None
        self._handoffs: dict[str, Outgoing] = {}
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
        if (known := self._handoffs.get(id)) is not None:
            return [Ended(id, Failed("its id was used before"))] if known.told else []
        handoff = Outgoing(id=id, num_tokens=num_tokens, eta_s=eta_s, progress_at=now)
        self._handoffs[id] = handoff
        return [Send(handoff.offer())]

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
        if handoff.needed is None:
            return [Send(handoff.offer())]
        return [Send(handoff.sent(()))] if handoff.complete else []

    def reopen(self, id: str, positions: Iterable[int]) -> None:
        """More tokens are generated here while there is no grant, which may change the blocks at these positions.

        ``ready`` and ``finish``, with all tokens, come again.
        """
        handoff = self._running(id)
        if handoff is not None:
            assert handoff.needed is None, f"{id} has a grant: its blocks are promised"
            handoff.final = None
            handoff.ready.difference_update(positions)

    def unpinned(self, id: str) -> None:
        """Its blocks were given to others while there was no grant; after Granted they have to be ``ready`` again."""
        handoff = self._running(id)
        if handoff is not None:
            assert handoff.needed is None, f"{id} has a grant: its blocks are promised"
            handoff.ready.clear()

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
        return [Send(handoff.sent(digests))]

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
            case Resend():
                return self._on_resend(handoff, body, now)
            case Done():
                if not handoff.last_said:
                    return self._fail(handoff, "the receiver said Done before everything was sent", now)
                return self._end(handoff, HandedOver(), None, now)
            case Cancel():
                effects = self._end(handoff, Cancelled(), Stopped(id=body.id, reason="cancelled"), now)
                return effects or [Send(Stopping(id=body.id))]
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
        return {handoff.id: handoff.describe() for handoff in self._handoffs.values()}

    # Inside.

    def _running(self, id: str) -> Outgoing | None:
        handoff = self._handoffs.get(id)
        return handoff if handoff is not None and handoff.outcome is None else None

    def _on_grant(self, handoff: Outgoing, grant: Grant, now: float) -> list[Effect]:
        if self._region is None or grant.region != self._region.name:
            return []
        fault = handoff.fault_of_grant(grant, self._block_size, self._region.num_slots)
        if fault is not None:
            return self._fail(handoff, f"the receiver's grant is wrong: {fault}", now)
        effects: list[Effect] = []
        if handoff.needed is None:
            handoff.needed = frozenset(grant.needed)
            handoff.progress_at = now
            effects.append(Granted(handoff.id))
            if handoff.complete:
                effects.append(Send(handoff.sent(())))
        for position, slot in grant.slots.items():
            handoff.slots.setdefault(position, slot)
        return effects + self._write(handoff, now)

    def _on_resend(self, handoff: Outgoing, resend: Resend, now: float) -> list[Effect]:
        fault = handoff.take_resend(resend)
        if fault is not None:
            return self._fail(handoff, f"the receiver's Resend is wrong: {fault}", now)
        return self._write(handoff, now)

    def _write(self, handoff: Outgoing, now: float) -> list[Effect]:
        slots = handoff.to_write()
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

    def _answer_ended(self, handoff: Outgoing, body: ReceiverSays, now: float) -> list[Effect]:
        """The end is decided: the receiver learns it when the writes have ended, or has ended the hand-off too."""
        if isinstance(body, Grant | Cancel | Resend):
            return [Send(word) for word in handoff.ending()]
        handoff.word = None
        return self._settle(handoff, now)

    def _check(self, handoff: Outgoing, now: float) -> list[Effect]:
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
            # Before that nobody waits: it is being computed, or more tokens of it are.
            if handoff.final is not None and now - handoff.progress_at > limits.offer_to_grant_s:
                return self._fail(handoff, f"no grant within {limits.offer_to_grant_s:g} s", now)
        elif handoff.complete and now - handoff.progress_at > limits.no_progress_s:
            return self._fail(handoff, f"not accepted within {limits.no_progress_s:g} s", now)
        return []

    def _fail(self, handoff: Outgoing, reason: str, now: float) -> list[Effect]:
        return self._end(handoff, Failed(reason), Stopped(id=handoff.id, reason=reason), now)

    def _end(self, handoff: Outgoing, outcome: Outcome, word: Stopped | NotNeeded | None, now: float) -> list[Effect]:
        if handoff.outcome is None:
            handoff.outcome = outcome
            handoff.word = word
        return self._settle(handoff, now)

    def _settle(self, handoff: Outgoing, now: float) -> list[Effect]:
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

    def _forget(self, handoff: Outgoing, now: float) -> None:
        self._handoffs.pop(handoff.id, None)
        self._block(handoff.id, now)

    def _block(self, id: str, now: float) -> None:
        self._blocked[id] = now + self._deadlines.remember_ended_s
