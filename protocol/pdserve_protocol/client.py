"""EngineCoreClient: one node as an asyncio program sees it.

Owns the connection, the pings and the judgement whether the node is there. Knows nothing of what requests mean. It
lives beside the wire types because the router and the command line, which may not import the engine, need it as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdserve_protocol.codec import Decoder, Message, encode
from pdserve_protocol.door import Address, connect_door
from pdserve_protocol.errors import BadMessage, NodeUnreachable
from pdserve_protocol.node import (
    GetStatus,
    GetTokenizer,
    Hello,
    NodeInfo,
    NodeLoad,
    NodeStatus,
    Ping,
    PrefixCacheReset,
    ResetPrefixCache,
    TokenizerFiles,
)
from pdserve_protocol.outputs import Outputs, RequestOutput
from pdserve_protocol.timing import CONNECT_S, DEAD_AFTER_S, PING_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_LAST_WORDS_MS = 200
_MESSAGES_A_TURN = 16

NodeSays = NodeInfo | NodeLoad | Outputs | TokenizerFiles | NodeStatus | PrefixCacheReset
_REPLY: dict[type[Message], type[Message]] = {
    GetTokenizer: TokenizerFiles,
    GetStatus: NodeStatus,
    ResetPrefixCache: PrefixCacheReset,
}


def _ignore(*_: object) -> None:
    return None


class EngineCoreClient:
    """A node's door, held open.

    Attributes:
        info: who the node is; None while it is not there (never seen, the connection broken, or silent for three
            seconds). A restarted node has another ``info.identity.boot_id``.
        load: its last answer to a ping; None while it is not there.
    """

    def __init__(
        self,
        address: Address,
        *,
        cluster_key: str | None = None,
        on_outputs: Callable[[EngineCoreClient, list[RequestOutput]], None] = _ignore,
        on_change: Callable[[EngineCoreClient], None] = _ignore,
    ) -> None:
        """Args:
        on_outputs: called with outputs in order, those of several messages that have come meanwhile at once.
        on_change: called when ``info`` has changed: there, gone, or another boot.
        """
        self.address = address
        self.info: NodeInfo | None = None
        self.load: NodeLoad | None = None
        self._cluster_key = cluster_key
        self._on_outputs = on_outputs
        self._on_change = on_change
        self._decoder = Decoder(NodeSays)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: Any = None
        self._monitor: Any = None
        self._here = asyncio.Event()
        self._connected = False
        self._last_heard = 0.0
        self._greeted_at = 0.0
        self._waiting: defaultdict[type[Message], deque[asyncio.Future[Any]]] = defaultdict(deque)
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to connect; returns at once."""
        self._context = zmq.Context()
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._socket = connect_door(self._context, self.address, self._cluster_key, monitor=events)
        self._monitor = self._socket.get_monitor_socket()
        # The descriptors tell that something has happened, not what: see _on_event and _on_connection.
        asyncio.get_running_loop().add_reader(self._socket.fd, self._on_event)
        asyncio.get_running_loop().add_reader(self._monitor.fd, self._on_connection)
        # A descriptor speaks only of what comes after the socket has been looked at.
        self._on_connection()
        self._on_event()
        self._keeper = asyncio.create_task(self._keep_alive())

    async def close(self) -> None:
        """Ends the connection. Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        if self._context is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fd)
            asyncio.get_running_loop().remove_reader(self._monitor.fd)
            # Aborts that were said just now still leave, if the node is there to take them.
            self._context.destroy(linger=_LAST_WORDS_MS if self._connected else 0)
            self._context = None
            self._connected = False
        for futures in self._waiting.values():
            for future in futures:
                future.cancel()

    def send(self, message: Message) -> None:
        """Sends without waiting.

        Raises:
            NodeUnreachable: the node is not there.
        """
        if self.info is None or not self._connected:
            raise NodeUnreachable(str(self.address), DEAD_AFTER_S)
        self._send(message)

    async def ask(self, message: Message, timeout: float = CONNECT_S) -> Any:
        """The node's reply to GetTokenizer, GetStatus or ResetPrefixCache; waits for the connection as well.

        Raises:
            NodeUnreachable: there was none within ``timeout`` seconds.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        queue = self._waiting[_REPLY[type(message)]]
        try:
            async with asyncio.timeout(timeout):
                await self._here.wait()
                self.send(message)
                queue.append(reply)
                return await reply
        except TimeoutError as error:
            raise NodeUnreachable(str(self.address), timeout) from error
        finally:
            with contextlib.suppress(ValueError):
                queue.remove(reply)

    def _send(self, message: Message) -> None:
        """Only while there is a connection: the socket would keep what is said without one for whoever comes next."""
        self._socket.send(encode(message), zmq.NOBLOCK)
        # Sending may have taken note of what came meanwhile, of which the descriptor then says nothing more.
        if self._socket.events & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._on_event)

    def _on_event(self) -> None:
        """Something has happened at the socket: takes the messages that are there, and leaves others their turn."""
        if self._receive():
            asyncio.get_running_loop().call_soon(self._on_event)

    def _receive(self) -> bool:
        """Takes some messages; whether there may be more."""
        outputs: list[RequestOutput] = []
        for _ in range(_MESSAGES_A_TURN):
            message = self._next_message()
            if isinstance(message, Outputs):
                outputs += message.outputs
                continue
            self._hand_on(outputs)
            if message is None:
                return False
            outputs = []
            self._on_message(message)
        self._hand_on(outputs)
        return True

    def _next_message(self) -> NodeSays | None:
        """None where there is none."""
        while self._context is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            self._last_heard = time.monotonic()
            try:
                message: NodeSays = self._decoder.decode(data)
            except BadMessage as error:
                log.warning("%s sent %s", self.address, error)
                continue
            return message
        return None

    def _hand_on(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._on_outputs(self, outputs)

    def _on_connection(self) -> None:
        """A connection is made, or has broken; ZMQ makes another one by itself."""
        while self._context is not None and self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._greet(time.monotonic())
            else:
                self._on_broken()

    def _greet(self, now: float) -> None:
        if self._connected:
            self._greeted_at = now
            self._send(Hello())

    def _on_broken(self) -> None:
        self._connected = False
        # What the node said before it went is here already.
        while self._receive():
            pass
        if self.info is not None:
            log.warning("the connection to %s is broken", self.address)
            self._set_info(None)

    def _on_message(self, message: NodeSays) -> None:
        match message:
            case NodeLoad():
                self._on_load(message)
            case NodeInfo():
                self._set_info(message)
            case _:
                queue = self._waiting[type(message)]
                if queue and not (future := queue.popleft()).done():
                    future.set_result(message)

    def _on_load(self, load: NodeLoad) -> None:
        if self.info is None:
            return
        if load.boot_id == self.info.identity.boot_id:
            self.load = load
        else:
            # A new process at the old address: what the old one had is gone.
            self._set_info(None)
            self._greet(time.monotonic())

    def _set_info(self, info: NodeInfo | None) -> None:
        if info == self.info:
            return
        self.info = info
        self.load = None
        if info is None:
            self._here.clear()
        else:
            self._here.set()
        self._on_change(self)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if self._connected:
                self._keep_in_touch(time.monotonic())

    def _keep_in_touch(self, now: float) -> None:
        """A ping each time; a node that does not answer is greeted instead, rarely, since what is said piles up."""
        if self.info is not None and now - self._last_heard > DEAD_AFTER_S:
            log.warning("no sign of life from %s for %g s", self.address, DEAD_AFTER_S)
            self._set_info(None)
        if self.info is not None:
            self._send(Ping())
        elif now - self._greeted_at >= DEAD_AFTER_S:
            self._greet(now)
