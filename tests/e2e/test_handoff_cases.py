"""Hand-offs that are made hard: corrupt blocks, little room on either side, long prompts, caches in every state.

Every answer is compared with that of the same request when it is alone and nothing is in its way.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.clients import Stream, greedy, prompt_of
from support.cluster import Cluster, Process, wait_for
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

DRILL_NODE = str(Path(__file__).parent.parent / "support" / "drill_node.py")
BLOCK = 16
BLOCK_BYTES = 8192
CAP = 64
"""Tokens in a step of the prefill node."""
NUM_PREFILL_BLOCKS = 64
NUM_SLOTS = 100


class DrillCluster(Cluster):
    """A prefill node with a gate, little memory and small steps; or a decode node with a small region."""

    def start_prefill(self, port: int) -> Process:
        return self._start("prefill", str(self.folder), port, self.prefill_args)

    def start_decode(self, port: int) -> Process:
        return self._start("decode", str(NUM_SLOTS * BLOCK_BYTES), port, self.decode_args)

    def _start(self, role: str, setting: str, port: int, args: Any) -> Process:
        command = ["-P", DRILL_NODE, role, setting, "--model", self.model, "--port", str(port), "--threads", "1"]
        return Process(role, [*command, *self.node_args, *args], self.folder, self.env)

    def alone(self, bodies: list[dict[str, Any]]) -> list[str]:
        """Their texts, one at a time, none from a cache of the others."""
        return [self.complete(**body, cache_salt=f"alone {n}")["choices"][0]["text"] for n, body in enumerate(bodies)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096))


@pytest.fixture(scope="module")
def small(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrillCluster]:
    """The prefill node is small."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "gate").touch()
    with DrillCluster(
        model=model,
        folder=folder,
        node_args=["--dtype", "float32"],
        prefill_args=[
            "--kv-cache-memory",
            str(NUM_PREFILL_BLOCKS * BLOCK_BYTES),
            "--max-num-batched-tokens",
            str(CAP),
        ],
        decode_args=["--kv-cache-memory", "64MiB"],
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def large(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrillCluster]:
    """Both nodes have room; the region of the decode node holds NUM_SLOTS blocks."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "gate").touch()
    with DrillCluster(
        model=model, folder=folder, node_args=["--dtype", "float32", "--kv-cache-memory", "64MiB"]
    ) as cluster:
        yield cluster


def mismatches(cluster: Cluster) -> int:
    return cluster.statuses()[1].counters["digest_mismatches"]


# ---- a small prefill node ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_block", [0, 2, 4], ids=["first", "middle", "last"])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_block_that_arrives_corrupt(small: DrillCluster, bad_block: int, streaming: bool) -> None:
    # B13
    bodies = [greedy(prompt_of(20 + n, 75), 12) for n in range(4)]
    bodies[1::2] = [{**body, "temperature": 1.0, "seed": 7} for body in bodies[1::2]]
    alone = small.alone(bodies)
    before = mismatches(small)
    (small.folder / "gate").unlink()
    (small.folder / "written").write_bytes(b"")
    (small.folder / "corrupt").write_text(str(bad_block))
    streams = []
    for number, body in enumerate(bodies):
        salted = {**body, "cache_salt": f"{bad_block} {streaming}"}
        streams.append(Stream(small.port, salted, stream=streaming))
        # One after the other, so that the first five blocks are those of the first request.
        wait_for(lambda n=number: (small.folder / "written").stat().st_size == 5 * (n + 1), 10, "all are to be written")  # type: ignore[misc]
    (small.folder / "corrupt").unlink()
    (small.folder / "gate").touch()
    assert [stream.wait_end().text for stream in streams] == alone
    assert all(stream.is_whole for stream in streams)
    assert [stream.proof["tokens_recomputed"] for stream in streams] == [0, 0, 0, 0]
    assert [stream.proof["blocks_moved"] for stream in streams] == [5, 5, 5, 5]
    assert [stream.proof["blocks_resent"] for stream in streams] == [1, 0, 0, 0]
    assert mismatches(small) == before + 1
    small.wait_until_idle()


@pytest.mark.parametrize("num_tokens", [CAP + 1, CAP + 33])
def test_a_prompt_longer_than_a_step(small: DrillCluster, num_tokens: int) -> None:
    # B69; with most of it cached it is not longer than a step.
    prompt = prompt_of(30, num_tokens)
    in_steps = small.complete(**greedy(prompt, 12), cache_salt=f"cold {num_tokens}")
    small.complete(**greedy(prompt[:CAP], 1), cache_salt=f"warm {num_tokens}")
    at_once = small.complete(**greedy(prompt, 12), cache_salt=f"warm {num_tokens}")
    assert in_steps["pdserve"]["cached_tokens"]["prefill"] == 0
    assert at_once["pdserve"]["cached_tokens"]["prefill"] == CAP
    assert in_steps["choices"] == at_once["choices"]


def test_blocks_that_are_not_sent_yet_are_not_evicted(small: DrillCluster) -> None:
    # B56: more prompts than the prefill node has blocks for, again and again, and none is sent for a while.
    bodies = [greedy(prompt_of(40 + n, 110), 6) for n in range(24)]
    alone = small.alone(bodies)
    before = mismatches(small)
    for _ in range(3):
        (small.folder / "gate").unlink()
        streams = [Stream(small.port, {**body, "cache_salt": "round"}) for body in bodies]
        wait_for(lambda: small.statuses()[0].load.blocks_held > NUM_PREFILL_BLOCKS // 2, 10, "many blocks are held")
        (small.folder / "gate").touch()
        assert [stream.wait_end().text for stream in streams] == alone
        assert all(stream.is_whole for stream in streams)
        assert {stream.proof["tokens_recomputed"] for stream in streams} == {0}
        small.wait_until_idle()
    assert mismatches(small) == before


# ---- a small region ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 8])
def test_cold_warm_and_half_warm(large: DrillCluster, at_once: int) -> None:
    # B23
    bodies = [greedy(prompt_of(50 + n, 150 + n), 10) for n in range(at_once)]
    alone = large.alone(bodies)

    def cached(proof: dict[str, Any]) -> tuple[int, int]:
        return proof["cached_tokens"]["prefill"], proof["cached_tokens"]["decode"]

    for run in range(5):
        for state in ("cold", "warm", "half warm"):
            # A run is cold, what it has left is warm, and half a prompt leaves half of it.
            salt = f"{at_once} {run} {'half' if state == 'half warm' else 'whole'}"
            if state == "half warm":
                for body in bodies:
                    large.complete(**greedy(body["prompt"][:80], 2), cache_salt=salt)
            streams = [Stream(large.port, {**body, "cache_salt": salt}) for body in bodies]
            assert [stream.wait_end().text for stream in streams] == alone, state
            expected = {"cold": (0, 0), "warm": (144, 144), "half warm": (80, 80)}[state]
            assert {cached(stream.proof) for stream in streams} == {expected}


def test_five_hundred_prompts_through_a_region_for_fifty(large: DrillCluster) -> None:
    # B38: two at a time; some clients go away, so that what was sent for them is wanted by nobody.
    bodies = [greedy(prompt_of(1000 + n, 2 * BLOCK), 2) for n in range(500)]

    def ask(number: int) -> dict[str, Any] | None:
        if number % 10:
            return large.complete(**bodies[number])["pdserve"]
        with Stream(large.port, bodies[number]) as stream:
            stream.wait_begun()
        return None

    with ThreadPoolExecutor(2) as pool:
        proofs = [proof for proof in pool.map(ask, range(100)) if proof]
        before = large.decode[0].rss_bytes()
        proofs += [proof for proof in pool.map(ask, range(100, 500)) if proof]
    assert {(proof["blocks_moved"], proof["tokens_recomputed"]) for proof in proofs} == {(2, 0)}
    large.wait_until_idle()
    assert large.decode[0].rss_bytes() - before < 16 << 20


def test_prompts_of_twice_the_region(large: DrillCluster) -> None:
    # B48: ten of that length and ten that are shorter, all at once.
    bodies = [greedy(prompt_of(2000 + n, 2 * NUM_SLOTS * BLOCK), 4) for n in range(20)]
    bodies[10:] = [greedy(prompt_of(2100 + n, NUM_SLOTS * BLOCK // 4 + n), 4) for n in range(10)]
    alone = large.alone(bodies[:2] + bodies[10:12])
    streams = [Stream(large.port, body) for body in bodies]
    for stream, body in zip(streams, bodies, strict=True):
        assert stream.wait_end().is_whole, stream
        assert stream.proof["mode"] == "disaggregated"
        assert stream.proof["tokens_recomputed"] == 0
        assert stream.proof["blocks_moved"] == -(-len(body["prompt"]) // BLOCK)
    assert [stream.text for stream in streams[:2] + streams[10:12]] == alone
    large.wait_until_idle()


# ---- no connector --------------------------------------------------------------------------------------------------


def test_a_node_without_its_connector_does_not_start(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "nosuch0")
    command = [sys.executable, "-m", "pdserve_decode_node.main", "--model", model, "--port", "0"]
    ended = subprocess.run(
        [*command, "--kv-cache-memory", "1MiB"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2, ended
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("decode-node: KV connector 'nixl' is not available")
    assert "nosuch0" in ended.stderr
