"""The tcp connector beyond the contract: who may write, what junk does, and that a fence is final."""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
import socket
import struct
import threading
import time
import uuid
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from pdserve_kv_transfer import tcp_target
from pdserve_kv_transfer.connector import Network
from pdserve_kv_transfer.errors import ConnectorMissing, RegionUnreachable
from pdserve_kv_transfer.tcp_source import TcpSource
from pdserve_kv_transfer.tcp_target import TcpTarget
from pdserve_kv_transfer.tcp_wire import (
    CHALLENGE,
    HELLO,
    MAGIC,
    READY,
    RUN,
    WRITE,
    TcpRegion,
    connect,
    proof,
    receive,
    region_key,
    write_header,
)
from pdserve_protocol.handoff import Region
from support.movers import cache_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

BLOCK_BYTES = 4096
NUM_SLOTS = 8
WAIT_S = 10.0


class Ends:
    """A target and a source with their networks, and what an attacker needs."""

    def __init__(self, target: Network | None = None, source: Network | None = None) -> None:
        self.cache = cache_of(16, BLOCK_BYTES, seed=4)
        self.target = TcpTarget(target or Network())
        self.source = TcpSource(self.cache, source or target or Network())
        self.memory = cache_of(3 * NUM_SLOTS, BLOCK_BYTES)

    def open(self, memory_SB: npt.NDArray[np.uint8] | None = None) -> Region:
        memory_SB = self.memory[NUM_SLOTS : 2 * NUM_SLOTS] if memory_SB is None else memory_SB
        name = f"region-{uuid.uuid4().hex}"
        metadata = self.target.open_region(name, memory_SB)
        return Region(name=name, num_slots=len(memory_SB), slot_bytes=BLOCK_BYTES, metadata=metadata)

    def connect(self, peer: str, region: Region) -> None:
        self.source.connect(peer, region).result(WAIT_S)

    def write(self, peer: str, pieces: list[tuple[int, int]]) -> None:
        handle = self.source.write(peer, pieces)
        deadline = time.monotonic() + WAIT_S
        while not self.source.poll(handle):
            assert time.monotonic() < deadline

    def dial(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.target.port), timeout=WAIT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def dial_as_peer(self, region: Region, cluster_key: str | None = None) -> socket.socket:
        """A connection that is let in, for what a peer gone mad would send."""
        known = tcp_region(region)
        sock = self.dial()
        key = region_key(known.token, cluster_key)
        hello = HELLO.pack(MAGIC, known.id, BLOCK_BYTES, secrets.token_bytes(32))
        sock.sendall(hello)
        nonce, _ = CHALLENGE.unpack(receive(sock, CHALLENGE.size, time.monotonic() + WAIT_S))
        sock.sendall(proof(key, b"source", hello, nonce))
        assert receive(sock, len(READY), time.monotonic() + WAIT_S) == READY
        sock.settimeout(WAIT_S)
        return sock

    def close(self) -> None:
        self.source.close()
        self.target.close()


def test_a_stream_within_a_host_is_not_paced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, connect("127.0.0.1", server.getsockname()[1], 1.0) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def tcp_region(region: Region) -> TcpRegion:
    return msgspec.msgpack.decode(region.metadata, type=TcpRegion)


def at(region: Region, **changes: object) -> Region:
    """The region with other metadata."""
    known = msgspec.structs.replace(tcp_region(region), **changes)
    return msgspec.structs.replace(region, metadata=msgspec.msgpack.encode(known))


def is_dropped(sock: socket.socket) -> bool:
    """Whether the other side ends the connection, and says nothing more."""
    try:
        return sock.recv(4096) == b""
    except ConnectionResetError:
        return True


def is_dropped_for(sock: socket.socket, data: bytes) -> bool:
    """Whether that is so after these bytes and an end."""
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        # Dropped before the last of them.
        return True
    return is_dropped(sock)


