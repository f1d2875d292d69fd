"""Sixteen requests at once and one at a time, in bfloat16, through real processes.

The tokens are the same, and so are the bits of their log probabilities: whoever shares the batch, however prompts are
cut into chunks, preempted or not.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from pdserve_kernels import cpu
from support.clients import greedy, prompt_of
from support.cluster import Cluster
from support.models import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cpu.is_built(), reason="torch's results depend on the batch"),
]

NUM_REQUESTS = 16


def bodies(max_prompt: int, max_tokens: int) -> list[dict[str, Any]]:
    """Greedy and seeded requests of all lengths."""
    rng = random.Random(7)
    made = []
    for number in range(NUM_REQUESTS):
        prompt = prompt_of(number, rng.randint(1, max_prompt))
        body = greedy(prompt, rng.randint(max_tokens // 2, max_tokens), logprobs=2)
        made.append(body if number % 2 else {**body, "temperature": 0.9, "top_p": 0.95, "seed": number})
    return made


def compare(cluster: Cluster, requests: list[dict[str, Any]]) -> None:
    """Nothing that one run has cached is found by the other: they have salts of their own."""

    def choice(body: dict[str, Any], salt: str) -> dict[str, Any]:
        answer: dict[str, Any] = cluster.complete(**body, cache_salt=salt)["choices"][0]
        assert len(answer["logprobs"]["token_logprobs"]) == body["max_tokens"]
        return answer

    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        together = list(clients.map(lambda body: choice(body, "together"), requests))
    alone = [choice(body, "alone") for body in requests]
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert one == other, f"request {number} is not the same in company"


def test_demo_model(tmp_path: Path) -> None:
    args = ["--max-model-len", "512", "--kv-cache-memory", "64MiB", "--max-num-batched-tokens", "96"]
    with Cluster(model="smollm2", folder=tmp_path, node_args=args) as cluster:
        compare(cluster, bodies(max_prompt=120, max_tokens=10))


def test_preempted(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    args = ["--dtype", "bfloat16", "--kv-cache-memory", "160KiB", "--max-num-seqs", "8"]
    with Cluster(model=str(model), folder=tmp_path, node_args=args) as cluster:
        requests = bodies(max_prompt=250, max_tokens=160)
        compare(cluster, requests)
        decode = cluster.statuses()[1]
        assert decode.counters["preemptions"] > 0, "there was room for all: nothing was tested"
