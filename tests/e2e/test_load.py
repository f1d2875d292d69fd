"""Two hundred streams at a time, of which a third is dropped at random moments, for three rounds."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from support.clients import greedy, prompt_of
from support.cluster import Cluster, port_of
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.slow

NUM_STREAMS = 200
NUM_BODIES = 50
GROWTH_BYTES = 16 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("load")
    # One round goes once through all of the caches and of the landing region, so that later ones touch no new memory.
    model = tiny_model(folder / "tiny", kv_heads=4, head_dim=32)
    # Room for about half of them at a time.
    with Cluster(
        model=str(model), folder=folder, node_args=["--dtype", "float32", "--kv-cache-memory", "64MiB"]
    ) as cluster:
        yield cluster


def make_bodies() -> list[dict[str, Any]]:
    """Greedy and seeded requests of mixed length; some begin alike."""
    rng = random.Random(1)
    common = prompt_of(0, 200)
    made = []
    for number in range(NUM_BODIES):
        prompt = prompt_of(number + 1, rng.choice([1, 5, 16, 40, 100, 300, 700]))
        body = greedy(common + prompt if number % 3 == 0 else prompt, rng.choice([1, 2, 10, 40, 80]))
        made.append(body if number % 2 else {**body, "temperature": 0.9, "top_p": 0.95, "seed": number})
    return made


@dataclass(frozen=True)
class Leaving:
    """When a client goes away: after so many seconds, or after so many events."""

    seconds: float | None = None
    events: int = 10**9


async def read(session: aiohttp.ClientSession, body: dict[str, Any], leaving: Leaving) -> str | None:
    """Text of a whole stream; None where the client has left before the end."""
    text, is_whole, num_events = "", False, 0
    try:
        async with (
            asyncio.timeout(leaving.seconds),
            session.post("/v1/completions", json={**body, "stream": True}) as answer,
        ):
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.strip() == b"data: [DONE]":
                    is_whole = True
                elif line.startswith(b"data: "):
                    if num_events >= leaving.events:
                        return None
                    num_events += 1
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
    except TimeoutError:
        assert leaving.seconds is not None
        return None
    assert is_whole, "the stream ended too early"
    return text


async def one_round(url: str, bodies: Sequence[dict[str, Any]], expected: Sequence[str], seed: int) -> int:
    """All at once; the number of clients that left before the end."""
    rng = random.Random(seed)
    order = [number % len(bodies) for number in range(NUM_STREAMS)]
    rng.shuffle(order)
    stay, leaving = Leaving(), [Leaving(seconds=rng.uniform(0, 1)) for _ in range(NUM_STREAMS // 6)]
    leaving += [Leaving(events=rng.randrange(60)) for _ in range(NUM_STREAMS // 6)]
    leaving += [stay] * (NUM_STREAMS - len(leaving))
    rng.shuffle(leaving)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, connector=connector) as session, asyncio.timeout(120):
        texts = await asyncio.gather(
            *(
                read(session, {**bodies[number], "cache_salt": f"{seed}/{count % 4}"}, when)
                for count, (number, when) in enumerate(zip(order, leaving, strict=True))
            )
        )
    for number, text in zip(order, texts, strict=True):
        assert text is None or text == expected[number]
    return texts.count(None)


def test_two_hundred_streams_of_which_a_third_is_dropped(cluster: Cluster) -> None:
    bodies = make_bodies()
    expected = [cluster.complete(**body)["choices"][0]["text"] for body in bodies]
    nodes = [*cluster.prefill, *cluster.decode]
    memory = []
    for seed in range(3):
        num_left = asyncio.run(one_round(f"http://127.0.0.1:{cluster.port}", bodies, expected, seed))
        assert num_left >= NUM_STREAMS // 8, "hardly a client has left"
        cluster.wait_until_idle()
        memory.append([process.rss_bytes() for process in [*nodes, cluster.router]])
    growth = [after - before for before, after in zip(memory[1], memory[2], strict=True)]
    assert max(growth) < GROWTH_BYTES, memory
    status = subprocess.run(
        [sys.executable, "-m", "pdserve_cli.main", "node", "status", "--json"]
        + [f"127.0.0.1:{port_of(node.ready_line)}" for node in nodes],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    for line in status.stdout.splitlines():
        told = json.loads(line)
        load, counters = told["load"], told["counters"]
        assert (
            load["running"] == load["waiting"] == load["handoffs"] == load["blocks_held"] == load["blocks_in_use"] == 0
        )
        assert load["blocks_free"] + load["blocks_cached"] == load["blocks_total"]
        assert counters["digest_mismatches"] == 0
    assert [process.popen.poll() for process in [*nodes, cluster.router]] == [None] * 3
