"""What happens while KV is on its way: the connector of the prefill node waits until a file, the gate, exists."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from pdserve_protocol.timing import NO_PROGRESS_S
from support.clients import Stream, greedy, prompt_of
from support.cluster import Cluster, port_of, wait_for
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve_protocol.node import NodeLoad

pytestmark = pytest.mark.slow

LARGE = greedy(prompt_of(2, 3700), 8)
"""Takes nearly all of the decode node, and nearly half of the prefill node."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One request runs at a time on each node. The prefill node has room for 8,192 tokens, the decode node for half."""
    folder = tmp_path_factory.mktemp("held")
    model = tiny_model(folder / "tiny", max_position_embeddings=16384)
    with Cluster(
        model=str(model),
        folder=folder,
        node_args=["--dtype", "float32", "--max-num-seqs", "1"],
        prefill_args=["--kv-cache-memory", "4MiB"],
        decode_args=["--kv-cache-memory", "2MiB"],
        gate=folder / "gate",
    ) as cluster:
        yield cluster


@pytest.fixture
def gate(cluster: Cluster) -> Iterator[Path]:
    """Open at first: ``unlink`` closes it, ``touch`` opens it. Afterwards everything is as it was."""
    assert cluster.gate is not None
    cluster.gate.touch()
    yield cluster.gate
    cluster.gate.touch()
    cluster.wait_until_idle(10.0)
    assert all(process.popen.poll() is None for process in [*cluster.prefill, *cluster.decode, cluster.router])


def loads(cluster: Cluster) -> tuple[NodeLoad, NodeLoad]:
    prefill, decode = cluster.statuses()
    return prefill.load, decode.load


