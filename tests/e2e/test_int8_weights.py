"""Nodes whose weights are kept in 8 bits: a pair of them, one alone, and one beside a node of bfloat16."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from pdserve_kernels import cpu
from support.clients import greedy, prompt_of
from support.cluster import Cluster, port_of
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not cpu.is_built(), reason="the C kernels are not built")]

INT8 = ["--quantization", "int8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@contextmanager
def clusters(model: str, folder: Path, prefill_args: list[str]) -> Iterator[tuple[Cluster, Cluster]]:
    """Routers in front of a pair, and of its decode node alone; the decode node has int8."""
    common = ["--kv-cache-memory", "4MiB"]
    with Cluster(model=model, folder=folder, node_args=common, prefill_args=prefill_args, decode_args=INT8) as pair:
        alone = Cluster(model=model, folder=folder, num_prefill=0)
        with closing(alone.start_router([port_of(pair.decode[0].ready_line)], 0)) as alone.router:
            alone.port = port_of(alone.router.wait_ready())
            alone.wait_until_ready()
            yield pair, alone


def ask(cluster: Cluster, number: int, salt: str) -> tuple[dict[str, Any], dict[str, Any]]:
    answer = cluster.complete(**greedy(prompt_of(number, 20 + 13 * number), 12, logprobs=2), cache_salt=salt)
    return answer["choices"][0], answer["pdserve"]


@pytest.mark.parametrize("prefill_args", [INT8, []], ids=["both", "decode only"])
def test_a_pair_with_int8_is_as_one_node(model: str, tmp_path: Path, prefill_args: list[str]) -> None:
    is_alike = prefill_args == INT8
    differ = 0
    with clusters(model, tmp_path, prefill_args) as (pair, alone):
        for number in range(5):
            together, proof = ask(pair, number, "pair")
            expected, _ = ask(alone, number, "alone")
            assert (proof["mode"], proof["exact"], proof["tokens_recomputed"]) == ("disaggregated", is_alike, 0)
            differ += together != expected
    # Logprobs are among what is compared: those of bfloat16 weights are not the same.
    assert differ == (0 if is_alike else 5)


def test_a_node_that_has_no_int8_says_so_in_one_line(model: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pdserve_decode_node.main",
        "--model",
        model,
        "--port",
        "0",
        "--dtype",
        "float32",
        *INT8,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].endswith("no int8 weights here: everything else must be bfloat16")
