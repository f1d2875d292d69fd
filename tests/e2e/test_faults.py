"""Processes that die, hang and come back."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest
from pdserve_protocol.door import Address
from support.clients import Stream, greedy, prompt_of
from support.cluster import Cluster, Process, node_status, port_of, wait_for
from support.models import tiny_model
from support.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve_protocol.node import NodeLoad

pytestmark = pytest.mark.slow

WITHIN_S = 5.0
NODE_ARGS = ["--dtype", "float32", "--kv-cache-memory", "64MiB"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=16384))


@pytest.fixture(scope="module")
def pairs(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode nodes, taken in turn, with a gate."""
    # B118: nothing but their ports tells them apart.
    folder = tmp_path_factory.mktemp("pairs")
    with Cluster(
        model=model, folder=folder, num_prefill=2, num_decode=2, node_args=NODE_ARGS, gate=folder / "gate"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One of each, with a gate."""
    folder = tmp_path_factory.mktemp("pair")
    with Cluster(model=model, folder=folder, node_args=NODE_ARGS, gate=folder / "gate") as cluster:
        yield cluster


def opened(cluster: Cluster) -> Path:
    """The gate: ``unlink`` closes it, ``touch`` opens it."""
    assert cluster.gate is not None
    cluster.gate.touch()
    return cluster.gate


def load(node: Process) -> NodeLoad:
    return node_status(Address("127.0.0.1", port_of(node.ready_line))).load


def num_requests(node: Process) -> int:
    return load(node).running + load(node).waiting


def answers(cluster: Cluster, bodies: list[dict[str, Any]]) -> list[str]:
    """The same requests one at a time, none from a cache of the others."""
    return [cluster.complete(**body, cache_salt="alone")["choices"][0]["text"] for body in bodies]


def assert_failed(streams: list[Stream], since: float) -> None:
    """They ended in time, and the client can tell that something is missing."""
    for stream in streams:
        stream.wait_end(max(0.1, since + WITHIN_S - time.monotonic()))
        assert stream.broken is None, stream
        assert not stream.is_whole, stream
        assert not stream.done, stream
        assert stream.error is not None, stream
        assert stream.status in (200, 502, 503), stream


def retries(cluster: Cluster) -> float:
    """Attempts that followed failed ones, since the router's start."""
    lines = cluster.get("/metrics")[1].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("pdserve_router_retries_total{"))


def pids(cluster: Cluster) -> list[int]:
    return [process.pid for process in [*cluster.prefill, *cluster.decode, cluster.router]]


# ---- two of each ---------------------------------------------------------------------------------------------------


def test_four_nodes_on_one_host(pairs: Cluster) -> None:
    # B118
    opened(pairs)
    bodies = [greedy(prompt_of(seed, 40 + seed), 20) for seed in range(8)]
    alone = answers(pairs, bodies)
    streams = [Stream(pairs.port, body) for body in bodies]
    assert [stream.wait_end().text for stream in streams] == alone
    proofs = [stream.proof for stream in streams]
    nodes = {proof["prefill_node"] for proof in proofs} | {proof["decode_node"] for proof in proofs}
    assert nodes == {f"127.0.0.1:{port_of(node.ready_line)}" for node in [*pairs.prefill, *pairs.decode]}
    assert all(proof["transport"] == "nixl" and proof["tokens_recomputed"] == 0 for proof in proofs)
    pairs.wait_until_idle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_killed_node_takes_no_request_along(pairs: Cluster, side: str) -> None:
    gate = opened(pairs)
    bodies = [greedy(prompt_of(100 + seed, 200), 800) for seed in range(4)]
    for number, body in enumerate(bodies[2:]):
        # B26: sampled documents, whose grammar has to be taken up where it was.
        schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 600}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        body |= {"temperature": 1, "seed": number, "ignore_eos": False}
    alone = answers(pairs, bodies)
    before = pids(pairs)
    nodes = pairs.prefill if side == "prefill" else pairs.decode
    if side == "prefill":
        gate.unlink()  # All have their first token, and no KV has moved.
    streams = [Stream(pairs.port, body) for body in bodies]
    for stream in streams:
        stream.wait_begun()
    retries_before = retries(pairs)
    nodes[0].kill()
    wait_for(lambda: retries(pairs) > retries_before, WITHIN_S, "those that it had go on elsewhere")
    gate.touch()
    # Each is what it would have been, and new ones are served before and after the router has noticed.
    for stream, text in zip(streams, alone, strict=True):
        assert stream.wait_end().is_whole, stream
        assert stream.text == text
    assert {stream.proof["retries"] for stream in streams} == {0, 1}, "each node had some"
    assert all(stream.proof["exact"] for stream in streams)
    assert pairs.get("/health")[0] == pairs.get("/v1/models")[0] == 200  # B102
    assert answers(pairs, bodies[:2]) == alone[:2]
    pairs.wait_until_idle()
    pairs.restart(nodes[0])
    wait_for(lambda: b'"up":false' not in pairs.get("/health")[1].replace(b" ", b""), WITHIN_S, "it is taken in again")
    bodies = bodies[:2] * 2
    assert answers(pairs, bodies) == alone[:2] * 2
    assert sum(a != b for a, b in zip(before, pids(pairs), strict=True)) == 1
    pairs.wait_until_idle()


