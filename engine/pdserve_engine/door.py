"""NodeDoor: the ZMQ thread of a node.

Owns the sockets: one ROUTER for everyone who comes (routers, commands, peers) and one DEALER to each peer we go to.
Answers pings by itself, so that a busy engine is not taken for dead, and notices who has fallen silent. Everything else
it hands to the engine loop as an event. While too much waits for the loop it pauses: listens to nobody, and tells its
load unasked. Knows nothing of what the messages mean.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq
from pdserve_protocol.codec import Decoder, Message, encode
from pdserve_protocol.door import Address, Door, connect_door
from pdserve_protocol.errors import AddressError, BadMessage, NoSocketLeft
from pdserve_protocol.handoff import Meet, PeerMessage, Retarget
from pdserve_protocol.node import GetStatus, GetTokenizer, Hello, Ping, ResetPrefixCache
from pdserve_protocol.requests import AbortRequests, AddRequest
from pdserve_protocol.timing import DEAD_AFTER_S, PING_INTERVAL_S, STATE_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

NodeHears = (
    Hello
    | Ping
    | AddRequest
    | AbortRequests
    | Meet
    | Retarget
    | GetTokenizer
    | GetStatus
    | ResetPrefixCache
    | PeerMessage
)
CLOSE_S = 5.0
MAX_MESSAGES_A_TURN = 64
MAX_HEARD = 4096
MAX_UNTAKEN = 256
MAX_UNTAKEN_BYTES = 64 << 20
"""Messages that the engine loop has not dealt with yet; while there are as many, others wait."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """The way back to whoever came to our door."""

    identity: bytes


Route = Visitor | Address


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message, and the way back to who sent it."""

    route: Route
    message: NodeHears


@dataclass(frozen=True, slots=True)
class VisitorSilent:
    """A router has not pinged for too long, or is the one longest unheard of too many."""

    visitor: Visitor


@dataclass(frozen=True, slots=True)
class DoorDied:
    """A fault of ours; nobody can reach us any more."""

    error: BaseException


DoorEvent = Arrived | VisitorSilent | DoorDied