def test_first_token_comes_while_the_transfer_is_held_back(cluster: Cluster, gate: Path) -> None:
    body = greedy(prompt_of(1, 300), 40)
    whole = cluster.complete(**body, cache_salt="another")
    gate.unlink()
    with Stream(cluster.port, body) as stream:
        stream.wait_tokens(1)
        wait_for(lambda: loads(cluster)[0].blocks_held >= 300 // 16, 5.0, "the prefill node holds the prompt")
        assert stream.num_texts == 1
        gate.touch()
        stream.wait_end()
    assert stream.is_whole
    assert (stream.text, stream.finish_reason) == (whole["choices"][0]["text"], "length")
    assert stream.proof["transport"] == "nixl"
    assert stream.proof["tokens_recomputed"] == 0
    assert stream.proof["blocks_moved"] == -(-300 // 16)


def test_clients_that_leave_before_the_decode_node_admits_them(cluster: Cluster, gate: Path) -> None:
    # B30
    gate.unlink()
    with Stream(cluster.port, LARGE) as large:
        large.wait_begun()
        before = loads(cluster)[0]
        for seed in range(60):
            # The large one has taken the room on the decode node, which therefore does not grant.
            with Stream(cluster.port, greedy(prompt_of(100 + seed, 480), 8)) as stream:
                stream.wait_begun()
        wait_for(lambda: loads(cluster)[0].handoffs == 1, 1.0, "the prefill node holds the large one alone")
        after = loads(cluster)[0]
        assert after.blocks_free + after.blocks_cached == before.blocks_free + before.blocks_cached
        assert loads(cluster)[1].waiting == 1
        gate.touch()
        assert large.wait_end().is_whole


def test_clients_that_leave_in_mid_transfer(cluster: Cluster, gate: Path) -> None:
    # B30, B37
    text = cluster.complete(**greedy(prompt_of(4, 100), 8))["choices"][0]["text"]
    gate.unlink()
    streams = [Stream(cluster.port, greedy(prompt_of(200 + seed, 100), 8)) for seed in range(20)]
    for stream in streams:
        stream.wait_begun()
    for stream in streams:
        stream.close()
    # Writes that are under way may still arrive: their blocks stay until they have ended, or the link is given up.
    gate.touch()
    wait_for(cluster.is_idle, 1.0, "all blocks are back", lambda: str(loads(cluster)))
    assert cluster.complete(**greedy(prompt_of(4, 100), 8))["choices"][0]["text"] == text


def test_writes_that_never_end_are_given_up(cluster: Cluster, gate: Path) -> None:
    # B37
    text = cluster.complete(**greedy(prompt_of(5, 100), 8))["choices"][0]["text"]
    gate.unlink()
    for seed in range(5):
        with Stream(cluster.port, greedy(prompt_of(300 + seed, 100), 8)) as stream:
            stream.wait_begun()
    wait_for(
        cluster.is_idle, NO_PROGRESS_S + 4, "all blocks are back though no write has ended", lambda: str(loads(cluster))
    )
    gate.touch()
    answer = cluster.complete(**greedy(prompt_of(5, 100), 8, cache_salt="cold"))
    assert answer["choices"][0]["text"] == text
    assert answer["pdserve"]["transport"] == "nixl"
    assert answer["pdserve"]["tokens_recomputed"] == 0


def test_a_request_cancelled_in_prefill_holds_up_nobody(cluster: Cluster, gate: Path) -> None:
    # B54
    for number in range(10):
        with Stream(cluster.port, greedy(prompt_of(400 + number, 3500), 8)):
            # Dropped at once, or after a part of the prefill.
            deadline = time.monotonic() + 0.02 * number
            wait_for(lambda until=deadline: time.monotonic() >= until, 1.0, "some time has passed")  # type: ignore[misc]
        begun = time.monotonic()
        assert cluster.complete(**greedy(prompt_of(500, 40), 4))["usage"]["completion_tokens"] == 4
        assert time.monotonic() - begun < 3.0


def test_a_queued_request_that_is_dropped(cluster: Cluster, gate: Path) -> None:
    # B60: dropped while it waits for the decode node to run it, with its KV there already, and behind it another.
    second, third = greedy(prompt_of(7, 40), 8), greedy(prompt_of(8, 40), 8)
    text = cluster.complete(**third)["choices"][0]["text"]
    with Stream(cluster.port, greedy(prompt_of(6, 40), 4000)) as first:
        first.wait_tokens(2)
        with Stream(cluster.port, second) as queued, Stream(cluster.port, third) as last:
            queued.wait_begun()
            wait_for(lambda: loads(cluster)[1].waiting == 2, 5.0, "both wait", lambda: str(loads(cluster)))
            queued.close()
            wait_for(lambda: loads(cluster)[1].waiting == 1, 2.0, "one waits")
            assert first.ended_at is None
            first.close()
            assert last.wait_end().is_whole
            assert last.text == text


def test_a_queued_prompt_that_is_dropped(cluster: Cluster, gate: Path) -> None:
    # B60: without a block on either node.
    gate.unlink()
    with Stream(cluster.port, LARGE) as first, Stream(cluster.port, greedy(prompt_of(9, 3700), 8)) as second:
        first.wait_begun()
        second.wait_begun()
        with Stream(cluster.port, greedy(prompt_of(10, 1000), 8)):
            wait_for(lambda: loads(cluster)[0].waiting == 1, 5.0, "it waits", lambda: str(loads(cluster)))
        wait_for(lambda: loads(cluster)[0].waiting == 0, 2.0, "it is gone")
        gate.touch()
        assert first.wait_end().is_whole
        assert second.wait_end().is_whole


def test_requests_that_take_too_long(cluster: Cluster, gate: Path) -> None:
    cluster.router_args = ["--request-timeout", "1"]
    router = cluster.start_router([port_of(node.ready_line) for node in [*cluster.prefill, *cluster.decode]], 0)
    cluster.router_args = []
    with closing(router):
        port = port_of(router.wait_ready())
        wait_for(lambda: Stream(port, greedy([5], 2)).wait_end().is_whole, 10, "it serves")
        gate.unlink()
        begun = time.monotonic()
        streams = [Stream(port, greedy(prompt_of(11, 100), 8), stream=streaming) for streaming in (True, False)]
        for stream, status in zip(streams, (200, 504), strict=True):
            stream.wait_end(3)
            assert 0.9 < time.monotonic() - begun < 2.5
            assert stream.status == status
            assert stream.error is not None
            assert stream.error["type"] == "timeout_error"
            assert not stream.done
    # With writes that do not end yet, and with these ended.
    wait_for(lambda: all(load.running == load.waiting == 0 for load in loads(cluster)), 1.0, "no request is left")
    gate.touch()
    wait_for(cluster.is_idle, 1.0, "all blocks are back", lambda: str(loads(cluster)))