# ---- one of each ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_node_that_comes_back_at_its_address(pair: Cluster, side: str) -> None:
    # B113
    opened(pair)
    nodes = pair.prefill if side == "prefill" else pair.decode
    bodies = [greedy(prompt_of(200 + seed, 30), 12) for seed in range(10)]
    alone = answers(pair, bodies)
    survivors = [process.pid for process in [*pair.prefill, *pair.decode, pair.router] if process is not nodes[0]]
    with Stream(pair.port, greedy(prompt_of(300, 64), 16000)) as stream:
        stream.wait_tokens(3)
        since = time.monotonic()
        nodes[0].kill()
        if side == "decode":
            assert_failed([stream], since)
            status, answer = pair.post("/v1/completions", bodies[0])
            assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
    new = pair.restart(nodes[0])
    wait_for(lambda: proof_of(pair, bodies[0]).get("mode") == "disaggregated", WITHIN_S, "both nodes serve again")
    for _ in range(5):
        for body, text in zip(bodies, alone, strict=True):
            answer = pair.complete(**body)
            assert answer["choices"][0]["text"] == text
            assert answer["pdserve"]["mode"] == "disaggregated"
            assert answer["pdserve"]["tokens_recomputed"] == 0
    assert survivors == [p.pid for p in [*pair.prefill, *pair.decode, pair.router] if p is not new]
    pair.wait_until_idle()


