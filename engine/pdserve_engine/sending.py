"""Sending: hand-offs from this node, joined to the scheduler.

Turns what the scheduler did into the verbs of the sender links, and their effects into orders to the mover, messages to
peers and ends of requests. Blocks that are being written are retained, so that a request may end at any moment.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol

from pdserve_kv_transfer.effects import (
    Cancelled,
    Connect,
    Ended,
    Failed as HandoffFailed,
    Granted,
    HandedOver as GivenOver,
    LinkLost,
    Refused,
    Transmit,
    Unneeded,
    Write,
)
from pdserve_kv_transfer.events import Connected, ConnectFailed, WriteFailed, Written
from pdserve_kv_transfer.sender_link import LinkState, SenderLink
from pdserve_protocol.door import Address
from pdserve_protocol.handoff import Final
from pdserve_protocol.outputs import Aborted, Failed, HandedOver, RequestOutput

from pdserve_engine.handoff_stats import HandoffStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve_kv_transfer.effects import Effect
    from pdserve_kv_transfer.events import MoverEvent
    from pdserve_kv_transfer.mover import Mover
    from pdserve_protocol.handoff import PeerMessage
    from pdserve_protocol.node import NodeIdentity
    from pdserve_protocol.outputs import TokenLogprobs
    from pdserve_protocol.requests import SendTo

    from pdserve_engine.core import EngineCore
    from pdserve_engine.door import NodeDoor
    from pdserve_engine.request import Request
    from pdserve_engine.scheduler import StepResult

log = logging.getLogger(__name__)


class SendPolicy(Protocol):
    """What a node promises when it offers."""

    def eta_s(self, num_tokens: int) -> float:
        """Seconds until ``num_tokens`` prompt tokens will have been computed."""
        ...

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens."""
        ...


@dataclass(slots=True)
class _Outgoing:
    """One hand-off from here.

    ``num_kv_tokens``: prompt and forced output, whose KV the receiver needs. ``logprobs``: of the tokens after those.
    ``offered_at``: until it is granted.
    """

    request: Request
    send_to: SendTo
    num_kv_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    link: _Link | None = None
    num_ready_blocks: int = 0
    writing: dict[int, int] = field(default_factory=dict)
    offered_at: float | None = None


@dataclass(slots=True, eq=False)
class _Link:
    """A sender link, where it leads, and the mover's name for it; once connected, bytes of a block on its way."""

    machine: SenderLink
    address: Address
    key: str
    slot_bytes: int = 0


