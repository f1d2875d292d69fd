"""Whole requests over the connectors that an operator may choose, between real processes."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
from pdserve_engine.node import NodeParts, run_node
from pdserve_protocol.door import Address
from support.clients import Stream, greedy, prompt_of
from support.cluster import Cluster, node_status, port_of, wait_for
from support.command_lines import parse_command
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

NODE_ARGS = ["--dtype", "float32", "--kv-cache-memory", "16MiB"]
BLOCK = 16
NUM_TOKENS = 16
PROMPTS = [prompt_of(seed, length) for seed, length in enumerate([40, 333, 17, 250, 130, 90, 400, 64, 200])]
FEW = PROMPTS[:3]

WITHOUT_NIXL = 'import sys; sys.modules["nixl_cu12"] = None\n'
FAULTS = "seed=5&corrupt=0.1&delay_ms=200&double=0.3&reorder=0.2&lose=0.05&repeat=0.1&late_ms=5"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("connectors") / "tiny", max_position_embeddings=4096))


@pytest.fixture(scope="module")
def texts(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What the prompts are answered with where nothing moves."""
    folder = tmp_path_factory.mktemp("alone")
    with Cluster(model=model, folder=folder, num_prefill=0, node_args=NODE_ARGS) as alone:
        yield [text_of(complete(alone, prompt)) for prompt in PROMPTS]


def complete(cluster: Cluster, prompt: list[int], num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return cluster.complete(prompt, max_tokens=num_tokens, ignore_eos=True)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def test_tcp_where_nixl_is_not_installed(model: str, texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_NIXL)
    with Cluster(model=model, folder=tmp_path, node_args=NODE_ARGS, env={"PYTHONPATH": str(tmp_path)}) as bare:
        assert [status.info.identity.connectors for status in bare.statuses()] == [["tcp"], ["tcp"]]
        answers = [complete(bare, prompt) for prompt in FEW]
        assert [text_of(answer) for answer in answers] == texts[: len(FEW)]
        proofs = [answer["pdserve"] for answer in answers]
        assert {(proof["mode"], proof["transport"]) for proof in proofs} == {("disaggregated", "tcp")}
        assert [proof["blocks_moved"] for proof in proofs] == [-(-len(prompt) // BLOCK) for prompt in FEW]
        bare.wait_until_idle()


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def faulty(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A pair between whose nodes much goes wrong; over TCP in both cases."""
    args = ["--kv-connector", f"faulty:{request.param}?{FAULTS}"]
    folder = tmp_path_factory.mktemp("faulty")
    with Cluster(model=model, folder=folder, node_args=NODE_ARGS, prefill_args=args, env={"UCX_TLS": "tcp"}) as cluster:
        yield cluster


def test_faults_never_change_an_answer(faulty: Cluster, texts: list[str]) -> None:
    streams = [Stream(faulty.port, greedy(prompt, NUM_TOKENS)) for prompt in PROMPTS]
    num_whole = 0
    for stream, text in zip(streams, texts, strict=True):
        stream.wait_end()
        num_whole += stream.is_whole
        assert not stream.is_whole or stream.text == text
    assert num_whole >= len(PROMPTS) - 2
    faulty.wait_until_idle(20.0)
    assert faulty.statuses()[1].counters["digest_mismatches"] > 0
    log = faulty.prefill[0].log.read_text()
    assert "goes wrong on purpose" in log
    assert "messages to other nodes go wrong on purpose" in log


def test_a_sender_that_is_stopped_in_mid_push(faulty: Cluster, texts: list[str]) -> None:
    """Its slots and blocks are others' when it wakes up; what it still writes reaches nothing that is used."""
    [stopped] = faulty.prefill
    streams = [Stream(faulty.port, greedy(prompt_of(20 + n, 400), NUM_TOKENS)) for n in range(4)]
    for stream in streams:
        stream.wait_begun()
    stopped.signal(signal.SIGSTOP)
    try:
        for stream in streams:
            stream.close()
        decode = Address("127.0.0.1", port_of(faulty.decode[0].ready_line))
        wait_for(lambda: node_status(decode).load.handoffs == 0, 10.0, "the link is lost")
        wait_for(lambda: json.loads(faulty.get("/ready")[1])["degraded"], 10.0, "the router does without it")
        # The same blocks hold other requests now.
        answers = [complete(faulty, prompt) for prompt in FEW]
        assert {answer["pdserve"]["mode"] for answer in answers} == {"aggregated"}
        running = [Stream(faulty.port, greedy(prompt, 200)) for prompt in FEW]
    finally:
        stopped.signal(signal.SIGCONT)
    assert [text_of(answer) for answer in answers] == texts[: len(FEW)]
    expected = [stream.wait_end().text for stream in running]
    faulty.wait_until_ready()
    assert [text_of(complete(faulty, prompt, 200)) for prompt in FEW] == expected
    faulty.wait_until_idle(20.0)


@pytest.mark.parametrize(
    ("spec", "told"), [("pigeon", "KV connector 'pigeon' is not available"), ("faulty:tcp?x=1", "'x' is none of")]
)
def test_a_connector_that_does_not_exist_is_told(spec: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse_command(["decode-node", "--model", "no such model", "--port", "0", "--kv-connector", spec])
    assert run_node("decode", args, NodeParts()) == 2
    assert told in capsys.readouterr().err