def proof_of(cluster: Cluster, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = cluster.post("/v1/completions", body)
    proof: dict[str, Any] = answer["pdserve"] if status == 200 else {}
    return proof


def test_a_prefill_node_killed_after_it_answered(pair: Cluster) -> None:
    # B33; B32: some of the clients go away at the same moment.
    gate = opened(pair)
    body = greedy(prompt_of(400, 100), 10)
    text = answers(pair, [body])[0]
    free = load(pair.decode[0]).blocks_total
    for round in range(2):
        gate.unlink()
        streams = [Stream(pair.port, greedy(prompt_of(410 + 10 * round + n, 500), 10)) for n in range(6)]
        for stream in streams:
            stream.wait_begun()
        for stream in streams[:2]:
            stream.close()
        pair.prefill[0].kill()
        for stream in streams[2:4]:
            stream.close()
        # The decode node does the others by itself, after the token that they have.
        for stream in streams[4:]:
            assert stream.wait_end().is_whole, stream
            assert (stream.proof["mode"], stream.proof["retries"]) == ("aggregated", 1)
        wait_for(pair.is_idle, WITHIN_S, "the decode node has let go of everything")
        usage = load(pair.decode[0])
        assert usage.blocks_free + usage.blocks_cached == free
        gate.touch()
        pair.restart(pair.prefill[0])
        wait_for(lambda: proof_of(pair, body).get("mode") == "disaggregated", WITHIN_S, "it serves again")
        assert answers(pair, [body]) == [text]


def test_a_decode_node_restarted_while_the_prefill_node_holds(pair: Cluster) -> None:
    gate = opened(pair)
    body = greedy(prompt_of(500, 100), 10)
    text = answers(pair, [body])[0]
    gate.unlink()
    streams = [Stream(pair.port, greedy(prompt_of(510 + n, 500), 10)) for n in range(4)]
    for stream in streams:
        stream.wait_begun()
    since = time.monotonic()
    pair.decode[0].kill()
    pair.restart(pair.decode[0])
    assert_failed(streams, max(since, time.monotonic() - 1.0))
    wait_for(pair.is_idle, WITHIN_S, "the prefill node holds nothing", lambda: str(pair.statuses()))
    gate.touch()
    wait_for(lambda: proof_of(pair, body).get("mode") == "disaggregated", WITHIN_S, "both serve")
    assert answers(pair, [body]) == [text]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_node_that_sleeps_in_mid_transfer(pair: Cluster, side: str) -> None:
    gate = opened(pair)
    node = (pair.prefill if side == "prefill" else pair.decode)[0]
    body = greedy(prompt_of(600, 100), 10)
    text = answers(pair, [body])[0]
    gate.unlink()
    # So long that the prefill node would not end one by itself before the decode node is missed.
    max_tokens = 10 if side == "prefill" else 15000
    streams = [Stream(pair.port, greedy(prompt_of(610 + n, 500), max_tokens)) for n in range(4)]
    for stream in streams:
        stream.wait_begun()
    since = time.monotonic()
    node.signal(signal.SIGSTOP)
    try:
        if side == "decode":
            assert_failed(streams, since)
        else:
            # The decode node does them by itself.
            assert all(stream.wait_end().is_whole for stream in streams)
    finally:
        gate.touch()
        node.signal(signal.SIGCONT)
    # What it still had in mind is now written to where nobody looks any more.
    wait_for(pair.is_idle, WITHIN_S, "nothing is left", lambda: str(pair.statuses()))
    wait_for(lambda: proof_of(pair, body).get("mode") == "disaggregated", WITHIN_S, "it serves again")
    assert answers(pair, [body]) == [text]
    assert [status.counters["digest_mismatches"] for status in pair.statuses()] == [0, 0]
    pair.wait_until_idle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_router_that_is_gone(pair: Cluster, number: signal.Signals) -> None:
    gate = opened(pair)
    body = greedy(prompt_of(700, 100), 10)
    text = answers(pair, [body])[0]
    generating = Stream(pair.port, greedy(prompt_of(701, 100), 16000)).wait_tokens(5)
    gate.unlink()
    bodies = [greedy(prompt_of(710 + n, 500), 10) for n in range(3)]
    held = [Stream(pair.port, held_body) for held_body in bodies]
    for stream in held:
        stream.wait_begun()
    assert load(pair.prefill[0]).handoffs == 3
    nodes = [*pair.prefill, *pair.decode]
    pair.router.signal(number)
    try:
        # On the two nodes alone, with writes that do not end: what becomes of those is in test_held_transfer.py.
        wait_for(lambda: all(num_requests(node) == 0 for node in nodes), WITHIN_S, "no request is left")
        gate.touch()
        wait_for(pair.is_idle, WITHIN_S, "no block is left", lambda: str(pair.statuses()))
    finally:
        gate.touch()
        if number == signal.SIGSTOP:
            pair.router.signal(signal.SIGCONT)
    if number == signal.SIGKILL:
        pair.router.popen.wait(5)
        pair.restart_router()
        assert not generating.wait_end(WITHIN_S).is_whole
    else:
        # A router that wakes finds that its nodes are lost, or goes on after the tokens that the client has.
        generating.close()
    wait_for(lambda: proof_of(pair, body).get("mode") == "disaggregated", WITHIN_S, "it serves again")
    assert answers(pair, [body]) == [text]
    [begin] = answers(pair, [greedy(prompt_of(701, 100), 100)])
    assert generating.text.startswith(begin) or begin.startswith(generating.text)
    for stream, right in zip(held, answers(pair, bodies), strict=True):
        # A router that wakes may find that the nodes have given up a hand-off, and start it anew.
        assert not stream.wait_end(WITHIN_S).is_whole or (number == signal.SIGSTOP and stream.text == right)
    pair.wait_until_idle()


def test_a_cut_connection_between_router_and_node(pair: Cluster) -> None:
    opened(pair)
    body = greedy(prompt_of(800, 100), 10)
    text = answers(pair, [body])[0]
    nodes = [*pair.prefill, *pair.decode]
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(port_of(node.ready_line))) for node in nodes]
        router = stack.enter_context(closing(pair.start_router([proxy.port for proxy in proxies], 0)))
        port = port_of(router.wait_ready())
        wait_for(lambda: Stream(port, body).wait_end().text == text, 10.0, "it serves")
        streams = [stack.enter_context(Stream(port, greedy(prompt_of(801 + n, 40), 16000))) for n in range(2)]
        plain = stack.enter_context(Stream(port, greedy(prompt_of(803, 40), 16000), stream=False))
        for stream in streams:
            stream.wait_tokens(3)
        wait_for(lambda: load(pair.decode[0]).running == 3, WITHIN_S, "all three run")
        since = time.monotonic()
        for proxy in proxies:
            proxy.cut()
        # The nodes are well and answer at once, but what was said meanwhile is lost.
        assert_failed([*streams, plain], since)
        wait_for(pair.is_idle, since + WITHIN_S - time.monotonic(), "the nodes have let go of everything")
        assert Stream(port, body).wait_end().text == text
