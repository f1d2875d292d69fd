"""SIGTERM: what runs is finished, new requests are refused, and the process ends with 0."""

from __future__ import annotations

import signal
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from support.clients import Stream, greedy, prompt_of
from support.cluster import Cluster, port_of, wait_for
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

LONG = greedy(prompt_of(1, 100), 1200)
SHORT = greedy(prompt_of(2, 40), 5)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("drain")
    model = tiny_model(folder / "tiny", max_position_embeddings=16384)
    with Cluster(
        model=str(model),
        folder=folder,
        node_args=["--dtype", "float32", "--kv-cache-memory", "64MiB"],
        gate=folder / "gate",
    ) as cluster:
        yield cluster


def proof_of(cluster: Cluster) -> dict[str, Any]:
    """Of a short request; empty where it is refused."""
    proof: dict[str, Any] = cluster.post("/v1/completions", SHORT)[1].get("pdserve", {})
    return proof


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """All three processes up, the gate open."""
    assert running.gate is not None
    running.gate.touch()
    for node in [*running.prefill, *running.decode]:
        if node.popen.poll() is not None:
            running.restart(node)
    if running.router.popen.poll() is not None:
        running.restart_router()
    wait_for(lambda: proof_of(running).get("transport") == "nixl", 10, "it serves")
    yield running
    running.gate.touch()


def test_router(cluster: Cluster) -> None:
    text = cluster.complete(**LONG)["choices"][0]["text"]
    with Stream(cluster.port, LONG) as stream, Stream(cluster.port, LONG, stream=False) as plain:
        stream.wait_tokens(3)
        wait_for(lambda: cluster.statuses()[1].load.running == 2, 5, "both run")
        cluster.router.signal(signal.SIGTERM)
        wait_for(lambda: cluster.post("/v1/completions", SHORT)[0] == 503, 2, "new requests are refused")
        assert cluster.get("/ready")[0] == 503
        assert stream.ended_at is None, "nothing was running any more"
        assert stream.wait_end().text == plain.wait_end().text == text
        assert stream.is_whole
        assert plain.is_whole
    assert cluster.router.popen.wait(5) == 0
    cluster.wait_until_idle()


def test_decode_node(cluster: Cluster) -> None:
    # B68
    text = cluster.complete(**LONG)["choices"][0]["text"]
    decode = cluster.decode[0]
    with Stream(cluster.port, LONG) as stream:
        stream.wait_tokens(3)
        decode.signal(signal.SIGTERM)
        wait_for(lambda: cluster.post("/v1/completions", SHORT)[0] == 503, 2, "new requests are refused")
        assert stream.ended_at is None, "nothing was running any more"
        assert stream.wait_end().text == text
        assert stream.is_whole
    assert decode.popen.wait(5) == 0
    cluster.wait_until_idle()


def test_prefill_node_with_transfers_in_flight(cluster: Cluster) -> None:
    # B68
    assert cluster.gate is not None
    prefill = cluster.prefill[0]
    text = cluster.complete(**LONG)["choices"][0]["text"]
    cluster.gate.unlink()
    with Stream(cluster.port, {**LONG, "cache_salt": "cold"}) as stream:
        stream.wait_begun()
        prefill.signal(signal.SIGTERM)
        # New requests are not its any more: the decode node does without it.
        wait_for(
            lambda: proof_of(cluster).get("mode") == "aggregated",
            5,
            "a fallback",
        )
        assert prefill.popen.poll() is None
        assert stream.ended_at is None
        cluster.gate.touch()
        assert prefill.popen.wait(5) == 0
        assert stream.wait_end().text == text
        assert stream.is_whole
        assert stream.proof["tokens_recomputed"] == 0
    cluster.wait_until_idle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_drain_timeout(cluster: Cluster, side: str) -> None:
    assert cluster.gate is not None
    node = (cluster.prefill if side == "prefill" else cluster.decode)[0]
    node.signal(signal.SIGTERM)
    assert node.popen.wait(5) == 0
    cluster.node_args = [*cluster.node_args, "--drain-timeout", "1"]
    try:
        node = cluster.restart(node)
    finally:
        cluster.node_args = cluster.node_args[:-2]
    wait_for(lambda: proof_of(cluster).get("transport") == "nixl", 10, "it serves")
    if side == "prefill":
        cluster.gate.unlink()
    with Stream(cluster.port, greedy(prompt_of(3, 500), 15000)) as stream:
        stream.wait_begun()
        since = time.monotonic()
        node.signal(signal.SIGTERM)
        assert node.popen.wait(5) == 0
        assert 0.9 < time.monotonic() - since < 4.0
        if side == "prefill":
            # The decode node does it by itself.
            num_events = len(stream.events)
            wait_for(lambda: len(stream.events) > num_events + 5, 5, "it goes on")
            assert stream.error is None
        else:
            stream.wait_end(5)
            assert stream.error is not None
            assert not stream.done
    cluster.gate.touch()
    cluster.wait_until_idle()


def test_router_drain_timeout(cluster: Cluster) -> None:
    ports = [port_of(node.ready_line) for node in [*cluster.prefill, *cluster.decode]]
    cluster.router_args = ["--drain-timeout", "1"]
    router = cluster.start_router(ports, 0)
    cluster.router_args = []
    with closing(router):
        port = port_of(router.wait_ready())
        wait_for(lambda: Stream(port, SHORT).wait_end().is_whole, 10, "it serves")
        with Stream(port, greedy(prompt_of(4, 50), 15000)) as stream:
            stream.wait_tokens(3)
            since = time.monotonic()
            router.signal(signal.SIGTERM)
            assert router.popen.wait(5) == 0
            assert 0.9 < time.monotonic() - since < 4.0
            stream.wait_end(5)
            assert stream.error is not None
            assert not stream.done
    cluster.wait_until_idle()


@pytest.mark.parametrize("which", ["router", "decode"])
def test_a_second_signal_ends_at_once(cluster: Cluster, which: str) -> None:
    process = cluster.router if which == "router" else cluster.decode[0]
    with Stream(cluster.port, greedy(prompt_of(5, 50), 15000)) as stream:
        stream.wait_tokens(3)
        said_before = len(process.log.read_text())
        process.signal(signal.SIGINT)
        # Two signals at once would be one.
        wait_for(lambda: "draining" in process.log.read_text()[said_before:], 5, "it drains")
        assert process.popen.poll() is None
        process.signal(signal.SIGINT)
        assert process.popen.wait(5) != 0
        stream.wait_end(5)
        assert not stream.is_whole
    wait_for(cluster.is_idle, 5, "what is left has let go of everything")
