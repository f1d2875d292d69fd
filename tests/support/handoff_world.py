"""Two nodes, a bad network and a bad transport in simulated time, around the two ends of the links between them.

The world is what a node's event loop and mover do, made small: it carries out the effects, keeps what is on its way
(messages, writes, landing passes) until told, and checks at each step what must always hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve_kv_transfer.effects import (
    Completed,
    Connect,
    Ended,
    FenceRegion,
    Granted,
    HandedOver,
    Land,
    LinkLost,
    NeedRegion,
    Transmit,
    WantBlocks,
    Write,
)
from pdserve_kv_transfer.incoming import MAX_TRIES
from pdserve_kv_transfer.link import stale_boot
from pdserve_kv_transfer.receiver_link import ReceiverLink
from pdserve_kv_transfer.sender_link import LinkState, SenderLink
from pdserve_protocol.handoff import Final, PeerMessage, Region
from pdserve_protocol.node import KVLayout, NodeIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve_kv_transfer.effects import Effect, Piece
    from pdserve_kv_transfer.receiver import GrantPolicy

BLOCK_SIZE = 16
BLOCK_BYTES = 1024
TICK_S = 0.25
FINAL = Final(token_ids=[7], logprobs=None)


def identity(boot_id: str, **changes: object) -> NodeIdentity:
    """A node that gets on with every other one made here, unless ``changes`` say otherwise."""
    layout = KVLayout(
        block_size=BLOCK_SIZE, num_layers=2, num_kv_heads=2, head_dim=2, dtype="float32", block_bytes=BLOCK_BYTES
    )
    values: dict[str, object] = {
        "boot_id": boot_id,
        "role": "prefill",
        "model_id": "m",
        "tokenizer_id": "t",
        "numerics": "n",
        "layout": layout,
        "digest": "xxh3-128",
        "connectors": ["loopback"],
        **changes,
    }
    return NodeIdentity(**values)  # type: ignore[arg-type]


def positions_of(num_tokens: int) -> list[int]:
    """Positions of all blocks of a prompt, the last one perhaps partly filled."""
    return list(range(0, num_tokens, BLOCK_SIZE))


def content(id: str, position: int) -> bytes:
    """What the right block holds; it is its own digest here."""
    return f"{id}@{position}".encode()


@dataclass(eq=False)
class Flight:
    """A write under way. One that was given up may still arrive."""

    link: SenderLink
    region: str
    id: str
    slots: Mapping[int, int]
    given_up: bool = False


@dataclass(eq=False)
class Landing:
    """A landing pass under way."""

    link: ReceiverLink
    region: str
    id: str
    pieces: Mapping[int, Piece]


@dataclass
class SimRegion:
    memory: dict[int, bytes] = field(default_factory=dict)
    fenced: bool = False


class World:
    """P, D and what is between them. Nothing moves unless told."""

    def __init__(self, num_slots: int = 8, grant_policy: GrantPolicy = "offer") -> None:
        self.now = 1000.0
        self.grant_policy = grant_policy
        self.num_slots = num_slots
        self.boots = 0
        self.network: list[PeerMessage] = []
        self.flights: list[Flight] = []
        self.landings: list[Landing] = []
        self.regions: dict[str, SimRegion] = {}
        self.region_of: dict[ReceiverLink, Region] = {}
        self.opening: list[ReceiverLink] = []
        self.connecting: list[tuple[SenderLink, Region]] = []
        self.connected_to: dict[SenderLink, str] = {}
        self.p_links: list[SenderLink] = []
        self.d_links: dict[str, ReceiverLink] = {}
        self.num_links = 0
        self.num_tokens: dict[str, int] = {}
        self.cached: dict[str, set[int]] = {}
        self.wanted: dict[str, None] = {}
        self.p_has: dict[str, set[int]] = {}
        self.p_tokens: dict[str, list[int]] = {}
        self.granted: set[str] = set()
        self.unpinned: set[str] = set()
        self.to_compute_again: list[str] = []
        self.p_of: dict[str, SenderLink] = {}
        self.d_of: dict[str, ReceiverLink] = {}
        self.p_ends: dict[str, list[Effect]] = {}
        self.d_ends: dict[str, list[Effect]] = {}
        self.written_positions: dict[str, set[int]] = {}
        self.cache: dict[str, dict[int, bytes]] = {}
        self.lost: list[str] = []
        self.corrupted = False
        self.start_p()
        self.start_d()

    # Processes.

    def num_free_slots(self) -> list[int]:
        """Of each region that is open."""
        return [len(link._receiver._free) for link in self.d_links.values() if link._receiver._region is not None]

    def start_p(self, **changes: object) -> None:
        """P (again): what the old process knew is gone, what it had under way may still arrive."""
        self.boots += 1
        self.p = identity(f"p{self.boots}", **changes)
        gone = set(self.p_links)
        self.p_links = []
        self.connecting = []
        for flight in self.flights:
            flight.given_up = True
        self.p_of = {id: link for id, link in self.p_of.items() if link not in gone}
        self.to_compute_again = []

    def start_d(self, **changes: object) -> None:
        """D (again): its memory is gone."""
        self.boots += 1
        self.d = identity(f"d{self.boots}", role="decode", **changes)
        self.d_links = {}
        self.d_of = {}
        self.opening = []
        self.landings = []
        self.wanted = {}
        for region in self.regions.values():
            region.fenced = True

    def p_link(self) -> SenderLink:
        """P's link to the D of now, opened if there is none."""
        for link in self.p_links:
            if link.peer_boot == self.d.boot_id and link.state is not LinkState.LOST:
                return link
        self.num_links += 1
        link = SenderLink(self.p, self.d.boot_id, number=self.num_links)
        self.p_links.append(link)
        self.do(link, link.open(self.now))
        return link

    def d_link(self, p_boot: str) -> ReceiverLink:
        if p_boot not in self.d_links:
            self.d_links[p_boot] = ReceiverLink(self.d, p_boot, grant_policy=self.grant_policy)
        return self.d_links[p_boot]

    # The engines.

    def offer(self, id: str, num_tokens: int, *, cached: Iterable[int] = ()) -> None:
        self.num_tokens[id] = num_tokens
        self.cached[id] = set(cached)
        link = self.p_link()
        self.p_of[id] = link
        self.p_ends[id] = []
        self.p_has[id] = set()
        self.do(link, link.offer(id, num_tokens, 0.0, self.now))

    def expect(self, id: str) -> None:
        link = self.d_link(self.p.boot_id)
        self.d_of[id] = link
        self.d_ends[id] = []
        self.do(link, link.expect(id, self.num_tokens.setdefault(id, 50), self.now))

    def ready(self, id: str, positions: Iterable[int] | None = None) -> None:
        positions = positions_of(self.num_tokens[id]) if positions is None else positions
        self.p_has[id].update(positions)
        self.on_p(id, lambda link: link.ready(id, positions, self.now))

    def finish(self, id: str) -> None:
        if id not in self.p_tokens:
            self.p_tokens[id] = list(FINAL.token_ids)
        final = Final(token_ids=list(self.p_tokens[id]), logprobs=None)
        self.on_p(id, lambda link: link.finish(id, final, self.now))

    def is_hold(self, id: str) -> bool:
        """Finished at P, with its blocks, and without a grant."""
        computed = self.p_has.get(id, set()) >= set(positions_of(self.num_tokens[id])) and id in self.p_tokens
        return computed and id in self.p_of and not self.p_ends[id] and id not in self.granted

    def unpin(self, id: str) -> None:
        """P gives the blocks of a hold to others."""
        assert self.is_hold(id)
        self.p_has[id] = set()
        self.unpinned.add(id)
        self.on_p(id, lambda link: link.unpinned(id))

    def begin_decode_on(self, id: str) -> None:
        """P generates a token of a hold by itself; ``end_decode_on`` follows."""
        assert self.is_hold(id)
        last = {positions_of(self.num_tokens[id])[-1]}
        self.p_has[id] -= last
        self.on_p(id, lambda link: link.reopen(id, last))

    def end_decode_on(self, id: str) -> None:
        self.p_tokens[id].append(self.p_tokens[id][-1] + 1)
        self.compute(id)

    def retarget(self, id: str, new_id: str) -> None:
        """The old id ends, the blocks are offered anew."""
        self.abort(id)
        self.p_tokens[new_id] = list(self.p_tokens.get(id, FINAL.token_ids))
        self.offer(new_id, self.num_tokens[id], cached=self.cached[id])
        self.compute(new_id)

    def compute(self, id: str) -> None:
        """All blocks and the first token."""
        self.ready(id)
        self.finish(id)

    def not_needed(self, id: str) -> None:
        self.on_p(id, lambda link: link.not_needed(id, self.now))

    def abort(self, id: str) -> None:
        self.on_p(id, lambda link: link.abort(id, "aborted", self.now))

    def cancel(self, id: str) -> None:
        self.on_d(id, lambda link: link.cancel(id, self.now))

    def grant(self, id: str) -> None:
        """D has room."""
        del self.wanted[id]
        needed = [p for p in positions_of(self.num_tokens[id]) if p not in self.cached[id]]
        self.on_d(id, lambda link: link.grant(id, needed, self.now))

    def refuse(self, id: str) -> None:
        self.wanted.pop(id)
        self.on_d(id, lambda link: link.refuse(id, "does not fit", self.now))

    def on_p(self, id: str, verb: Callable[[SenderLink], list[Effect] | None]) -> None:
        link = self.p_of.get(id)
        if link is not None:
            self.do(link, verb(link) or [])

    def on_d(self, id: str, verb: Callable[[ReceiverLink], list[Effect]]) -> None:
        link = self.d_of.get(id)
        if link is not None:
            self.do(link, verb(link))

    # Network, transport, memory, time.

    def deliver(self, index: int = 0) -> None:
        message = self.network.pop(index)
        if message.from_sender:
            self._deliver_to_d(message)
        else:
            self._deliver_to_p(message)

    def land_write(self, index: int = 0) -> None:
        """The bytes of a write arrive and its source learns it."""
        flight = self.flights.pop(index)
        region = self.regions[flight.region]
        if not region.fenced:
            for position, slot in flight.slots.items():
                self._check_slot(flight, position, slot)
                region.memory[slot] = content(flight.id, position)
        if flight.given_up:
            return
        if region.fenced:
            self.fail_flight(flight)
            return
        digests = {position: content(flight.id, position) for position in flight.slots}
        self.written_positions.setdefault(flight.id, set()).update(digests)
        self.do(flight.link, flight.link.on_written(flight.id, digests, self.now))

    def fail_write(self, index: int = 0) -> None:
        """The source learns that a write failed; its bytes may still arrive."""
        flight = self.flights[index]
        if not flight.given_up:
            flight.given_up = True
            self.fail_flight(flight)

    def fail_flight(self, flight: Flight) -> None:
        self.do(flight.link, flight.link.on_write_failed(flight.id, list(flight.slots), "broken", self.now))

    def finish_landing(self, index: int = 0) -> None:
        landing = self.landings.pop(index)
        region = self.regions[landing.region]
        ok, bad = set(), set()
        for position, piece in landing.pieces.items():
            landed = region.memory.get(piece.slot)
            if landed == piece.digest:
                ok.add(position)
                self.cache.setdefault(landing.id, {})[position] = landed
            else:
                bad.add(position)
        self.do(landing.link, landing.link.on_landed(landing.id, ok, bad, self.now))

    def corrupt(self, slot: int) -> None:
        for region in self.regions.values():
            if slot in region.memory:
                region.memory[slot] = b"garbage"
                self.corrupted = True

    def advance(self, seconds: float) -> None:
        """Time passes and everybody's clock ticks; nothing else moves."""
        self.now += seconds
        for link in [*self.p_links, *self.d_links.values()]:
            self.do(link, link.tick(self.now))

    def settle(self) -> None:
        """Everything that is on its way arrives, in order, and D grants whatever is wanted."""
        while self.step():
            pass

    def step(self) -> bool:
        if self.opening:
            self.open_region()
        elif self.connecting:
            self.finish_connect()
        elif self.network:
            self.deliver()
        elif self.flights:
            self.land_write()
        elif self.landings:
            self.finish_landing()
        elif self.wanted:
            self.grant(next(iter(self.wanted)))
        elif self.to_compute_again:
            self.compute(self.to_compute_again.pop(0))
        else:
            return False
        return True

    def run(self, seconds: float) -> None:
        """Time passes with everything working."""
        for _ in range(round(seconds / TICK_S)):
            self.settle()
            self.advance(TICK_S)
        self.settle()

    def run_without_grants(self, seconds: float) -> None:
        """Time passes and messages arrive, but D has no room and nothing else moves."""
        for _ in range(round(seconds / TICK_S)):
            while self.network:
                self.deliver()
            self.advance(TICK_S)

    def open_region(self) -> None:
        link = self.opening.pop(0)
        region = Region(
            name=f"region{len(self.regions)}", num_slots=self.num_slots, slot_bytes=BLOCK_BYTES, metadata=b""
        )
        self.regions[region.name] = SimRegion()
        self.region_of[link] = region
        self.do(link, link.region_ready(region, self.now))

    def finish_connect(self) -> None:
        link, region = self.connecting.pop(0)
        if self.regions[region.name].fenced:
            self.do(link, link.connect_failed("fenced", self.now))
            return
        self.connected_to[link] = region.name
        self.do(link, link.connected(self.now))

    # Effects.

    def do(self, link: SenderLink | ReceiverLink, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(link, SenderLink):
                self._do_p(link, effect)
            else:
                self._do_d(link, effect)

    def _do_p(self, link: SenderLink, effect: Effect) -> None:
        match effect:
            case Transmit(message=message):
                self.network.append(message)
            case Connect(region=region):
                self.connecting.append((link, region))
            case Write(id=id, slots=slots):
                assert not self.p_ends[id], "a write after the end"
                assert not set(slots) & self.cached[id], "what the receiver caches is never sent"
                assert self.p_has[id] >= set(slots), "blocks that are somebody else's, or not final, are sent"
                assert id in self.granted
                self.flights.append(Flight(link, self.connected_to[link], id, dict(slots)))
            case Granted(id=id):
                assert id not in self.granted, "two grants"
                self.granted.add(id)
                if id in self.unpinned:
                    self.unpinned.remove(id)
                    self.to_compute_again.append(id)
            case Ended(id=id):
                assert not self.p_ends[id], "two ends"
                under_way = [f for f in self.flights if f.id == id and f.link is link and not f.given_up]
                assert not under_way, "an end with writes under way"
                self.p_ends[id].append(effect)
            case LinkLost(reason=reason):
                self.lost.append(reason)
                self.connecting = [entry for entry in self.connecting if entry[0] is not link]
                for flight in list(self.flights):
                    if flight.link is link and not flight.given_up:
                        flight.given_up = True
                        self.fail_flight(flight)
            case _:
                raise AssertionError(f"not an effect of a sender link: {effect}")

    def _do_d(self, link: ReceiverLink, effect: Effect) -> None:
        match effect:
            case Transmit(message=message):
                self.network.append(message)
            case NeedRegion():
                self.opening.append(link)
            case FenceRegion():
                self.regions[self.region_of[link].name].fenced = True
            case LinkLost(reason=reason):
                self.lost.append(reason)
            case WantBlocks(id=id):
                assert not self.d_ends[id]
                self.wanted[id] = None
            case Land(id=id, pieces=pieces):
                assert not self.d_ends[id], "a landing after the end"
                self.landings.append(Landing(link, self.region_of[link].name, id, dict(pieces)))
            case Ended(id=id):
                self._d_end(link, id, effect)
            case Completed(id=id):
                self._d_end(link, id, effect)
                self._check_completed(effect)
            case _:
                raise AssertionError(f"not an effect of a receiver link: {effect}")

    def _d_end(self, link: ReceiverLink, id: str, effect: Effect) -> None:
        assert not self.d_ends[id], "two ends"
        assert not [landing for landing in self.landings if landing.id == id], "an end with a landing under way"
        self.d_ends[id].append(effect)
        self.wanted.pop(id, None)

    def _check_completed(self, completed: Completed) -> None:
        id = completed.id
        assert completed.final.token_ids == self.p_tokens[id], "tokens are missing, or others were generated since"
        needed = set(positions_of(self.num_tokens[id])) - self.cached[id]
        landed = self.cache.get(id, {})
        assert completed.bad_positions | landed.keys() == needed
        assert completed.num_blocks == len(needed) - len(completed.bad_positions)
        for position in needed - completed.bad_positions:
            assert landed[position] == content(id, position)
        assert completed.num_resent <= MAX_TRIES * len(needed)
        if not self.corrupted and completed.bad_positions:
            assert not self.p_is_well(id), "nothing was corrupt and the sender was there"

    def p_is_well(self, id: str) -> bool:
        """P knows of nothing wrong with this hand-off."""
        link = self.p_of.get(id)
        ends = self.p_ends[id]
        return link is not None and link.state is LinkState.UP and ends in ([], [Ended(id, HandedOver())])

    def _check_slot(self, flight: Flight, position: int, slot: int) -> None:
        """A slot that may be written is nobody else's: ask the receiver who holds it."""
        for link, region in self.region_of.items():
            if region.name != flight.region or link not in self.d_links.values():
                continue
            for handoff in link._receiver._handoffs.values():
                held_here = {handoff.slots[p] for p in handoff.held}
                assert handoff.id == flight.id or slot not in held_here, "a write into another's slot"
            assert slot not in link._receiver._free, "a write into a free slot"

    def _deliver_to_d(self, message: PeerMessage) -> None:
        stale = stale_boot(self.d.boot_id, message)
        if message.to_boot != self.d.boot_id:
            if stale is not None:
                self.network.append(stale)
            return
        link = self.d_link(message.from_boot)
        self.do(link, link.on_peer_message(message, self.now))

    def _deliver_to_p(self, message: PeerMessage) -> None:
        if message.to_boot != self.p.boot_id:
            stale = stale_boot(self.p.boot_id, message)
            if stale is not None:
                self.network.append(stale)
            return
        for link in list(self.p_links):
            if link.peer_boot == message.from_boot:
                self.do(link, link.on_peer_message(message, self.now))


def started(world: World, id: str = "a", num_tokens: int = 50, cached: tuple[int, ...] = ()) -> World:
    """Both halves are there and the offer is on its way."""
    world.num_tokens[id] = num_tokens
    world.expect(id)
    world.offer(id, num_tokens, cached=cached)
    return world


def completed(world: World, id: str = "a") -> Completed:
    (end,) = world.d_ends[id]
    assert isinstance(end, Completed), end
    assert world.p_ends[id] == [Ended(id, HandedOver())]
    return end


def drained(world: World) -> None:
    """Nothing is left of any hand-off on either side."""
    world.run(2.0)
    for p_link in world.p_links:
        assert p_link._sender.describe() == {}
    for d_link in world.d_links.values():
        assert d_link._receiver.describe() == {}
    assert set(world.num_free_slots()) <= {world.num_slots}
