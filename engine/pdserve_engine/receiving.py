"""Receiving: hand-offs to this node, joined to the scheduler.

Turns the effects of the receiver links into reservations, landing passes and requests that are ready to run. Blocks
into which a landing pass copies are retained, so that a request may end at any moment.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pdserve_kv_transfer.effects import (
    Cancelled,
    Completed,
    Ended,
    Failed as HandoffFailed,
    FenceRegion,
    Land,
    LinkLost,
    NeedRegion,
    Refused,
    Transmit,
    Unneeded,
    WantBlocks,
)
from pdserve_kv_transfer.events import Landed, RegionFailed, RegionOpened
from pdserve_kv_transfer.receiver_link import ReceiverLink, ReceiverLinkState
from pdserve_kv_transfer.spans import copy_runs, positions_to_send
from pdserve_protocol.door import Address
from pdserve_protocol.outputs import Aborted, Failed, RequestOutput, TransferProof
from pdserve_protocol.timing import REMEMBER_ENDED_S

from pdserve_engine.handoff_stats import HandoffStats, ReservedBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pdserve_kv_transfer.effects import Effect
    from pdserve_kv_transfer.events import MoverEvent
    from pdserve_kv_transfer.mover import Mover
    from pdserve_kv_transfer.receiver import GrantPolicy
    from pdserve_kv_transfer.spans import CopyRun
    from pdserve_kv_transfer.wire import Wire
    from pdserve_protocol.handoff import PeerMessage
    from pdserve_protocol.node import NodeIdentity
    from pdserve_protocol.requests import ReceiveFrom, SendTo

    from pdserve_engine.core import EngineCore
    from pdserve_engine.door import NodeDoor, Route
    from pdserve_engine.kv_cache_manager import BlockUsage
    from pdserve_engine.request import Request
    from pdserve_engine.scheduler import StepResult

log = logging.getLogger(__name__)


class ReceivePolicy(Protocol):
    """When a node grants."""

    when: GrantPolicy

    def may_grant(self, num_blocks: int, usage: BlockUsage, num_running: int) -> bool:
        """Whether a hand-off that needs up to ``num_blocks`` blocks may have them now.

        Offers are asked about in the order of their arrival, again whenever blocks may have come free; a later one
        never overtakes.
        """
        ...


@dataclass(slots=True)
class _Incoming:
    """One hand-off to here. ``landing``: position -> blocks of landing passes under way."""

    request: Request
    link: _Link
    landing: dict[int, list[int]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Link:
    machine: ReceiverLink
    key: str
    route: Route | None = None
    used_at: float = 0.0
    address: Address | None = None

    @property
    def peer(self) -> str:
        """For operators: its address, once a router has told it."""
        return self.machine.peer_boot if self.address is None else str(self.address)


@dataclass(slots=True)
class Takeover:
    """What came with a transfer and has to be told with the request's first output."""

    completed: Completed
    transport: str
    exact: bool
    position: int
    peer: str


