"""Whole nodes in simulated time: real engine loops over fake devices, doors and movers, and a network that is told.

The fake device's KV entries are hashes of the prefix, and its steps check each entry that they read: one wrong block is
a failed step. Nothing moves unless told. What a router would do is done by the tests.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve_engine.door import Arrived, Visitor
from pdserve_engine.proc import EngineCoreProc, StepDone
from pdserve_kv_transfer.events import Connected, ConnectFailed, Landed, RegionOpened, WriteFailed, Written
from pdserve_protocol.door import Address
from pdserve_protocol.handoff import Meet, PeerMessage, Region, Retarget
from pdserve_protocol.inbox import Inbox
from pdserve_protocol.node import KVLayout, NodeIdentity, NodeInfo, TokenizerFiles
from pdserve_protocol.outputs import Outputs
from pdserve_protocol.requests import AbortRequests, AddRequest, ReceiveFrom, SendTo
from pdserve_protocol.sampling import SamplingParams

from support.engines import BLOCK, VOCAB, Engine, oracle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_kv_transfer.receiver import GrantPolicy
    from pdserve_protocol.outputs import End, RequestOutput

ROUTER = Visitor(b"router")
BLOCK_BYTES = 32
TICK_S = 0.1


class Promise:
    def eta_s(self, num_tokens: int) -> float:
        return 0.0

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        pass


class WhenRoom:
    def __init__(self, when: GrantPolicy) -> None:
        self.when: GrantPolicy = when
        self.is_full = False

    def may_grant(self, num_blocks: int, usage: Any, num_running: int) -> bool:
        return not self.is_full


@dataclass
class SimRegion:
    node: Node
    key: str
    memory: dict[int, bytes] = field(default_factory=dict)
    fenced: bool = False


@dataclass(eq=False)
class Flight:
    node: Node
    key: str
    id: str
    pieces: Sequence[tuple[int, int, int]]
    region: SimRegion
    digests: dict[int, bytes]


@dataclass(eq=False)
class LandingPass:
    node: Node
    region: SimRegion | None
    key: str
    id: str
    pieces: Sequence[tuple[int, int, int, bytes]]


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


class Node:
    """One process: door and mover at once, because both only hand on to the world."""

    regions_abandoned = 0
    bytes_abandoned = 0

    def __init__(self, world: NodeWorld, name: str, role: str, **limits: Any) -> None:
        self.world, self.name, self.limits = world, name, limits
        world.boots += 1
        self.boot = f"{name}{world.boots}"
        self.port = 1000 + sorted(world.roles).index(name)
        self.engine = Engine(manual=True, **limits)
        layout = KVLayout(
            block_size=BLOCK, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_bytes=BLOCK_BYTES
        )
        identity = NodeIdentity(
            boot_id=self.boot,
            role=role,  # type: ignore[arg-type]
            model_id=world.model_of.get(name, "m"),
            tokenizer_id="t",
            numerics="n",
            layout=layout,
            digest="blake2b",
            connectors=["sim"],
        )
        usage = self.engine.scheduler.usage()
        info = NodeInfo(
            identity=identity,
            served_model_name="m",
            port=self.port,
            advertise_host=None,
            max_model_len=10_000,
            kv_capacity_tokens=usage.total * BLOCK,
            vocab_size=VOCAB,
            software="",
        )
        self.policy = WhenRoom(world.grant_policy)
        self.inbox: Inbox[Any] = Inbox()
        self.proc = EngineCoreProc(
            self.engine.core,
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self.inbox,
            info,
            TokenizerFiles(tokenizer_id="t", files={}),
            send_policy=Promise(),
            receive_policy=self.policy,
            drain_timeout_s=1e9,
            clock=lambda: world.now,
        )
        self.connected: dict[str, SimRegion] = {}
        self.regions: dict[str, SimRegion] = {}

    # The door.

    def send(self, route: Visitor | Address, message: Any) -> None:
        if route == ROUTER:
            if isinstance(message, Outputs):
                self.world.take_outputs(self, message.outputs)
            else:
                self.world.told.append(message)
            return
        assert isinstance(message, PeerMessage)
        if isinstance(route, Visitor):
            self.world.network.append((route.identity.decode(), Address("h", self.port), message))
        else:
            target = next(n for n in self.world.nodes.values() if n.port == route.port)
            self.world.network.append((target.name, Visitor(self.name.encode()), message))

    def disconnect(self, what: object) -> None:
        """Of the door: an Address. Of the mover: a key."""
        if isinstance(what, Address):
            return
        self.connected.pop(what, None)  # type: ignore[call-overload]
        for flight in list(self.world.flights):
            if flight.node is self and flight.key == what:
                self.world.fail_flight(flight)

    def set_load(self, load: object) -> None:
        pass

    def broadcast_load(self) -> None:
        pass

    def taken(self, number: int) -> None:
        pass

    # The mover.

    def open_region(self, key: str, connector: str, wire: object) -> None:
        name = f"region{len(self.world.regions)}"
        self.world.regions[name] = self.regions[key] = SimRegion(self, key)
        region = Region(name=name, num_slots=self.world.num_slots, slot_bytes=BLOCK_BYTES, metadata=b"")
        self.world.events.append((self, RegionOpened(key, region)))

    def fence(self, key: str) -> None:
        if key in self.regions:
            self.regions.pop(key).fenced = True

    def connect(self, key: str, connector: str, region: Region, wire: object) -> None:
        target = self.world.regions[region.name]
        if target.fenced:
            self.world.events.append((self, ConnectFailed(key, "fenced")))
            return
        self.connected[key] = target
        self.world.events.append((self, Connected(key)))

    def write(self, key: str, id: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        if key not in self.connected:
            failed = WriteFailed(key, id, frozenset(piece[0] for piece in pieces), "not connected")
            self.world.events.append((self, failed))
            return
        digests = {position: digest(self.engine.executor.read_block(block)) for position, block, _ in pieces}
        self.world.flights.append(Flight(self, key, id, pieces, self.connected[key], digests))

    def populate(self, blocks: Sequence[int]) -> None:
        pass

    def land(self, key: str, id: str, pieces: Sequence[tuple[int, int, int, bytes]]) -> None:
        self.world.landings.append(LandingPass(self, self.regions.get(key), key, id, pieces))

    # The loop.

    def handle(self, event: object) -> None:
        self.proc._handle(event, self.world.now)  # type: ignore[arg-type]
        self.turn()

    def turn(self) -> None:
        now = self.world.now
        self.proc._receiving.grant_waiting(now)
        self.proc._begin_step(now)
        self.proc._flush()
        self.engine.check_blocks()

    @property
    def busy(self) -> bool:
        return bool(self.engine.executor._pending)

    def complete_step(self) -> None:
        self.engine.executor.complete()
        done = self.inbox.get_nowait()
        assert isinstance(done, StepDone)
        self.handle(StepDone(done.future, self.world.now))


class NodeWorld:
    """Nodes by name. ``ends`` and ``tokens`` are by (id, node name); a second end is a fault."""

    def __init__(
        self,
        roles: dict[str, str],
        *,
        num_slots: int = 8,
        grant_policy: GrantPolicy = "offer",
        model_of: dict[str, str] | None = None,
        **limits: Any,
    ) -> None:
        self.now = 100.0
        self.model_of = model_of or {}
        self.num_slots = num_slots
        self.grant_policy: GrantPolicy = grant_policy
        self.roles = roles
        self.limits = limits
        self.boots = 0
        self.network: list[tuple[str, Visitor | Address, PeerMessage]] = []
        self.events: list[tuple[Node, object]] = []
        self.flights: list[Flight] = []
        self.landings: list[LandingPass] = []
        self.regions: dict[str, SimRegion] = {}
        self.told: list[Any] = []
        self.prompts: dict[str, list[int]] = {}
        self.max_tokens: dict[str, int] = {}
        self.halves: dict[str, list[Node]] = {}
        self.tokens: dict[str, dict[int, int]] = {}
        self.ends: dict[tuple[str, str], End] = {}
        self.proofs: dict[str, Any] = {}
        self.nodes: dict[str, Node] = {}
        for name, role in roles.items():
            self.nodes[name] = Node(self, name, role, **limits)

    def restart(self, name: str) -> None:
        """The process dies; its writes under way may still arrive."""
        old = self.nodes[name]
        for region in self.regions.values():
            if region.node is old:
                region.fenced = True
        self.events = [entry for entry in self.events if entry[0] is not old]
        self.landings = [landing for landing in self.landings if landing.node is not old]
        self.nodes[name] = Node(self, name, self.roles[name], **self.limits)

    # The router.

    def add(self, id: str, p: str, d: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Both halves of a request."""
        sender, receiver = self.nodes[p], self.nodes[d]
        self.prompts[id], self.max_tokens[id] = list(prompt), max_tokens
        self.halves[id] = [sender, receiver]
        self.tokens.setdefault(id, {})
        self.add_half(id, receiver, receive_from=ReceiveFrom(boot_id=sender.boot))
        self.add_half(id, sender, send_to=self.send_to(d))

    def add_half(self, id: str, node: Node, **fields: Any) -> None:
        message = AddRequest(
            id=id,
            boot_id=node.boot,
            prompt_token_ids=self.prompts[id],
            sampling=SamplingParams(max_tokens=self.max_tokens[id], temperature=0.0),
            **fields,
        )
        node.handle(Arrived(ROUTER, message))

    def send_to(self, name: str) -> SendTo:
        node = self.nodes[name]
        return SendTo(host="h", port=node.port, boot_id=node.boot)

    def abort(self, id: str) -> None:
        for node in self.halves[id]:
            if self.nodes[node.name] is node:
                node.handle(Arrived(ROUTER, AbortRequests(ids=[id])))

    def meet(self) -> None:
        """All prefill and decode nodes are told of one another."""
        for node in self.nodes.values():
            others = [n for n in self.nodes.values() if self.roles[n.name] != self.roles[node.name]]
            node.handle(Arrived(ROUTER, Meet(peers=[self.send_to(other.name) for other in others])))

    def retarget(self, id: str, new_id: str, d: str) -> None:
        """The sender's half goes on under a new id to another receiver, whose half is new."""
        sender, receiver = self.halves[id][0], self.nodes[d]
        self.prompts[new_id], self.max_tokens[new_id] = self.prompts[id], self.max_tokens[id]
        self.halves[new_id] = [sender, receiver]
        self.tokens[new_id] = dict(self.tokens[id])
        sender.handle(Arrived(ROUTER, Retarget(id=id, new_id=new_id, send_to=self.send_to(d))))
        self.add_half(new_id, receiver, receive_from=ReceiveFrom(boot_id=sender.boot))

    def take_outputs(self, node: Node, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert (output.id, node.boot) not in self.ends, "something after the end"
            tokens = self.tokens[output.id]
            for offset, token in enumerate(output.token_ids):
                assert tokens.setdefault(output.position + offset, token) == token, "a position was sampled twice"
            if output.transfer is not None:
                self.proofs[output.id] = output.transfer
            if output.end is not None:
                self.ends[output.id, node.boot] = output.end

    def end(self, id: str, node: str) -> End | None:
        return next((end for (of, boot), end in self.ends.items() if of == id and boot.startswith(node)), None)

    def check_tokens(self, id: str) -> None:
        """Whatever came is what the model says, without a gap."""
        tokens = self.tokens[id]
        assert sorted(tokens) == list(range(len(tokens)))
        assert [tokens[n] for n in range(len(tokens))] == oracle(self.prompts[id], len(tokens))

    # What moves.

    def deliver(self, index: int = 0) -> None:
        name, route, message = self.network.pop(index)
        self.nodes[name].handle(Arrived(route, message))

    def post(self, index: int = 0) -> None:
        node, event = self.events.pop(index)
        node.handle(event)

    def land_write(self, index: int = 0, *, corrupt: bool = False) -> None:
        flight = self.flights.pop(index)
        if not flight.region.fenced:
            for _, block, slot in flight.pieces:
                flight.region.memory[slot] = flight.node.engine.executor.read_block(block)
                if corrupt:
                    flight.region.memory[slot] = bytes(len(flight.region.memory[slot]))
        if self.nodes[flight.node.name] is not flight.node:
            return
        if flight.region.fenced:
            self.events.append((flight.node, WriteFailed(flight.key, flight.id, frozenset(flight.digests), "fenced")))
            return
        self.events.append((flight.node, Written(flight.key, flight.id, flight.digests)))

    def fail_flight(self, flight: Flight) -> None:
        self.flights.remove(flight)
        failed = WriteFailed(flight.key, flight.id, frozenset(flight.digests), "broken")
        self.events.append((flight.node, failed))

    def land(self, index: int = 0) -> None:
        landing = self.landings.pop(index)
        ok, bad = set(), set()
        for position, slot, block, expected in landing.pieces:
            region = landing.region
            content = None if region is None or region.fenced else region.memory.get(slot)
            if content is not None and digest(content) == expected:
                landing.node.engine.executor.write_block(block, content)
                ok.add(position)
            else:
                bad.add(position)
        event = Landed(landing.key, landing.id, frozenset(ok), frozenset(bad), len(ok) * BLOCK_BYTES, 0.0)
        self.events.append((landing.node, event))

    def step(self) -> bool:
        """One thing that is under way comes to its end."""
        busy = next((node for node in self.nodes.values() if node.busy), None)
        if self.events:
            self.post()
        elif self.network:
            self.deliver()
        elif self.flights:
            self.land_write()
        elif self.landings:
            self.land()
        elif busy is not None:
            busy.complete_step()
        else:
            return False
        return True

    def settle(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("it never comes to rest")

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes.values():
            node.proc._tick(self.now)
            node.turn()

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.settle()
            self.advance(TICK_S)
        self.settle()

    def run_some(self, turns: int) -> None:
        """A little time passes between one thing and the next."""
        for _ in range(turns):
            self.advance(TICK_S)
            for _ in range(4):
                self.step()

    def check_empty(self) -> None:
        """No request, hand-off or block is left anywhere."""
        for node in self.nodes.values():
            usage = node.engine.scheduler.usage()
            assert not node.engine.scheduler.requests, node.name
            assert usage.free + usage.cached == usage.total, (node.name, usage)
            assert node.proc._sending.num_open == node.proc._receiving.num_open == 0, node.name