class Sending:
    """All hand-offs from this node. Every method runs on the engine loop and takes the loop's time."""

    def __init__(
        self,
        core: EngineCore,
        mover: Mover,
        door: NodeDoor,
        identity: NodeIdentity,
        policy: SendPolicy | None,
        emit: Callable[[RequestOutput], None],
    ) -> None:
        self._policy = policy
        self._core = core
        self._mover = mover
        self._door = door
        self._identity = identity
        self._emit = emit
        self._block_size = identity.layout.block_size
        self._outgoing: dict[str, _Outgoing] = {}
        self._links: dict[str, _Link] = {}
        self._link_numbers = count(1)
        self._met: dict[str, Address] = {}
        self._refused: dict[str, str] = {}
        self.stats = HandoffStats()

    @property
    def num_open(self) -> int:
        return len(self._outgoing)

    def knows(self, request_id: str) -> bool:
        """Whether a hand-off of that id is not over; its request may be."""
        return request_id in self._outgoing

    def is_active(self) -> bool:
        """Whether time matters: there are links to keep alive."""
        return bool(self._links)

    def peers(self) -> dict[str, str]:
        """Address -> state of the link, for operators."""
        return {str(link.address): f"sending, {link.machine.state.name.lower()}" for link in self._links.values()}

    def links(self) -> dict[str, str]:
        """Boot id of a receiver -> state of the link, for routers."""
        refused = {boot: f"refused: {reason}" for boot, reason in self._refused.items()}
        alive = (link.machine for link in self._links.values() if link.machine.state is not LinkState.LOST)
        return refused | {machine.peer_boot: machine.state.name.lower() for machine in alive}

    def meet(self, peer: SendTo, now: float) -> None:
        """A router says who is where: the link is made before a request needs it. Who was there before is dead."""
        address = Address(peer.host, peer.port)
        for boot in [boot for boot, at in self._met.items() if at == address and boot != peer.boot_id]:
            del self._met[boot]
            self._refused.pop(boot, None)
            for link in list(self._links.values()):
                if link.machine.peer_boot == boot:
                    self._apply(link, link.machine.peer_restarted(now), now)
        self._met[peer.boot_id] = address
        if self._policy is not None and peer.boot_id not in self._refused:
            self._link_to(peer, now)

    # ---- requests --------------------------------------------------------------------------------------------------

    def accept(self, request: Request, send_to: SendTo) -> None:
        """A request of ours is to be handed over once it has its first token. Only with a policy."""
        self._outgoing[request.request_id] = _Outgoing(request, send_to, request.num_tokens)

    def on_scheduled(self, now: float) -> None:
        """A step was made, or was not: tells receivers what was begun, what is next, and what holds have become.

        What is at the head of the queue is offered with or without room for it: once it is granted it gets room.
        """
        scheduler = self._core.scheduler
        changes = scheduler.holds.take_changes()
        for id in changes.unpinned:
            if (outgoing := self._outgoing.get(id)) is not None and outgoing.link is not None:
                outgoing.num_ready_blocks = 0
                outgoing.link.machine.unpinned(id)
        for id in changes.resumed:
            if (outgoing := self._outgoing.get(id)) is not None and outgoing.link is not None:
                index = outgoing.request.num_computed_tokens // self._block_size
                outgoing.num_ready_blocks = min(outgoing.num_ready_blocks, index)
                outgoing.link.machine.reopen(id, [index * self._block_size])
        for id in changes.started:
            self._offer(id, now)
        head = scheduler.next_to_start() if self._outgoing else None
        if head is not None:
            self._offer(head.request_id, now)

    def _offer(self, id: str, now: float) -> None:
        outgoing = self._outgoing.get(id)
        if outgoing is None or outgoing.link is not None:
            return
        assert self._policy is not None, "accepted without a policy"
        outgoing.link = link = self._link_to(outgoing.send_to, now)
        num_left = outgoing.num_kv_tokens - outgoing.request.num_computed_tokens
        eta_s = self._policy.eta_s(max(0, num_left))
        outgoing.offered_at = now
        self._apply(link, link.machine.offer(id, outgoing.num_kv_tokens, eta_s, now), now)
        self._mark_ready(outgoing, outgoing.request.num_computed_tokens, now)

    def retarget(self, old_id: str, new_id: str, send_to: SendTo, now: float) -> bool:
        """Offers what is held for one receiver to another, under another id; False where nothing is held.

        The old id ends here without a word to its router.
        """
        old = self._outgoing.get(old_id)
        request = None if old is None else self._core.scheduler.rename_held(old_id, new_id, send_to.boot_id)
        if old is None or request is None:
            return False
        self._outgoing[new_id] = new = _Outgoing(request, send_to, old.num_kv_tokens, old.logprobs)
        if old.link is not None:
            self._apply(old.link, old.link.machine.abort(old_id, "it goes to another receiver", now), now)
        self._offer(new_id, now)
        if new.link is not None:
            self._apply(new.link, new.link.machine.finish(new_id, self._final(new), now), now)
        return True

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so much time."""
        if self._policy is not None:
            self._policy.observe_step(num_tokens, seconds)

    def on_results(self, results: Sequence[StepResult], now: float) -> None:
        """A step has retired: its finished blocks can travel, its first tokens too."""
        for result in results:
            outgoing = self._outgoing.get(result.request.request_id)
            if outgoing is None:
                continue
            if outgoing.link is None:
                if result.finish is not None:
                    del self._outgoing[result.request.request_id]
                continue
            machine, id = outgoing.link.machine, result.request.request_id
            if isinstance(result.finish, Failed):
                self._apply(outgoing.link, machine.abort(id, result.finish.message, now), now)
            elif result.finish is not None:
                self._apply(outgoing.link, machine.not_needed(id, now), now)
            else:
                self._mark_ready(outgoing, result.num_computed_tokens, now)
                if result.logprobs:
                    outgoing.logprobs = [*(outgoing.logprobs or []), *result.logprobs]
                if result.held:
                    self._apply(outgoing.link, machine.finish(id, self._final(outgoing), now), now)

    def abort(self, request_id: str, reason: str, now: float) -> None:
        """The request has ended here before its hand-off."""
        outgoing = self._outgoing.get(request_id)
        if outgoing is None:
            return
        if outgoing.link is None:
            del self._outgoing[request_id]
        else:
            self._apply(outgoing.link, outgoing.link.machine.abort(request_id, reason, now), now)

    def _final(self, outgoing: _Outgoing) -> Final:
        return Final(token_ids=list(outgoing.request.output_token_ids), logprobs=outgoing.logprobs)

    def _mark_ready(self, outgoing: _Outgoing, num_computed_tokens: int, now: float) -> None:
        num_tokens = min(num_computed_tokens, outgoing.num_kv_tokens)
        num_blocks = num_tokens // self._block_size
        if num_tokens == outgoing.num_kv_tokens:
            num_blocks = -(-num_tokens // self._block_size)
        first, outgoing.num_ready_blocks = outgoing.num_ready_blocks, max(num_blocks, outgoing.num_ready_blocks)
        positions = [index * self._block_size for index in range(first, num_blocks)]
        if positions and outgoing.link is not None:
            link = outgoing.link
            self._apply(link, link.machine.ready(outgoing.request.request_id, positions, now), now)

    # ---- links -----------------------------------------------------------------------------------------------------

    def on_peer_message(self, message: PeerMessage, now: float) -> None:
        """A message of a receiver."""
        link = self._links.get(_key(message.from_boot, message.link))
        if link is not None:
            self._apply(link, link.machine.on_peer_message(message, now), now)

    def on_mover_event(self, event: MoverEvent, now: float) -> None:
        """What the mover did for one of our links; events of other links say nothing."""
        match event:
            case Connected(peer=key) if key in self._links:
                link = self._links[key]
                self._apply(link, link.machine.connected(now), now)
            case ConnectFailed(peer=key, reason=reason) if key in self._links:
                link = self._links[key]
                self._apply(link, link.machine.connect_failed(reason, now), now)
            case Written(peer=key, id=id, digests=digests):
                self._release(id, digests)
                if key in self._links:
                    link = self._links[key]
                    num_bytes = len(digests) * link.slot_bytes
                    self.stats.count(str(link.address), blocks_sent=len(digests), bytes_sent=num_bytes)
                    self._apply(link, link.machine.on_written(id, digests, now), now)
            case WriteFailed(peer=key, id=id, positions=positions, reason=reason):
                self._release(id, positions)
                if key in self._links:
                    link = self._links[key]
                    self._apply(link, link.machine.on_write_failed(id, positions, reason, now), now)

    def tick(self, now: float) -> None:
        """Lets deadlines pass and forgets links that are over."""
        for link in list(self._links.values()):
            self._apply(link, link.machine.tick(now), now)
            if link.machine.state is LinkState.LOST and not link.machine.open_ids:
                del self._links[link.key]

    def _link_to(self, send_to: SendTo, now: float) -> _Link:
        for link in self._links.values():
            if link.machine.peer_boot == send_to.boot_id and link.machine.state is not LinkState.LOST:
                return link
        number = next(self._link_numbers)
        machine = SenderLink(self._identity, send_to.boot_id, number=number)
        link = _Link(machine, Address(send_to.host, send_to.port), _key(send_to.boot_id, number))
        self._links[link.key] = link
        self._apply(link, machine.open(now), now)
        return link

    def _apply(self, link: _Link, effects: Iterable[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case Transmit(message=message):
                    self._door.send(link.address, message)
                case Connect(connector=connector, region=region, wire=wire):
                    link.slot_bytes = region.slot_bytes
                    self._mover.connect(link.key, connector, region, wire)
                case Write(id=id, slots=slots):
                    self._write(link, id, dict(slots))
                case Granted(id=id):
                    self._core.scheduler.grant(id)
                    if (outgoing := self._outgoing[id]).offered_at is not None:
                        self.stats.observe(offer_to_grant_s=now - outgoing.offered_at)
                        outgoing.offered_at = None
                case Ended(id=id, outcome=outcome):
                    self._end(id, outcome, now)
                case LinkLost(reason=reason, silent=silent):
                    log.warning("link to %s lost: %s", link.address, reason)
                    self.stats.count(str(link.address), links_lost=1, leases_expired=int(silent))
                    if link.machine.mismatch is not None and link.machine.peer_boot in self._met:
                        self._refused[link.machine.peer_boot] = link.machine.mismatch
                    self._mover.disconnect(link.key)
                    # A new process may be at the old address already, and its link leads through the same connection.
                    alive = (other for other in self._links.values() if other.machine.state is not LinkState.LOST)
                    if all(other.address != link.address for other in alive):
                        self._door.disconnect(link.address)
                case _:
                    raise AssertionError(f"a sender link has no effect {effect}")

    def _write(self, link: _Link, id: str, slots: dict[int, int]) -> None:
        blocks = self._core.scheduler.block_ids(id)
        pieces = [(position, blocks[position // self._block_size], slot) for position, slot in slots.items()]
        self._core.scheduler.kv.retain([block for _, block, _ in pieces])
        self._outgoing[id].writing.update({position: block for position, block, _ in pieces})
        self._mover.write(link.key, id, pieces)

    def _release(self, id: str, positions: Iterable[int]) -> None:
        writing = self._outgoing[id].writing
        self._core.scheduler.kv.release([writing.pop(position) for position in positions])

    def _end(self, id: str, outcome: object, now: float) -> None:
        """The hand-off is over; so is the request, unless it ended before."""
        outgoing = self._outgoing.pop(id)
        peer = str(Address(outgoing.send_to.host, outgoing.send_to.port))
        if isinstance(outcome, GivenOver):
            self.stats.count(peer, handoffs_given_over=1)
        elif isinstance(outcome, Refused | HandoffFailed):
            self.stats.count(peer, handoffs_failed=1)
        scheduler = self._core.scheduler
        match outcome:
            case GivenOver():
                request = scheduler.release_held(id)
                end: HandedOver | Aborted | Failed = HandedOver()
            case Unneeded():
                return
            case Cancelled():
                request, end = self._core.abort(id, now), Aborted()
            case Refused(reason=reason) | HandoffFailed(reason=reason):
                request, end = self._core.abort(id, now, "failed"), Failed(code="handoff", message=reason)
            case _:
                raise AssertionError(f"no outcome: {outcome}")
        if request is not None:
            if isinstance(end, Failed):
                log.warning("request %s: hand-off failed: %s", id, end.message)
            self._emit(RequestOutput(id=id, position=request.num_output_tokens, end=end))


def _key(peer_boot: str, number: int) -> str:
    return f"to/{peer_boot}/{number}"
