"""Where prompts are computed: both nodes share a burst, and what comes alone is handed over."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.clients import prompt_of
from support.cluster import Cluster
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

NUM = 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("local")
    model = tiny_model(folder / "tiny", kv_heads=4, head_dim=32)
    args = ["--dtype", "float32", "--kv-cache-memory", "128MiB"]
    with Cluster(model=str(model), folder=folder, node_args=args, local_prefill="auto") as cluster:
        yield cluster


def test_a_burst_is_computed_on_both_nodes_and_answered_as_one_by_one(cluster: Cluster) -> None:
    prompts = [prompt_of(number, 700) for number in range(NUM)]
    alone = [cluster.complete(prompt, max_tokens=24) for prompt in prompts]
    assert {(answer["pdserve"]["mode"], answer["pdserve"]["reason"]) for answer in alone} == {("disaggregated", None)}
    # Other salts: nothing of it is cached.
    with ThreadPoolExecutor(NUM) as clients:
        burst = list(clients.map(lambda prompt: cluster.complete(prompt, max_tokens=24, cache_salt="burst"), prompts))
    assert [a["choices"][0]["text"] for a in burst] == [a["choices"][0]["text"] for a in alone]
    said = [(answer["pdserve"]["mode"], answer["pdserve"]["reason"]) for answer in burst]
    assert set(said) == {("disaggregated", None), ("aggregated", "prefill_busy")}, said
    cluster.wait_until_idle()
    assert cluster.complete(prompt_of(NUM, 700))["pdserve"]["mode"] == "disaggregated"
    assert all(status.load.prompt_tokens_per_s > 0 for status in cluster.statuses())