class Receiving:
    """All hand-offs to this node. Every method runs on the engine loop and takes the loop's time."""

    def __init__(
        self,
        core: EngineCore,
        mover: Mover,
        door: NodeDoor,
        identity: NodeIdentity,
        policy: ReceivePolicy | None,
        emit: Callable[[RequestOutput], None],
        on_result: Callable[[StepResult], None],
    ) -> None:
        self._core = core
        self._mover = mover
        self._door = door
        self._identity = identity
        self._policy = policy
        self._emit = emit
        self._on_result = on_result
        self._block_size = identity.layout.block_size
        self._incoming: dict[str, _Incoming] = {}
        self._links: dict[str, _Link] = {}
        self._met: dict[str, Address] = {}
        self._wanting: deque[str] = deque()
        self._takeovers: dict[str, Takeover] = {}
        self.stats = HandoffStats()
        self.reserved = ReservedBlocks()
        self.digest_mismatches = 0
        self.blocks_landed = 0
        self.bytes_landed = 0
        self.landing_s = 0.0

    @property
    def num_open(self) -> int:
        return len(self._incoming)

    @property
    def num_landing(self) -> int:
        """Blocks of the wire that are being landed."""
        return sum(len(incoming.landing) for incoming in self._incoming.values())

    def knows(self, request_id: str) -> bool:
        """Whether a hand-off of that id is not over; its request may be."""
        return request_id in self._incoming

    def is_active(self) -> bool:
        """Whether time matters: there are links to keep alive or hand-offs to wait for."""
        return bool(self._links)

    def peers(self) -> dict[str, str]:
        """Peer -> state of the link, for operators."""
        return {link.peer: f"receiving, {link.machine.state.name.lower()}" for link in self._links.values()}

    def meet(self, peer: SendTo, now: float) -> None:
        """A router says who is where. Whoever was there before is dead."""
        boot, address = peer.boot_id, Address(peer.host, peer.port)
        for other, at in list(self._met.items()):
            if at == address and other != boot:
                del self._met[other]
                if (link := self._links.get(other)) is not None:
                    self._apply(link, link.machine.peer_restarted(now), now)
        self._met[boot] = address
        if (known := self._links.get(boot)) is not None:
            known.address = address

    # ---- requests --------------------------------------------------------------------------------------------------

    def accept(self, request: Request, receive_from: ReceiveFrom, now: float) -> None:
        """A request of ours waits for its KV."""
        link = self._link_from(receive_from.boot_id, now)
        self._incoming[request.request_id] = _Incoming(request, link)
        self._apply(link, link.machine.expect(request.request_id, request.num_tokens, now), now)

    def abort(self, request_id: str, now: float) -> None:
        """The request has ended here; if its hand-off is open that ends too."""
        self.reserved.release(request_id, now)
        self._takeovers.pop(request_id, None)
        incoming = self._incoming.get(request_id)
        if incoming is not None:
            self._apply(incoming.link, incoming.link.machine.cancel(request_id, now), now)

    def grant_waiting(self, now: float) -> None:
        """Grants in order of arrival as long as there is room. Call whenever blocks may have come free.

        Who was preempted here comes first, and a prompt that is computed here comes before those that arrived later:
        else new hand-offs would take every block that comes free, for ever.
        """
        scheduler = self._core.scheduler
        for id in list(self._wanting):
            if scheduler.has_preempted:
                return
            incoming = self._incoming.get(id)
            if incoming is None or id not in scheduler.requests:
                self._wanting.remove(id)
                continue
            request, machine = incoming.request, incoming.link.machine
            if machine.wire is None:
                # The sender has not introduced itself: which positions its blocks have is not known.
                continue
            assert self._policy is not None, "accepted without a policy"
            num_blocks = scheduler.kv.blocks_for(request.num_tokens + 1)
            num_wanted = num_blocks + scheduler.num_blocks_before(request)
            if not self._policy.may_grant(num_wanted, scheduler.usage(), scheduler.num_running):
                return
            request.set_kv_origin(machine.origin)
            if scheduler.reserve(id) is None:
                return
            self._mover.populate(scheduler.block_ids(id))
            self.reserved.reserve(id, num_blocks, now)
            self._wanting.remove(id)
            positions = positions_to_send(request.num_tokens, request.num_cached_tokens, machine.wire.source.block_size)
            self._apply(incoming.link, machine.grant(id, positions, now), now)

    def takeover(self, request: Request) -> Takeover | None:
        """What the request's first output has to tell beside its own tokens; once."""
        takeover = self._takeovers.pop(request.request_id, None)
        if takeover is not None:
            timings = takeover.completed.timings
            self.stats.observe(
                grant_s=timings.grant_s,
                transfer_s=timings.transfer_s,
                landing_s=timings.landing_s,
                admission_s=request.admission_s,
            )
            self.stats.count(takeover.peer, tokens_recomputed=request.num_recomputed)
        return takeover

    # ---- links -----------------------------------------------------------------------------------------------------

    def on_peer_message(self, route: Route, message: PeerMessage, now: float) -> None:
        """A message of a sender."""
        link = self._link_from(message.from_boot, now)
        if message.link >= link.machine.number:
            link.route = route
        self._apply(link, link.machine.on_peer_message(message, now), now)

    def on_mover_event(self, event: MoverEvent, now: float) -> None:
        """What the mover did for one of our links; events of other links say nothing."""
        match event:
            case RegionOpened(peer=key, region=region):
                link = self._by_key(key)
                if link is not None:
                    self._apply(link, link.machine.region_ready(region, now), now)
            case RegionFailed(peer=key, reason=reason):
                link = self._by_key(key)
                if link is not None:
                    log.error("no landing region for %s: %s", key, reason)
                    self._apply(link, link.machine.region_failed(reason, now), now)
            case Landed(id=id, ok=ok, bad=bad, num_bytes=num_bytes, seconds=seconds):
                landing = self._incoming[id].landing
                self._core.scheduler.kv.release([block for position in ok | bad for block in landing.pop(position)])
                self.digest_mismatches += len(bad)
                amounts = {"blocks_landed": len(ok), "bytes_landed": num_bytes, "digest_mismatches": len(bad)}
                self.stats.count(self._incoming[id].link.peer, **amounts)
                self.blocks_landed += len(ok)
                self.bytes_landed += num_bytes
                self.landing_s += seconds
                link = self._incoming[id].link
                self._apply(link, link.machine.on_landed(id, ok, bad, now), now)

    def tick(self, now: float) -> None:
        """Lets deadlines pass and forgets links that have long been over."""
        for boot, link in list(self._links.items()):
            self._apply(link, link.machine.tick(now), now)
            if link.machine.open_ids:
                link.used_at = now
            if link.machine.state is ReceiverLinkState.IDLE and now - link.used_at > REMEMBER_ENDED_S:
                del self._links[boot]

    def _link_from(self, boot: str, now: float) -> _Link:
        link = self._links.get(boot)
        if link is None:
            when = "offer" if self._policy is None else self._policy.when
            machine = ReceiverLink(self._identity, boot, grant_policy=when)
            link = self._links[boot] = _Link(machine, f"from/{boot}", address=self._met.get(boot))
        link.used_at = now
        return link

    def _by_key(self, key: str) -> _Link | None:
        return self._links.get(key.removeprefix("from/"))

    def _apply(self, link: _Link, effects: Iterable[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case Transmit(message=message):
                    if link.route is not None:
                        self._door.send(link.route, message)
                case NeedRegion(connector=connector, wire=wire):
                    self._mover.open_region(link.key, connector, wire)
                case FenceRegion():
                    self._mover.fence(link.key)
                case WantBlocks(id=id):
                    self._wanting.append(id)
                    self.grant_waiting(now)
                case Land(id=id, pieces=pieces):
                    self._land(link, id, {position: (p.slot, p.digest) for position, p in pieces.items()})
                case Completed():
                    self._complete(link, effect, now)
                case Ended(id=id, outcome=outcome):
                    self._end(id, outcome, now)
                case LinkLost(reason=reason, silent=silent):
                    log.warning("link from %s lost: %s", link.peer, reason)
                    self.stats.count(link.peer, links_lost=1, leases_expired=int(silent))
                case _:
                    raise AssertionError(f"a receiver link has no effect {effect}")

    def _land(self, link: _Link, id: str, pieces: Mapping[int, tuple[int, bytes]]) -> None:
        blocks = self._core.scheduler.block_ids(id)
        incoming, wire = self._incoming[id], link.machine.wire
        assert wire is not None, "something landed from a sender that has not introduced itself"
        orders: list[tuple[int, int, int | list[CopyRun], bytes]] = []
        for position, (slot, digest) in pieces.items():
            target: int | list[CopyRun]
            if wire.source.block_size == self._block_size:
                target = blocks[position // self._block_size]
                into = [target]
            else:
                target = [run._replace(target=blocks[run.target]) for run in self._runs(incoming, position, wire)]
                into = [run.target for run in target]
            self._core.scheduler.kv.retain(into)
            incoming.landing[position] = into
            orders.append((position, slot, target, digest))
        self._mover.land(link.key, id, orders)

    def _runs(self, incoming: _Incoming, position: int, wire: Wire) -> list[CopyRun]:
        request = incoming.request
        return copy_runs(
            position, wire.source.block_size, self._block_size, request.num_cached_tokens, request.num_tokens
        )

    def _complete(self, link: _Link, completed: Completed, now: float) -> None:
        request = self._incoming[completed.id].request
        fault = self._fault_of_tokens(request, completed.final.token_ids)
        if fault is not None:
            self._end(completed.id, HandoffFailed(fault), now)
            return
        del self._incoming[completed.id]
        # A hole ends the prefix: what has landed beyond it is computed again.
        num_computed = max(min(completed.bad_positions, default=request.num_tokens), request.num_cached_tokens)
        self._takeovers[completed.id] = Takeover(
            completed, link.machine.connector or "", link.machine.exact, request.num_output_tokens, link.peer
        )
        self.reserved.release(completed.id, now)
        self.stats.count(link.peer, handoffs_taken_over=1, blocks_resent=completed.num_resent)
        if completed.bad_positions:
            log.error("request %s: the KV from token %d on did not come right; recomputing", completed.id, num_computed)
        result = self._core.scheduler.kv_arrived(completed.id, completed.final.token_ids, num_computed, now)
        if result is not None:
            self._on_result(result)

    def _fault_of_tokens(self, request: Request, token_ids: Sequence[int]) -> str | None:
        """Why these cannot be the output so far: they come from another process, and a step would stumble over them."""
        vocab_size = self._core.limits.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in token_ids):
            return "the sender's tokens are not of the vocabulary"
        if len(token_ids) > request.sampling.max_tokens:
            return f"the sender has {len(token_ids)} tokens, more than are wanted"
        if any(ours != theirs for ours, theirs in zip(request.output_token_ids, token_ids, strict=False)):
            return "the sender's tokens do not go on from those that are known"
        return None

    def _end(self, id: str, outcome: object, now: float) -> None:
        """The hand-off is over without KV; so is the request, unless it ended before."""
        peer = self._incoming.pop(id).link.peer
        self.reserved.release(id, now)
        if isinstance(outcome, Refused | HandoffFailed):
            self.stats.count(peer, handoffs_failed=1)
        match outcome:
            case Unneeded():
                # The other half has finished the request with its first token.
                request, end = self._core.abort(id, now, "not_needed"), Aborted()
            case Cancelled():
                request, end = self._core.abort(id, now), Aborted()
            case Refused(reason=reason) | HandoffFailed(reason=reason):
                request, failed = self._core.abort(id, now, "failed"), Failed(code="handoff", message=reason)
                if request is not None:
                    log.warning("request %s: hand-off failed: %s", id, reason)
                    self._emit(RequestOutput(id=id, position=request.num_output_tokens, end=failed))
                return
            case _:
                raise AssertionError(f"no outcome: {outcome}")
        if request is not None:
            self._emit(RequestOutput(id=id, position=request.num_output_tokens, end=end))


def transfer_proof(takeover: Takeover, request: Request) -> TransferProof:
    """The proof, once the request has been scheduled."""
    timings = takeover.completed.timings
    return TransferProof(
        transport=takeover.transport,
        exact=takeover.exact,
        blocks=takeover.completed.num_blocks,
        bytes=takeover.completed.num_bytes,
        cached_tokens=request.num_cached_tokens,
        recomputed_tokens=request.num_recomputed,
        grant_s=timings.grant_s,
        transfer_s=timings.transfer_s,
        landing_s=timings.landing_s,
        admission_s=request.admission_s,
        resent_blocks=takeover.completed.num_resent,
        mismatches=takeover.completed.num_mismatches,
    )