class NodeDoor:
    """Binds in the constructor, serves from ``start`` to ``close``. Its methods are for the engine loop's thread."""

    def __init__(self, host: str, port: int, cluster_key: str | None, post: Callable[[DoorEvent], None]) -> None:
        """Raises PortTaken, AddressError."""
        self._cluster_key = cluster_key
        self._post = post
        self._decoder = Decoder(NodeHears)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._door = Door(self._context, host, port, cluster_key)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.port = self._door.port
        self._load = b""
        # When each visitor was last heard, by _listened(); the one longest unheard first.
        self._heard: OrderedDict[bytes, float] = OrderedDict()
        # Sizes of what was posted, oldest first. The loop alone writes how many it has taken, the thread all else.
        self._untaken: deque[int] = deque()
        self._untaken_bytes = 0
        self._num_taken = 0
        self._num_settled = 0
        self._paused = False
        self._paused_at = 0.0
        self._paused_s = 0.0
        self._told_at = float("-inf")
        # To peers by their address, to visitors under None; the one longest not received from first.
        self._sockets: dict[Address | None, zmq.Socket[bytes]] = {None: self._door.socket}
        self._orders: deque[Callable[[], None]] = deque()
        self._bell: Any = self._context.socket(zmq.PAIR)
        self._wake: Any = self._context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        self._bell.connect("inproc://wake")
        self._poller = zmq.Poller()
        self._poller_in_pauses = zmq.Poller()
        self._poller.register(self._door.socket, zmq.POLLIN)
        for poller in (self._poller, self._poller_in_pauses):
            poller.register(self._wake, zmq.POLLIN)
        self._closing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)

    # For the engine loop.

    def start(self, load: Message) -> None:
        """Begins to serve; ``load`` answers the first pings."""
        self.set_load(load)
        self._thread.start()

    def set_load(self, load: Message) -> None:
        """What pings are answered with from now on."""
        self._load = encode(load)

    def send(self, route: Route, message: Message) -> None:
        """Sends without waiting. To an Address it connects first; to a visitor who has left it does nothing."""
        if isinstance(route, Visitor):
            self._order(partial(self._answer, route.identity, encode(message)))
        else:
            self._order(partial(self._tell, route, encode(message)))

    def taken(self, number: int) -> None:
        """So many more ``Arrived`` have been dealt with: as many others may come."""
        self._num_taken += number
        if self._paused:
            self._order(self._resume)

    def broadcast_load(self) -> None:
        """Tells every router our load without being asked."""
        self._order(self._broadcast_load)

    def disconnect(self, address: Address) -> None:
        """Drops the connection to a peer."""
        self._order(partial(self._drop, address))

    def close(self) -> None:
        """Sends what was said, then closes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._order(self._stop)
            self._thread.join(CLOSE_S)
        self._bell.close(linger=0)
        self._door.close()
        self._context.destroy(linger=0)

    def _order(self, order: Callable[[], None]) -> None:
        """Has the thread do it, after what it was told before."""
        self._orders.append(order)
        # If the bell cannot ring it has not been answered yet, or nobody is left: the thread has died and posted that.
        with suppress(zmq.Again):
            self._bell.send(b"", zmq.NOBLOCK)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            self._post(DoorDied(error))
        finally:
            for address in [address for address in self._sockets if address is not None]:
                self._drop(address)
            self._wake.close(linger=0)

    def _turn(self) -> None:
        # Silence has to be noticed only while there is someone who could fall silent.
        timeout = round(STATE_INTERVAL_S * 1000) if self._heard else None
        ready = dict((self._poller_in_pauses if self._paused else self._poller).poll(timeout))
        self._receive_some(ready)
        if self._wake in ready:
            self._carry_out_orders()
        if self._paused:
            self._show_life(time.monotonic())
        self._notice_silence()

    def _receive_some(self, ready: dict[Any, int]) -> None:
        """Some messages, one of each socket in turn; orders have their time too."""
        speaking = deque((address, socket) for address, socket in self._sockets.items() if socket in ready)
        for _ in range(MAX_MESSAGES_A_TURN):
            if not speaking:
                return
            if self._has_many_untaken():
                self._pause()
                return
            address, socket = speaking.popleft()
            frames = _receive(socket)
            if frames is None:
                continue
            speaking.append((address, socket))
            # Where there is time for one message a turn, it is another's the next time.
            self._sockets[address] = self._sockets.pop(address)
            if address is None:
                self._on_visit(frames)
            else:
                self._on_peer(address, frames)

    def _on_visit(self, frames: list[bytes]) -> None:
        message = self._decode(frames[-1]) if len(frames) == 2 else None
        if message is None:
            log.warning("a visitor sent something that is no message of this protocol; dropped")
            return
        if not isinstance(message, PeerMessage):
            self._heard[frames[0]] = self._listened()
            self._heard.move_to_end(frames[0])
        if isinstance(message, Ping):
            self._answer(frames[0], self._load)
        else:
            self._arrived(Visitor(frames[0]), message, len(frames[-1]))

    def _on_peer(self, address: Address, frames: list[bytes]) -> None:
        message = self._decode(frames[-1]) if len(frames) == 1 else None
        if isinstance(message, PeerMessage):
            self._arrived(address, message, len(frames[-1]))
        else:
            log.warning("%s sent something that is no message between peers; dropped", address)

    def _arrived(self, route: Route, message: NodeHears, num_bytes: int) -> None:
        self._untaken.append(num_bytes)
        self._untaken_bytes += num_bytes
        self._post(Arrived(route, message))

    def _has_many_untaken(self) -> bool:
        num_taken = self._num_taken
        for _ in range(num_taken - self._num_settled):
            self._untaken_bytes -= self._untaken.popleft()
        self._num_settled = num_taken
        return len(self._untaken) >= MAX_UNTAKEN or self._untaken_bytes >= MAX_UNTAKEN_BYTES

    def _pause(self) -> None:
        """Nobody is listened to until the loop has taken something."""
        self._paused_at = time.monotonic()
        self._paused = True
        # The loop may have taken some just now, and not have seen that we pause.
        self._resume()

    def _resume(self) -> None:
        if self._paused and not self._has_many_untaken():
            self._paused = False
            self._paused_s += time.monotonic() - self._paused_at

    def _listened(self) -> float:
        """A clock that stands still in pauses: silence is only where somebody could have been heard."""
        return (self._paused_at if self._paused else time.monotonic()) - self._paused_s

    def _show_life(self, now: float) -> None:
        """Pings wait unread behind the messages because of which we pause."""
        if now - self._told_at >= PING_INTERVAL_S:
            self._told_at = now
            self._broadcast_load()

    def _decode(self, data: bytes) -> Any:
        try:
            return self._decoder.decode(data)
        except BadMessage as error:
            log.warning("%s", error)
            return None

    def _carry_out_orders(self) -> None:
        while _receive(self._wake) is not None:
            pass
        # The bell first: an order that comes now rings again.
        while self._orders:
            self._orders.popleft()()

    def _stop(self) -> None:
        self._closing = True

    def _broadcast_load(self) -> None:
        for identity in list(self._heard):
            self._answer(identity, self._load)

    def _answer(self, identity: bytes, payload: bytes) -> None:
        try:
            self._door.socket.send_multipart([identity, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            # Gone. If it was a router, its silence will be noticed.

    def _tell(self, address: Address, payload: bytes) -> None:
        try:
            self._dealer(address).send(payload, zmq.NOBLOCK)
        except (AddressError, NoSocketLeft) as error:
            # A router has named it. The peer will be missed as one is that does not answer.
            log.warning("a peer cannot be reached: %s", error)

    def _dealer(self, address: Address) -> zmq.Socket[bytes]:
        if address not in self._sockets:
            dealer = connect_door(self._context, address, self._cluster_key)
            # As at the door: what is not read waits at the peer.
            dealer.rcvhwm = MAX_MESSAGES_A_TURN
            self._sockets[address] = dealer
            self._poller.register(dealer, zmq.POLLIN)
        return self._sockets[address]

    def _drop(self, address: Address) -> None:
        dealer = self._sockets.pop(address, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close(linger=500)

    def _notice_silence(self) -> None:
        limit = self._listened() - DEAD_AFTER_S
        while self._heard and (len(self._heard) > MAX_HEARD or next(iter(self._heard.values())) < limit):
            identity, _ = self._heard.popitem(last=False)
            self._post(VisitorSilent(Visitor(identity)))


def _receive(socket: Any) -> list[bytes] | None:
    """The next message if there is one."""
    try:
        frames: list[bytes] = socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return frames
