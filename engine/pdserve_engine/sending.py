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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve_kv_transfer.effects import Effect
    from pdserve_kv_transfer.events import MoverEvent
    from pdserve_kv_transfer.mover import Mover
    from pdserve_protocol.handoff import PeerMessage
    from pdserve_protocol.node import NodeIdentity
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
    """One hand-off from here. ``num_kv_tokens``: prompt and forced output, whose KV the receiver needs."""

    request: Request
    send_to: SendTo
    num_kv_tokens: int
    link: _Link | None = None
    num_ready_blocks: int = 0
    writing: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Link:
    """A sender link, where it leads, and the mover's name for it."""

    machine: SenderLink
    address: Address
    key: str


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

    @property
    def num_open(self) -> int:
        return len(self._outgoing)

    def is_active(self) -> bool:
        """Whether time matters: there are links to keep alive."""
        return bool(self._links)

    def peers(self) -> dict[str, str]:
        """Address -> state of the link, for operators."""
        return {str(link.address): f"sending, {link.machine.state.name.lower()}" for link in self._links.values()}

    # ---- requests --------------------------------------------------------------------------------------------------

    def accept(self, request: Request, send_to: SendTo) -> None:
        """A request of ours is to be handed over once it has its first token. Only with a policy."""
        self._outgoing[request.request_id] = _Outgoing(request, send_to, request.num_tokens)

    def offer_scheduled(self, now: float) -> None:
        """Offers what is being computed and was not yet; all its blocks are reserved, so a grant never waits."""
        for outgoing in list(self._outgoing.values()):
            if outgoing.link is not None or not self._core.scheduler.block_ids(outgoing.request.request_id):
                continue
            assert self._policy is not None, "accepted without a policy"
            outgoing.link = link = self._link_to(outgoing.send_to, now)
            num_left = outgoing.num_kv_tokens - outgoing.request.num_computed_tokens
            eta_s = self._policy.eta_s(max(0, num_left))
            self._apply(link, link.machine.offer(outgoing.request.request_id, outgoing.num_kv_tokens, eta_s, now), now)
            self._mark_ready(outgoing, outgoing.request.num_computed_tokens, now)

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
                if result.held:
                    final = Final(token_ids=list(result.request.output_token_ids), logprobs=result.logprobs)
                    self._apply(outgoing.link, machine.finish(id, final, now), now)

    def abort(self, request_id: str, reason: str, now: float) -> None:
        """The request has ended here before its hand-off."""
        outgoing = self._outgoing.get(request_id)
        if outgoing is None:
            return
        if outgoing.link is None:
            del self._outgoing[request_id]
        else:
            self._apply(outgoing.link, outgoing.link.machine.abort(request_id, reason, now), now)

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
                    self._mover.connect(link.key, connector, region, wire)
                case Write(id=id, slots=slots):
                    self._write(link, id, dict(slots))
                case Granted():
                    pass
                case Ended(id=id, outcome=outcome):
                    self._end(id, outcome, now)
                case LinkLost(reason=reason):
                    log.warning("link to %s lost: %s", link.address, reason)
                    self._mover.disconnect(link.key)
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
        del self._outgoing[id]
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
