"""The receiving half of KV hand-offs over one link, as a pure state machine.

It decides which slot of the landing region may be written by whom, what lands, and when each hand-off has ended. It
does not know blocks, memory or sockets: the engine keeps position -> cache block, the mover verifies and copies, and
every answer is a list of effects.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve_protocol.handoff import Cancel, Done, Gone, Grant, NotNeeded, Offer, Refuse, Sent, Stopped

from pdserve_kv_transfer.deadlines import Deadlines
from pdserve_kv_transfer.effects import (
    BreakLink,
    Cancelled,
    Completed,
    Effect,
    Ended,
    Failed,
    HandedOver,
    Land,
    Outcome,
    Piece,
    Refused,
    Send,
    Timings,
    Unneeded,
    WantBlocks,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve_protocol.handoff import Final, ReceiverSays, Region, SenderSays

WINDOWS_PER_REGION = 4
"""One hand-off holds at most this share of the slots: a prompt that is not running yet cannot starve one that is."""


@dataclass(slots=True)
class _HandOff:
    """``outcome`` is set when the end is decided, ``told`` when the engine knows: no landing pass is under way.

    ``held`` are positions whose slot may still be written, ``waiting`` those that need a slot. ``quiet``: the sender
    has shown that none of its writes is under way. ``word`` is repeated until then.
    """

    id: str
    progress_at: float
    expected: bool = False
    offer: Offer | None = None
    offered_at: float = 0.0
    needed: frozenset[int] | None = None
    slots: dict[int, int] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    held: set[int] = field(default_factory=set)
    landing: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    final: Final | None = None
    granted_at: float = 0.0
    sent_at: float = 0.0
    outcome: Outcome | None = None
    word: Done | Refuse | Cancel | None = None
    told: bool = False
    quiet: bool = False

    @property
    def all_landed(self) -> bool:
        return self.needed is not None and self.needed <= self.landed | self.bad


class Receiver:
    """Hand-offs from one sender to here.

    Each id that is expected gets exactly one ``Completed`` or ``Ended``, when none of its landing passes is under way.
    """

    def __init__(self, *, block_bytes: int, deadlines: Deadlines | None = None) -> None:
        self._block_bytes = block_bytes
        self._deadlines = deadlines or Deadlines()
        self._region: Region | None = None
        self._free: deque[int] = deque()
        self._handoffs: dict[str, _HandOff] = {}
        self._ended: dict[str, tuple[float, Outcome]] = {}

    @property
    def open_ids(self) -> list[str]:
        """Expected ids that have not ended for the engine yet."""
        return [handoff.id for handoff in self._handoffs.values() if handoff.expected and not handoff.told]

    def set_region(self, region: Region) -> None:
        """Grants point into this region from now on; all of its slots are free."""
        self._region = region
        self._free = deque(range(region.num_slots))

    # What the engine says.

    def expect(self, id: str, now: float) -> list[Effect]:
        """This request's half is here; its KV comes from the sender.

        An id stands for one hand-off: a second half with it fails.
        """
        ended = self._ended.get(id)
        if ended is not None:
            return [Ended(id, Failed("it has been handed over already") if ended[1] == HandedOver() else ended[1])]
        handoff = self._open(id, now)
        if handoff.expected:
            return [Ended(id, Failed("it has been handed over already"))] if handoff.told else []
        handoff.expected = True
        if handoff.outcome is not None:
            return [Ended(id, handoff.outcome)]
        return self._want(handoff)

    def grant(self, id: str, needed: Sequence[int], now: float) -> list[Effect]:
        """Cache blocks for the whole prompt are reserved until the end; these positions have to be sent, maybe none."""
        handoff = self._running(id)
        if handoff is None or handoff.needed is not None or handoff.offer is None:
            return []
        handoff.needed = frozenset(needed)
        handoff.waiting.extend(sorted(needed))
        handoff.granted_at = now
        self._take_slots(handoff)
        return [Send(self._grant_of(handoff))]

    def refuse(self, id: str, reason: str, now: float) -> list[Effect]:
        """The engine will not take it."""
        handoff = self._running(id)
        return [] if handoff is None else self._end(handoff, Refused(reason), now, Refuse(id=id, reason=reason))

    def cancel(self, id: str, now: float) -> list[Effect]:
        """The request is over on this side. The id stays blocked, also when nothing was heard of it yet."""
        handoff = self._handoffs.get(id)
        if handoff is None:
            self._remember(id, Cancelled(), now)
            return []
        if handoff.outcome is not None:
            return []
        # Without a region there is no link: nobody writes, and nobody listens.
        return self._end(handoff, Cancelled(), now, Cancel(id=id), quiet=self._region is None)

    # What the mover says.

    def on_landed(self, id: str, ok: Iterable[int], bad: Iterable[int], now: float) -> list[Effect]:
        """One landing pass is over: verified and copied, and not."""
        handoff = self._handoffs.get(id)
        if handoff is None:
            return []
        ok, bad = frozenset(ok), frozenset(bad)
        handoff.landing -= ok | bad
        if handoff.outcome is not None:
            return self._settle(handoff, now)
        handoff.landed |= ok
        handoff.bad |= bad
        handoff.progress_at = now
        self._free.extend(handoff.slots[position] for position in sorted((ok | bad) & handoff.held))
        handoff.held -= ok | bad
        return self._complete_if_done(handoff, now) + self._grant_more(now)

    # What the sender says.

    def on_message(self, body: SenderSays, now: float) -> list[Effect]:
        """One message, as itself or out of a State. Harmless when repeated, late or out of order."""
        handoff = self._handoffs.get(body.id)
        if handoff is None:
            return self._answer_unknown(body, now)
        if handoff.outcome is not None:
            return self._answer_ended(handoff, body, now)
        match body:
            case Offer():
                if handoff.offer is None:
                    handoff.offer = body
                    handoff.offered_at = now
                    return self._want(handoff)
                return []
            case Sent():
                return self._on_sent(handoff, body, now)
            case NotNeeded():
                outcome: Outcome = Unneeded()
            case Stopped(reason=reason):
                outcome = Failed(f"the sender stopped: {reason}")
            case Gone():
                outcome = Failed("the sender does not know the hand-off any more")
        return self._end(handoff, outcome, now, quiet=True)

    # Time and the link.

    def tick(self, now: float) -> list[Effect]:
        """Lets deadlines pass."""
        self._ended = {id: end for id, end in self._ended.items() if end[0] > now}
        effects: list[Effect] = []
        for handoff in list(self._handoffs.values()):
            effects += self._check(handoff, now)
        return effects

    def link_lost(self, reason: str, now: float, *, peer_lives: bool) -> list[Effect]:
        """The region is abandoned: every hand-off ends as soon as its landing passes have.

        If the peer lives, requests that it has not offered yet stay: it will offer them over its next link.
        """
        self._region = None
        self._free.clear()
        effects: list[Effect] = []
        for handoff in list(self._handoffs.values()):
            if peer_lives and handoff.offer is None and handoff.outcome is None:
                continue
            handoff.held.clear()
            effects += self._end(handoff, Failed(reason), now, quiet=True)
        return effects

    def describe(self) -> dict[str, list[ReceiverSays]]:
        """What a State says: every id that the sender knows of, or whose end it may not know yet."""
        return {
            handoff.id: self._describe(handoff)
            for handoff in self._handoffs.values()
            if handoff.offer is not None or (handoff.outcome is not None and not handoff.quiet)
        }

    # Inside.

    def _open(self, id: str, now: float) -> _HandOff:
        return self._handoffs.setdefault(id, _HandOff(id=id, progress_at=now))

    def _running(self, id: str) -> _HandOff | None:
        handoff = self._handoffs.get(id)
        return handoff if handoff is not None and handoff.outcome is None else None

    def _want(self, handoff: _HandOff) -> list[Effect]:
        if handoff.offer is None or not handoff.expected:
            return []
        return [WantBlocks(handoff.id, handoff.offer.num_tokens)]

    def _describe(self, handoff: _HandOff) -> list[ReceiverSays]:
        if handoff.outcome is not None:
            return [handoff.word] if handoff.word is not None and not handoff.quiet else []
        return [self._grant_of(handoff)] if handoff.needed is not None else []

    def _grant_of(self, handoff: _HandOff) -> Grant:
        region = self._region.name if self._region is not None else ""
        return Grant(id=handoff.id, region=region, needed=sorted(handoff.needed or ()), slots=dict(handoff.slots))

    def _take_slots(self, handoff: _HandOff) -> bool:
        if self._region is None:
            return False
        window = max(1, self._region.num_slots // WINDOWS_PER_REGION)
        took = False
        while handoff.waiting and self._free and len(handoff.held) < window:
            position = handoff.waiting.popleft()
            handoff.slots[position] = self._free.popleft()
            handoff.held.add(position)
            took = True
        return took

    def _grant_more(self, now: float) -> list[Effect]:
        """Gives free slots to the hand-offs that wait for them, oldest grant first."""
        if not self._free:
            return []
        waiting = [h for h in self._handoffs.values() if h.waiting and h.outcome is None]
        waiting.sort(key=lambda handoff: handoff.granted_at)
        return [Send(self._grant_of(handoff)) for handoff in waiting if self._take_slots(handoff)]

    def _on_sent(self, handoff: _HandOff, sent: Sent, now: float) -> list[Effect]:
        if handoff.needed is None:
            return []
        pieces = {
            position: Piece(handoff.slots[position], digest)
            for position, digest in sent.digests.items()
            if position in handoff.held and position not in handoff.landing
        }
        if pieces:
            handoff.landing.update(pieces)
            handoff.progress_at = handoff.sent_at = now
        if sent.final is not None and handoff.final is None:
            handoff.final = sent.final
            handoff.progress_at = handoff.sent_at = now
        effects: list[Effect] = [Land(handoff.id, pieces)] if pieces else []
        return effects + self._complete_if_done(handoff, now)

    def _complete_if_done(self, handoff: _HandOff, now: float) -> list[Effect]:
        if handoff.final is None or not handoff.all_landed:
            return []
        handoff.outcome = HandedOver()
        handoff.told = True
        handoff.word = Done(id=handoff.id)
        handoff.progress_at = now
        timings = Timings(
            grant_s=handoff.granted_at - handoff.offered_at,
            transfer_s=handoff.sent_at - handoff.granted_at,
            landing_s=now - handoff.sent_at,
        )
        num_blocks = len(handoff.landed)
        completed = Completed(
            handoff.id,
            handoff.final,
            frozenset(handoff.bad),
            timings,
            num_blocks,
            num_blocks * self._block_bytes,
        )
        return [Send(handoff.word), completed]

    def _answer_unknown(self, body: SenderSays, now: float) -> list[Effect]:
        match body:
            case Offer() if body.id not in self._ended:
                handoff = self._open(body.id, now)
                handoff.offer = body
                handoff.offered_at = now
                return []
            case NotNeeded():
                self._remember(body.id, Unneeded(), now)
                return []
            case Stopped(reason=reason):
                self._remember(body.id, Failed(f"the sender stopped: {reason}"), now)
                return []
            case Gone():
                return []
            case _:
                return [Send(Gone(id=body.id))]

    def _answer_ended(self, handoff: _HandOff, body: SenderSays, now: float) -> list[Effect]:
        if isinstance(body, Offer | Sent):
            return [Send(handoff.word)] if handoff.word is not None and not handoff.quiet else []
        handoff.quiet = True
        return self._settle(handoff, now)

    def _check(self, handoff: _HandOff, now: float) -> list[Effect]:
        limits = self._deadlines
        if handoff.outcome is not None:
            waited = now - handoff.progress_at
            if handoff.held and not handoff.quiet and waited > limits.stopped_s:
                return [BreakLink(f"the sender has not stopped within {limits.stopped_s:g} s")]
            if waited > limits.remember_ended_s and not handoff.landing:
                handoff.quiet = True
                return self._settle(handoff, now)
            return []
        if handoff.offer is not None and not handoff.expected:
            if now - handoff.offered_at > limits.offer_before_half_s:
                reason = "no such request"
                return self._end(handoff, Refused(reason), now, Refuse(id=handoff.id, reason=reason))
            return []
        # Before the last Sent nothing is missing: the sender computes, for as long as the request may take.
        if handoff.final is None or handoff.landing:
            return []
        if now - handoff.progress_at > limits.no_progress_s:
            reason = f"not all was sent within {limits.no_progress_s:g} s of the last Sent"
            return self._end(handoff, Failed(reason), now, Cancel(id=handoff.id))
        return []

    def _end(
        self,
        handoff: _HandOff,
        outcome: Outcome,
        now: float,
        word: Refuse | Cancel | None = None,
        *,
        quiet: bool = False,
    ) -> list[Effect]:
        handoff.quiet = handoff.quiet or quiet
        effects: list[Effect] = []
        if handoff.outcome is None:
            handoff.outcome = outcome
            handoff.word = word
            handoff.progress_at = now
            handoff.waiting.clear()
            if word is not None:
                effects.append(Send(word))
        return effects + self._settle(handoff, now)

    def _settle(self, handoff: _HandOff, now: float) -> list[Effect]:
        """Speaks the end once no landing pass is under way; frees the slots once the sender writes no more."""
        if handoff.outcome is None or handoff.landing:
            return []
        effects: list[Effect] = []
        if not handoff.told:
            handoff.told = True
            if handoff.expected:
                effects.append(Ended(handoff.id, handoff.outcome))
        if handoff.quiet:
            self._free.extend(handoff.slots[position] for position in sorted(handoff.held))
            handoff.held.clear()
            self._handoffs.pop(handoff.id, None)
            self._remember(handoff.id, handoff.outcome, now)
            effects += self._grant_more(now)
        return effects

    def _remember(self, id: str, outcome: Outcome, now: float) -> None:
        self._ended[id] = (now + self._deadlines.remember_ended_s, outcome)
