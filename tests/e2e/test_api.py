"""The API over real nodes: choices, lists of prompts, streams, bad input, and a client that asks for too much."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from support.clients import prompt_of
from support.cluster import Cluster
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}


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


def test_choices_share_a_prompt_and_are_each_as_if_alone(cluster: Cluster) -> None:
    # B46, B77: the prompt is computed once, and found in both caches by the other choices.
    body = SAMPLED | {"prompt": [prompt_of(1, 70), prompt_of(2, 50)], "n": 3}
    status, answer = cluster.post(COMPLETION, body)
    assert status == 200, answer
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 6
    assert texts_of(list(cluster.stream(COMPLETION, body))) == texts
    for i, prompt in enumerate(body["prompt"]):
        alone = cluster.complete(prompt, **SAMPLED | {"cache_salt": "alone"})
        assert alone["choices"][0]["text"] == texts[3 * i]
    proofs = [choice["pdserve"] for choice in answer["choices"]]
    assert {proof["mode"] for proof in proofs} == {"disaggregated"}
    for first in (0, 3):
        assert proofs[first]["cached_tokens"] == {"prefill": 0, "decode": 0}
        for proof in proofs[first + 1 : first + 3]:
            assert proof["cached_tokens"]["prefill"] >= 48
            assert proof["blocks_moved"] < proofs[first]["blocks_moved"]
    cluster.wait_until_idle()


def test_streamed_is_plain(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "What is the answer?"}]
    for extra in (
        {},
        {"stop": ["e", "th"]},
        {"logprobs": True, "top_logprobs": 2},
        {"n": 2, "temperature": 1, "seed": 3},
    ):
        body = {"messages": messages, "temperature": 0, "max_tokens": 40, **extra}
        status, answer = cluster.post(CHAT, body)
        assert status == 200, answer
        events = list(cluster.stream(CHAT, body))
        assert texts_of(events) == [choice["message"]["content"] for choice in answer["choices"]]
        if "logprobs" in body:
            pieces = [c["logprobs"]["content"] for e in events for c in e["choices"] if c["logprobs"]]
            assert [x for piece in pieces for x in piece] == answer["choices"][0]["logprobs"]["content"]


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
