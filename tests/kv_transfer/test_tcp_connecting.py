"""A peer that cannot be reached over tcp: its link is not up, and nobody else waits."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
from pdserve_kv_transfer import tcp_source
from pdserve_kv_transfer.events import Connected, ConnectFailed, WriteFailed, Written
from pdserve_kv_transfer.tcp_wire import HANDSHAKE_S, TcpRegion
from support.movers import mover_pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve_protocol.handoff import Region

BLOCK_BYTES = 4096
AT_ONCE_S = HANDSHAKE_S / 2


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """A port where connections are made, and nobody says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextlib.contextmanager
def full() -> Iterator[int]:
    """A port where no connection is made: its queue is full, and more is dropped as by a network that is down."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(address)
        yield address[1]


def at(region: Region, port: int) -> Region:
    known = msgspec.structs.replace(msgspec.msgpack.decode(region.metadata, type=TcpRegion), port=port)
    return msgspec.structs.replace(region, metadata=msgspec.msgpack.encode(known))


@pytest.mark.parametrize("nowhere", [silent, full])
def test_others_go_on_while_a_peer_does_not_answer(nowhere: object) -> None:
    with nowhere() as port, mover_pair("tcp", BLOCK_BYTES) as pair:  # type: ignore[operator]
        began = time.monotonic()
        pair.sender.connect("lost", "tcp", at(pair.open_region("p1"), port))
        pair.connect("p2", "d")
        pair.sender.write("d", "a", [(0, 3, 0)])
        assert pair.sent.expect(Written).peer == "d"
        # What is written meanwhile waits with the connection, and ends with it.
        pair.sender.write("lost", "b", [(0, 4, 0)])
        pair.sender.disconnect("lost")
        assert pair.sent.expect(WriteFailed).id == "b"
        pair.sender.write("d", "c", [(0, 4, 1)])
        assert pair.sent.expect(Written).id == "c"
        assert time.monotonic() - began < AT_ONCE_S
    assert time.monotonic() - began < AT_ONCE_S


@pytest.mark.parametrize("nowhere", [silent, full])
def test_a_peer_that_does_not_answer_is_told_in_the_end(nowhere: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_source, "HANDSHAKE_S", 0.1)
    with nowhere() as port, mover_pair("tcp", BLOCK_BYTES) as pair:  # type: ignore[operator]
        pair.sender.connect("lost", "tcp", at(pair.open_region("p1"), port))
        failed = pair.sent.expect(ConnectFailed)
        assert failed.peer == "lost"
        assert "timed out" in failed.reason
        # It may be tried again, by another name or the same.
        region = pair.open_region("p2")
        pair.sender.connect("lost", "tcp", region)
        assert pair.sent.expect(Connected).peer == "lost"