# ---- who may write -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "ours"), [("key", "other"), ("key", None), (None, "key")])
def test_another_cluster_key_is_not_let_in(theirs: str | None, ours: str | None) -> None:
    ends = Ends(Network(cluster_key=theirs), Network(cluster_key=ours))
    try:
        with pytest.raises(RegionUnreachable, match="cluster key"):
            ends.connect("d", ends.open())
    finally:
        ends.close()


def test_the_target_itself_refuses_a_source_without_the_key() -> None:
    ends = Ends(Network(cluster_key="key"))
    try:
        region = ends.open()
        known = tcp_region(region)
        with ends.dial() as sock:
            hello = HELLO.pack(MAGIC, known.id, BLOCK_BYTES, secrets.token_bytes(32))
            sock.sendall(hello)
            nonce, _ = CHALLENGE.unpack(receive(sock, CHALLENGE.size, time.monotonic() + WAIT_S))
            sock.sendall(proof(region_key(known.token, None), b"source", hello, nonce))
            assert is_dropped(sock)
        with ends.dial_as_peer(region, "key"):
            pass
    finally:
        ends.close()


def test_the_target_s_own_proof_is_none_of_the_source(ends: Ends) -> None:
    region = ends.open()
    with ends.dial() as sock:
        sock.sendall(HELLO.pack(MAGIC, tcp_region(region).id, BLOCK_BYTES, secrets.token_bytes(32)))
        _, theirs = CHALLENGE.unpack(receive(sock, CHALLENGE.size, time.monotonic() + WAIT_S))
        sock.sendall(theirs)
        assert is_dropped(sock)


def test_a_proof_is_good_for_one_connection(ends: Ends) -> None:
    known = tcp_region(ends.open())
    key = region_key(known.token, None)
    hello = HELLO.pack(MAGIC, known.id, BLOCK_BYTES, secrets.token_bytes(32))
    proofs = []
    for _ in range(2):
        with ends.dial() as sock:
            sock.sendall(hello)
            nonce, _ = CHALLENGE.unpack(receive(sock, CHALLENGE.size, time.monotonic() + WAIT_S))
            proofs.append(proof(key, b"source", hello, nonce))
            sock.sendall(proofs[0])
            answer = b"" if len(proofs) == 2 else receive(sock, len(READY), time.monotonic() + WAIT_S)
            assert answer == READY or is_dropped(sock)
    assert not hmac.compare_digest(*proofs)


def test_a_region_s_token_opens_no_other_region(ends: Ends) -> None:
    first, second = ends.open(), ends.open(ends.memory[:NUM_SLOTS])
    with pytest.raises(RegionUnreachable):
        ends.connect("d", at(first, token=tcp_region(second).token))


def test_slots_of_another_size_are_not_let_in(ends: Ends) -> None:
    region = ends.open()
    other = TcpSource(cache_of(4, 2 * BLOCK_BYTES), Network())
    with pytest.raises(RegionUnreachable):
        other.connect("d", region).result(WAIT_S)
    other.close()


def test_who_answers_at_the_address_must_own_the_region(ends: Ends) -> None:
    """B118."""
    region = ends.open()
    neighbour = TcpTarget(Network())
    try:
        assert neighbour.port != ends.target.port
        with pytest.raises(RegionUnreachable):
            ends.connect("d", at(region, port=neighbour.port))
    finally:
        neighbour.close()


def test_an_impostor_is_not_written_to(ends: Ends) -> None:
    region = at(ends.open(), token=bytes(32))
    with pytest.raises(RegionUnreachable, match="not the owner"):
        ends.connect("d", region)


def test_addresses_are_tried_until_one_is_the_owner(ends: Ends) -> None:
    region = ends.open()
    with socket.create_server(("127.0.0.2", ends.target.port)) as somebody_else:
        somebody_else.shutdown(socket.SHUT_RDWR)
        ends.connect("d", at(region, hosts=["127.0.0.2", "127.0.0.3", "127.0.0.1"]))
    ends.write("d", [(1, 0)])
    assert np.array_equal(ends.memory[NUM_SLOTS], ends.cache[1])


