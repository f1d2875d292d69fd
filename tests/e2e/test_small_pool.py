"""Nodes with hardly any room: what never fits is refused, the rest takes turns, preempted or not, and is right."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.clients import Stream, greedy, prompt_of
from support.cluster import Cluster, wait_for
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

NUM_TOKENS = 640
"""That the KV cache of each node holds."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("small")
    model = tiny_model(folder / "tiny", max_position_embeddings=4096)
    with Cluster(
        model=str(model),
        folder=folder,
        node_args=["--dtype", "float32", "--kv-cache-memory", "320KiB", "--max-num-seqs", "8"],
    ) as cluster:
        assert [status.info.kv_capacity_tokens for status in cluster.statuses()] == [NUM_TOKENS] * 2
        yield cluster


@pytest.fixture(autouse=True)
def _idle_afterwards(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_until_idle()
    assert all(process.popen.poll() is None for process in [*cluster.prefill, *cluster.decode, cluster.router])


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(NUM_TOKENS + 1, 1), (2000, 8), (600, 41), (8, 640)])
def test_what_can_never_fit_is_refused_at_once(
    cluster: Cluster, num_prompt_tokens: int, max_tokens: int, streaming: bool
) -> None:
    # B44
    body = greedy(prompt_of(1, num_prompt_tokens), max_tokens)
    with Stream(cluster.port, greedy(prompt_of(2, 100), 300)) as running:
        running.wait_tokens(1)
        begun = time.monotonic()
        with Stream(cluster.port, body, stream=streaming) as stream, Stream(cluster.port, greedy([5], 2)) as behind:
            stream.wait_end(2)
            assert stream.status == 400
            assert stream.error is not None
            assert stream.error["code"] == "context_length_exceeded"
            assert str(NUM_TOKENS) in stream.error["message"]
            assert behind.wait_end(2).is_whole
        assert time.monotonic() - begun < 2
        assert running.ended_at is None or running.is_whole


def test_what_just_fits_is_served(cluster: Cluster) -> None:
    # B44
    for num_prompt_tokens, max_tokens in [(600, 40), (NUM_TOKENS - 1, 1), (1, NUM_TOKENS - 1), (624, 16)]:
        answer = cluster.complete(**greedy(prompt_of(3, num_prompt_tokens), max_tokens))
        assert answer["usage"]["completion_tokens"] == max_tokens


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests of which a few fill a node, greedy and seeded."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        body = greedy(prompt_of(1000 * seed + number, rng.randint(1, 250)), rng.randint(1, 200))
        made.append(body if number % 2 else {**body, "temperature": 1.0, "seed": number})
    return made


def test_preempted_requests_give_the_same_answers(cluster: Cluster) -> None:
    requests = bodies(16, 1)
    alone = [cluster.complete(**body)["choices"][0]["text"] for body in requests]
    before = cluster.statuses()[1].counters["preemptions"]
    streams = [Stream(cluster.port, body) for body in requests]
    assert [stream.wait_end(60).text for stream in streams] == alone
    assert all(stream.is_whole for stream in streams)
    assert cluster.statuses()[1].counters["preemptions"] > before, "there was room for all: nothing was tested"


def test_clients_that_leave_while_room_is_short(cluster: Cluster) -> None:
    # B35
    requests = bodies(24, 2)
    alone = [cluster.complete(**body)["choices"][0]["text"] for body in requests]
    rng = random.Random(3)
    for _ in range(2):
        streams = [Stream(cluster.port, body) for body in requests]
        leaving = rng.sample(range(len(streams)), len(streams) // 2)
        begun = time.monotonic()
        for number in leaving:
            until = time.monotonic() + rng.uniform(0, 0.05)
            wait_for(lambda until=until: time.monotonic() >= until, 1, "some time has passed")  # type: ignore[misc]
            streams[number].close()
        for number, stream in enumerate(streams):
            if number not in leaving:
                stream.wait_end(60)
                assert stream.is_whole, stream
                assert stream.text == alone[number]
        assert time.monotonic() - begun < 60
        cluster.wait_until_idle(2)
