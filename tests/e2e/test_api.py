"""The API over real nodes: choices, lists of prompts, streams, bad input, and a client that asks for too much."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig
from pdserve_engine.wiring import build_engine
from pdserve_protocol.requests import AddRequest
from pdserve_protocol.sampling import SamplingParams
from pdserve_text.detokenizer import IncrementalDetokenizer
from pdserve_text.files import load_tokenizer_files
from pdserve_text.tokenizer import Tokenizer
from support.clients import prompt_of
from support.cluster import Cluster
from support.models import tiny_model
from support.streams import asks, compare

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

COMPLETION = "/v1/completions"
BLOCK = 16
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("api")
    model = str(tiny_model(folder / "tiny"))
    with Cluster(model=model, folder=folder, node_args=["--dtype", "float32"]) as cluster:
        yield cluster


def texts_of(events: list[dict[str, Any]]) -> list[str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            part = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + part
    return [texts[index] for index in sorted(texts)]


class Offline:
    """The same model in this process: what each choice says when it is the only one."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(model=ModelConfig(path=folder, dtype="float32"), cache=CacheConfig(num_blocks=64))
        self._core, _ = build_engine(config)
        self._tokenizer = Tokenizer.from_files(load_tokenizer_files(folder))

    def text(self, prompt: list[int], choice: int) -> str:
        sampling = SamplingParams(**SAMPLED)
        message = AddRequest(id="x", boot_id="", prompt_token_ids=prompt, sampling=sampling, choice=choice)
        request = self._core.add_request(message, 0.0)
        while self._core.step_in_flight or self._core.scheduler.requests:
            self._core.step(time.monotonic)
        return IncrementalDetokenizer(self._tokenizer, prompt_token_ids=prompt).push(request.output_token_ids)

    def close(self) -> None:
        self._core.close()


@pytest.fixture(scope="module")
def offline(cluster: Cluster) -> Iterator[Offline]:
    with closing(Offline(Path(cluster.model))) as offline:
        yield offline


def counter(cluster: Cluster, role: str, name: str) -> int:
    return sum(status.counters[name] for status in cluster.statuses() if status.info.identity.role == role)


@pytest.mark.parametrize("length", [3, 16, 64, 70])
def test_choices_share_a_prompt_and_are_each_as_if_alone(cluster: Cluster, offline: Offline, length: int) -> None:
    # B46, B77: the prompt is computed and handed over once; the decode node goes on from it with the other choices.
    prompts = [prompt_of(length, length), prompt_of(length + 1, length - 1)]
    body = SAMPLED | {"prompt": prompts, "n": 3, "cache_salt": str(length)}
    names = ("prefill", "prompt_tokens_computed"), ("prefill", "blocks_sent"), ("decode", "blocks_landed")
    before = [counter(cluster, *name) for name in names]
    status, answer = cluster.post(COMPLETION, body)
    assert status == 200, answer
    cluster.wait_until_idle()
    num_blocks = sum(-(-len(prompt) // BLOCK) for prompt in prompts)
    after = [counter(cluster, *name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [2 * length - 1, num_blocks, num_blocks]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [offline.text(prompt, choice) for prompt in prompts for choice in range(3)]
    assert len(set(texts)) == 6
    assert answer["usage"]["prompt_tokens"] == 2 * length - 1
    assert answer["usage"]["completion_tokens"] == 6 * SAMPLED["max_tokens"]
    for choice in answer["choices"]:
        proof, prompt = choice["pdserve"], prompts[choice["index"] // 3]
        if choice["index"] % 3 == 0:
            assert (proof["mode"], proof["blocks_moved"]) == ("disaggregated", -(-len(prompt) // BLOCK))
            continue
        assert (proof["mode"], proof["blocks_moved"], proof["exact"]) == ("forked", 0, True)
        cached = (len(prompt) - 1) // BLOCK * BLOCK
        assert proof["cached_tokens"] == {"prefill": None, "decode": cached}
        assert proof["tokens_recomputed"] == len(prompt) - cached <= BLOCK
    assert texts_of(list(cluster.stream(COMPLETION, body))) == texts
    cluster.wait_until_idle()


def test_many_requests_of_several_choices_at_once(cluster: Cluster, offline: Offline) -> None:
    # B46
    prompts = [prompt_of(50 + i, 40 + 5 * i) for i in range(10)]

    def ask(prompt: list[int]) -> list[str]:
        body = SAMPLED | {"prompt": prompt, "n": 3}
        if len(prompt) % 2:
            return texts_of(list(cluster.stream(COMPLETION, body)))
        status, answer = cluster.post(COMPLETION, body)
        assert status == 200, answer
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        return [choice["text"] for choice in answer["choices"]]

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [[offline.text(prompt, choice) for choice in range(3)] for prompt in prompts]
    cluster.wait_until_idle()


def test_a_client_that_goes_away_takes_all_its_choices_along(cluster: Cluster) -> None:
    stream = cluster.stream(COMPLETION, SAMPLED | {"prompt": prompt_of(90, 70), "n": 4, "max_tokens": 400})
    indexes: set[int] = set()
    while len(indexes) < 4:
        indexes |= {choice["index"] for choice in next(stream)["choices"]}
    assert not cluster.is_idle()
    stream.close()
    cluster.wait_until_idle()


def test_streamed_is_plain(cluster: Cluster) -> None:
    # `make streams` asks more of a real model.
    tally = compare(cluster, asks(21), concurrency=4)
    assert tally.different == []
    assert any(end.startswith("stop: stop") for end in tally.ends)
    assert tally.ends["call: tool_calls"] == 3


def test_bad_input_leaves_the_nodes_as_they_were(cluster: Cluster) -> None:
    # B64
    before = cluster.complete(prompt_of(3, 20))["choices"][0]["text"]
    for field, value in (
        ("stop_token_ids", [10**6]),
        ("logit_bias", {"999999": 5}),
        ("max_tokens", 10**6),
        ("prompt", [[5], [10**6]]),
        ("n", 10**6),
        ("kv_transfer_params", {"do_remote_prefill": True, "remote_host": "x"}),
    ):
        body = {"prompt": prompt_of(3, 20), "max_tokens": 16, "temperature": 0, field: value}
        status, answer = cluster.post(COMPLETION, body)
        if field == "kv_transfer_params":
            # B105: not ours, whatever it holds.
            assert (status, answer["choices"][0]["text"]) == (200, before)
        else:
            assert status == 400
            assert answer["error"]["param"].startswith(field)
    assert cluster.is_idle()


def test_a_noisy_neighbour_changes_nobodys_answer(cluster: Cluster) -> None:
    # B108
    quiet = prompt_of(4, 40)
    expected = cluster.complete(quiet)["choices"][0]["text"]
    noisy = SAMPLED | {"prompt": [prompt_of(10 + i, 90) for i in range(4)], "n": 8, "logprobs": 5, "max_tokens": 20}
    with ThreadPoolExecutor(3) as pool:
        loud = [pool.submit(cluster.post, COMPLETION, noisy) for _ in range(2)]
        for _ in range(8):
            assert cluster.complete(quiet)["choices"][0]["text"] == expected
        assert [task.result()[0] for task in loud] == [200, 200]
    cluster.wait_until_idle()
