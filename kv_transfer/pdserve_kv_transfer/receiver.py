"""The receiving half of KV hand-offs over one link, as a pure state machine.

It decides when blocks are wanted, which slot of the landing region may be written by whom, what lands, what is sent
again, and when each hand-off has ended. It does not know blocks, memory or sockets: the engine keeps position -> cache
block, the mover verifies and copies, and every answer is a list of effects.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

from pdserve_protocol.handoff import Cancel, Gone, NotNeeded, Offer, Refuse, Sent, Stopped, Stopping

from pdserve_kv_transfer.deadlines import Deadlines
from pdserve_kv_transfer.effects import (
    BreakLink,
    Cancelled,
    Effect,
    Ended,
    Failed,
    HandedOver,
    Land,
    Outcome,
    Refused,
    Send,
    Unneeded,
    WantBlocks,
)
from pdserve_kv_transfer.incoming import Incoming

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set

    from pdserve_protocol.handoff import ReceiverSays, Region, SenderSays

WINDOWS_PER_REGION = 4
"""One hand-off holds at most this share of the slots: a prompt that is not running yet cannot starve one that is."""

GrantPolicy = Literal["offer", "dispatch", "finished"]
"""When cache blocks are wanted: when the prompt is at the head of the sender's queue, as soon as the request is here,
or not before the prompt is computed."""


class Receiver:
    """Hand-offs from one sender to here.

    Each id that is expected gets exactly one ``Completed`` or ``Ended``, when none of its landing passes is under way.
    """

    def __init__(self, *, deadlines: Deadlines | None = None, grant_policy: GrantPolicy = "offer") -> None:
        self._deadlines = deadlines or Deadlines()
        self._grant_policy = grant_policy
        self._region: Region | None = None
        self._free: deque[int] = deque()
        self._handoffs: dict[str, Incoming] = {}
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

    def expect(self, id: str, num_tokens: int, now: float) -> list[Effect]:
        """This request's half is here; the KV of its ``num_tokens`` tokens comes from the sender.

        An id stands for one hand-off: a second half with it fails.
        """
        ended = self._ended.get(id)
        if ended is not None:
            return [Ended(id, Failed("it has been handed over already") if ended[1] == HandedOver() else ended[1])]
        handoff = self._open(id, now)
        if handoff.expected:
            return [Ended(id, Failed("it has been handed over already"))] if handoff.told else []
        handoff.num_tokens = num_tokens
        if handoff.outcome is not None:
            return [Ended(id, handoff.outcome)]
        return self._want(handoff, now)

    def grant(self, id: str, needed: Sequence[int], now: float) -> list[Effect]:
        """Cache blocks for the whole prompt are reserved until the end; these positions have to be sent, maybe none."""
        handoff = self._running(id)
        if handoff is None or handoff.needed is not None:
            return []
        handoff.needed = frozenset(needed)
        handoff.waiting.extend(sorted(needed))
        return self._say_grant(handoff, now)

    def refuse(self, id: str, reason: str, now: float) -> list[Effect]:
        """The engine will not take it."""
        handoff = self._running(id)
        return [] if handoff is None else self._refuse(handoff, reason, now)

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
        handoff.num_mismatches += len(bad)
        if handoff.outcome is not None:
            return self._settle(handoff, now)
        handoff.landed |= ok
        handoff.resent -= ok
        handoff.progress_at = now
        again = handoff.ask_again(bad)
        done = ((ok | bad) - again) & handoff.held
        self._free_slots(handoff, done)
        handoff.held -= done
        effects: list[Effect] = [Send(handoff.resend())] if again else []
        return effects + self._complete_if_done(handoff, now) + self._grant_more(now)

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
                return self._on_offer(handoff, body, now)
            case Sent():
                return self._on_sent(handoff, body, now)
            case Stopping():
                return []
            case NotNeeded():
                return self._end(handoff, Unneeded(), now, quiet=True)
            case Stopped(reason=reason):
                reason = f"the sender stopped: {reason}"
            case Gone():
                reason = "the sender does not know the hand-off any more"
        handoff.quiet = True
        return self._go_on_alone(handoff, reason, now)

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

        One whose tokens are all known is completed with what has landed. If the peer lives, requests that it has not
        offered yet stay: it will offer them over its next link.
        """
        self._region = None
        self._free.clear()
        effects: list[Effect] = []
        for handoff in list(self._handoffs.values()):
            if peer_lives and handoff.offer is None and handoff.outcome is None:
                continue
            handoff.held.clear()
            handoff.quiet = True
            effects += self._go_on_alone(handoff, reason, now)
        return effects

    def describe(self) -> dict[str, list[ReceiverSays]]:
        """What a State says: every id that the sender knows of, or whose end it may not know yet."""
        return {
            handoff.id: handoff.describe(self._region)
            for handoff in self._handoffs.values()
            if handoff.offer is not None or (handoff.outcome is not None and not handoff.quiet)
        }

    # Inside.

    def _open(self, id: str, now: float) -> Incoming:
        return self._handoffs.setdefault(id, Incoming(id=id, progress_at=now))

    def _running(self, id: str) -> Incoming | None:
        handoff = self._handoffs.get(id)
        return handoff if handoff is not None and handoff.outcome is None else None

    def _want(self, handoff: Incoming, now: float) -> list[Effect]:
        """Asks for blocks, once, when the policy says so and both halves that are here agree."""
        offer = handoff.offer
        if not handoff.expected:
            return []
        if offer is not None and offer.num_tokens != handoff.num_tokens:
            reason = f"the two halves differ: {offer.num_tokens} tokens offered, {handoff.num_tokens} expected"
            return self._refuse(handoff, reason, now)
        due = offer is not None and (offer.finished or self._grant_policy != "finished")
        if handoff.wanted or not (due or self._grant_policy == "dispatch"):
            return []
        handoff.wanted = True
        return [WantBlocks(handoff.id)]

    def _say_grant(self, handoff: Incoming, now: float) -> list[Effect]:
        """Tells the sender, once it has offered and blocks are reserved."""
        if handoff.offer is None or handoff.needed is None:
            return []
        handoff.granted_at = now
        self._take_slots(handoff)
        return [Send(handoff.grant(self._region))]

    def _take_slots(self, handoff: Incoming) -> bool:
        if self._region is None:
            return False
        return handoff.take_slots(self._free, max(1, self._region.num_slots // WINDOWS_PER_REGION))

    def _grant_more(self, now: float) -> list[Effect]:
        """Gives free slots to the hand-offs that wait for them, oldest grant first."""
        if not self._free:
            return []
        waiting = [h for h in self._handoffs.values() if h.waiting and h.outcome is None and h.offer is not None]
        waiting.sort(key=lambda handoff: handoff.granted_at)
        return [Send(handoff.grant(self._region)) for handoff in waiting if self._take_slots(handoff)]

    def _on_offer(self, handoff: Incoming, offer: Offer, now: float) -> list[Effect]:
        if handoff.offer is None:
            handoff.offer = offer
            handoff.offered_at = now
            return self._want(handoff, now) or self._say_grant(handoff, now)
        if offer.finished and not handoff.offer.finished:
            handoff.offer = offer
            return self._want(handoff, now)
        return []

    def _on_sent(self, handoff: Incoming, sent: Sent, now: float) -> list[Effect]:
        if handoff.needed is None:
            return []
        pieces = handoff.pieces(sent)
        if pieces:
            handoff.landing.update(pieces)
            handoff.progress_at = handoff.sent_at = now
        if sent.final is not None and handoff.final is None:
            handoff.final = sent.final
            handoff.progress_at = handoff.sent_at = now
        effects: list[Effect] = [Land(handoff.id, pieces)] if pieces else []
        return effects + self._complete_if_done(handoff, now)

    def _complete_if_done(self, handoff: Incoming, now: float) -> list[Effect]:
        if handoff.outcome is not None or not handoff.complete:
            return []
        completed = handoff.completed(self._region.slot_bytes if self._region is not None else 0, now)
        effects: list[Effect] = [] if handoff.word is None else [Send(handoff.word)]
        return [*effects, completed, *self._settle(handoff, now)]

    def _go_on_alone(self, handoff: Incoming, reason: str, now: float) -> list[Effect]:
        """The sender is of no more use: the rest is computed here if all tokens are known, else the hand-off fails."""
        if handoff.outcome is None and handoff.final is not None:
            handoff.give_up_rest()
            return self._complete_if_done(handoff, now)
        return self._end(handoff, Failed(reason), now, None if handoff.quiet else Cancel(id=handoff.id))

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

    def _answer_ended(self, handoff: Incoming, body: SenderSays, now: float) -> list[Effect]:
        if isinstance(body, Offer | Sent):
            return [Send(handoff.word)] if handoff.word is not None and not handoff.quiet else []
        if isinstance(body, Stopping):
            handoff.stopping = True
            return []
        handoff.quiet = True
        return self._settle(handoff, now)

    def _check(self, handoff: Incoming, now: float) -> list[Effect]:
        limits = self._deadlines
        waited = now - handoff.progress_at
        if handoff.outcome is not None:
            # A sender that has answered polls its writes to their end, and gives up its link if none ends.
            limit_s = limits.no_progress_s if handoff.stopping else limits.stopped_s
            if handoff.held and not handoff.quiet and waited > limit_s:
                return [BreakLink(f"the sender has not stopped within {limit_s:g} s")]
            if waited > limits.remember_ended_s and not handoff.landing:
                handoff.quiet = True
                return self._settle(handoff, now)
            return []
        if handoff.offer is not None and not handoff.expected:
            if now - handoff.offered_at > limits.offer_before_half_s:
                return self._refuse(handoff, "no such request", now)
            return []
        # Before the last Sent nothing is missing: the sender computes, for as long as the request may take.
        if handoff.final is None or handoff.landing or waited <= limits.no_progress_s:
            return []
        return self._go_on_alone(handoff, f"not all was sent within {limits.no_progress_s:g} s of the last Sent", now)

    def _refuse(self, handoff: Incoming, reason: str, now: float) -> list[Effect]:
        return self._end(handoff, Refused(reason), now, Refuse(id=handoff.id, reason=reason))

    def _end(
        self,
        handoff: Incoming,
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

    def _settle(self, handoff: Incoming, now: float) -> list[Effect]:
        """Speaks the end once no landing pass is under way; frees the slots once the sender writes no more."""
        if handoff.outcome is None or handoff.landing:
            return []
        effects: list[Effect] = []
        if not handoff.told:
            handoff.told = True
            if handoff.expected:
                effects.append(Ended(handoff.id, handoff.outcome))
        if handoff.quiet:
            self._free_slots(handoff, handoff.held)
            handoff.held.clear()
            self._handoffs.pop(handoff.id, None)
            self._remember(handoff.id, handoff.outcome, now)
            effects += self._grant_more(now)
        return effects

    def _free_slots(self, handoff: Incoming, positions: Set[int]) -> None:
        """They are the first to be used again: their memory is in processor caches, and the others' may never exist."""
        self._free.extendleft(handoff.slots[position] for position in sorted(positions, reverse=True))

    def _remember(self, id: str, outcome: Outcome, now: float) -> None:
        self._ended[id] = (now + self._deadlines.remember_ended_s, outcome)