# ---- junk ----------------------------------------------------------------------------------------------------------


class Canary:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("unpickled",)


def junk(region: TcpRegion) -> list[bytes]:
    return [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64),
        secrets.token_bytes(4096),
        pickle.dumps(Canary()) + bytes(64),
        struct.pack("<QQ", 1 << 63, 1 << 63) + bytes(64),
        HELLO.pack(MAGIC, secrets.token_bytes(16), BLOCK_BYTES, bytes(32)),
        HELLO.pack(MAGIC, region.id, 1 << 62, bytes(32)),
        HELLO.pack(MAGIC, region.id, BLOCK_BYTES, bytes(32))[:-1],
    ]


def test_junk_ends_its_own_connection_and_nothing_else(
    ends: Ends, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B106."""
    monkeypatch.chdir(str(tmp_path))
    region = ends.open()
    ends.connect("d", region)
    for data in junk(tcp_region(region)):
        with ends.dial() as sock:
            assert is_dropped_for(sock, data)
        ends.write("d", [(1, 0)])
    assert not os.path.exists("unpickled")
    assert np.array_equal(ends.memory[NUM_SLOTS], ends.cache[1])


def test_who_says_nothing_is_dropped(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_target, "HANDSHAKE_S", 0.05)
    with ends.dial() as sock:
        assert is_dropped(sock)


def test_handshakes_are_bounded_and_come_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_target, "MAX_HANDSHAKES", 2)
    ends = Ends()
    try:
        region = ends.open()
        silent = [ends.dial() for _ in range(2)]
        with ends.dial() as third:
            assert is_dropped(third)
        for sock in silent:
            sock.shutdown(socket.SHUT_WR)
            assert is_dropped(sock)
            sock.close()
        ends.connect("d", region)
    finally:
        ends.close()


@pytest.mark.parametrize(
    "message",
    [
        WRITE.pack(1, 0),
        WRITE.pack(1, NUM_SLOTS + 1),
        WRITE.pack(1, 0xFFFFFFFF),
        WRITE.pack(1, 1) + RUN.pack(NUM_SLOTS, 1),
        WRITE.pack(1, 1) + RUN.pack(NUM_SLOTS - 1, 2),
        WRITE.pack(1, 1) + RUN.pack(0, NUM_SLOTS + 1),
        WRITE.pack(1, 1) + RUN.pack(0xFFFFFFFF, 2),
        WRITE.pack(1, 1) + RUN.pack(3, 0),
        WRITE.pack(1, 2) + RUN.pack(0, 1) + RUN.pack(2, 0xFFFFFFFF),
    ],
)
def test_a_peer_reaches_its_own_slots_alone(ends: Ends, message: bytes) -> None:
    region = ends.open()
    with ends.dial_as_peer(region) as sock:
        assert is_dropped_for(sock, message)
    assert not ends.memory.any()
    ends.connect("d", region)
    ends.write("d", [(1, 7)])
    assert np.array_equal(ends.memory[2 * NUM_SLOTS - 1], ends.cache[1])
    assert not ends.memory[2 * NUM_SLOTS :].any()


def test_connections_to_a_region_are_bounded(ends: Ends) -> None:
    region = ends.open()
    for number in range(tcp_target.MAX_CONNECTIONS):
        ends.connect(f"d{number}", region)
    with pytest.raises(RegionUnreachable):
        ends.connect("one more", region)


# ---- ends ----------------------------------------------------------------------------------------------------------


def half_a_write(sock: socket.socket) -> None:
    sock.sendall(write_header(1, [(0, 0, NUM_SLOTS)]) + b"\1" * (BLOCK_BYTES + 100))


def test_a_fence_is_final_even_in_the_middle_of_a_write(ends: Ends) -> None:
    region = ends.open()
    with ends.dial_as_peer(region) as sock:
        half_a_write(sock)
        deadline = time.monotonic() + WAIT_S
        while not ends.memory[NUM_SLOTS + 1].any():
            assert time.monotonic() < deadline
        ends.target.fence(region.name)
        # Stricter than the contract: the same memory is somebody else's now.
        ends.memory[:] = 0
        successor = ends.open()
        ends.connect("d", successor)
        try:
            while time.monotonic() < deadline:
                sock.sendall(b"\2" * 100_000)
        except OSError:
            pass
        assert time.monotonic() < deadline
        ends.write("d", [(1, 0)])
    assert np.array_equal(ends.memory[NUM_SLOTS], ends.cache[1])
    assert not ends.memory[NUM_SLOTS + 1 :].any()


def test_a_source_that_goes_in_the_middle_of_a_write_leaves_the_region_to_the_next(ends: Ends) -> None:
    region = ends.open()
    with ends.dial_as_peer(region) as sock:
        half_a_write(sock)
    ends.connect("d", region)
    ends.write("d", [(slot, slot) for slot in range(NUM_SLOTS)])
    assert np.array_equal(ends.memory[NUM_SLOTS : 2 * NUM_SLOTS], ends.cache[:NUM_SLOTS])


def test_a_source_learns_that_its_peer_has_been_replaced() -> None:
    """B113: the successor at the same address has other regions; the old one's are gone, and new ones work."""
    ends = Ends()
    try:
        region = ends.open()
        ends.connect("d", region)
        ends.write("d", [(1, 0)])
        ends.target.close()
        with pytest.raises(RegionUnreachable):
            ends.write("d", [(1, 0)])
        with pytest.raises(RegionUnreachable):
            ends.connect("again", region)
        ends.source.disconnect("d")
        ends.target = TcpTarget(Network())
        ends.connect("d2", ends.open())
        ends.write("d2", [(2, 0)])
        assert np.array_equal(ends.memory[NUM_SLOTS], ends.cache[2])
    finally:
        ends.close()


def test_disconnect_ends_a_write_that_nobody_takes(ends: Ends) -> None:
    region = ends.open()
    known = tcp_region(region)
    with socket.create_server(("127.0.0.1", 0)) as stalled:
        # Proves itself, and then reads no more.
        ends.connect("real", region)
        port = stalled.getsockname()[1]

        def serve() -> None:
            sock, _ = stalled.accept()
            hello = receive(sock, HELLO.size, time.monotonic() + WAIT_S)
            nonce = bytes(32)
            sock.sendall(CHALLENGE.pack(nonce, proof(region_key(known.token, None), b"target", hello, nonce)))
            receive(sock, 32, time.monotonic() + WAIT_S)
            sock.sendall(READY)
            done.wait(WAIT_S)
            sock.close()

        done = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        ends.connect("d", at(region, port=port))
        handles = [ends.source.write("d", [(block, block % 8) for block in range(8)]) for _ in range(400)]
        assert not ends.source.poll(handles[0])
        began = time.monotonic()
        ends.source.disconnect("d")
        assert time.monotonic() - began < 1.0
        with pytest.raises(RegionUnreachable):
            ends.source.poll(handles[-1])
        done.set()
        thread.join()


def test_an_abandoned_write_is_not_mistaken_for_another(ends: Ends) -> None:
    region = ends.open()
    ends.connect("d", region)
    ends.source.abandon(ends.source.write("d", [(1, 0)]))
    ends.write("d", [(2, 1)])
    assert np.array_equal(ends.memory[NUM_SLOTS + 1], ends.cache[2])


def test_an_address_that_is_not_ours_is_told() -> None:
    with pytest.raises(ConnectorMissing, match=r"198\.51\.100\.7"):
        TcpTarget(Network(host="198.51.100.7"))


def test_peers_are_told_where_to_come() -> None:
    for network, expected in [
        (Network(), ["127.0.0.1"]),
        (Network(host="0.0.0.0", advertise_host="prefill"), ["prefill"]),
    ]:
        target = TcpTarget(network)
        try:
            assert target._hosts == expected
        finally:
            target.close()
    target = TcpTarget(Network(host="0.0.0.0"))
    try:
        assert "127.0.0.1" in target._hosts
    finally:
        target.close()
