"""Prefill and decode nodes that cache KV differently, or send it differently, and what their answers say of it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from support.cluster import Cluster, port_of
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

KEY = {"PDSERVE_CLUSTER_KEY": "a secret"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return [3 + (7 * i * i + 11 * i + 13 * seed) % 500 for i in range(length)]


@contextmanager
def unlike(
    model: str,
    folder: Path,
    *,
    prefill: list[str] | None = None,
    decode: list[str] | None = None,
    both: list[str] | None = None,
    env: dict[str, str] | None = None,
) -> Iterator[tuple[Cluster, Cluster]]:
    """Two routers: one in front of both nodes, one in front of the decode node alone."""
    common = ["--dtype", "float32", "--kv-cache-memory", "4MiB", *(both or [])]
    with Cluster(
        model=model,
        folder=folder,
        node_args=common,
        prefill_args=prefill or [],
        decode_args=decode or [],
        env=env or {},
    ) as pair:
        alone = Cluster(model=model, folder=folder, num_prefill=0, env=env or {})
        with closing(alone.start_router([port_of(pair.decode[0].ready_line)], 0)) as alone.router:
            alone.port = port_of(alone.router.wait_ready())
            alone.wait_until_ready()
            yield pair, alone


def ask(cluster: Cluster, token_ids: list[int], **parameters: Any) -> tuple[list[str], dict[str, Any]]:
    """The texts of the tokens, and the proof."""
    answer = cluster.complete(token_ids, max_tokens=6, ignore_eos=True, logprobs=0, **parameters)
    return answer["choices"][0]["logprobs"]["tokens"], answer["pdserve"]


@pytest.mark.parametrize(
    ("sizes", "both", "env"),
    [
        ((16, 32), ["--kv-connector", "tcp", "--kv-encrypt"], KEY),
        ((32, 16), ["--kv-connector", "nixl"], {}),
    ],
    ids=["16 to 32, sealed, tcp", "32 to 16, nixl"],
)
def test_block_sizes_may_differ(
    model: str, tmp_path: Path, sizes: tuple[int, int], both: list[str], env: dict[str, str]
) -> None:
    # B09
    source, target = (["--block-size", str(size)] for size in sizes)
    with unlike(model, tmp_path, prefill=source, decode=target, both=both, env=env) as (pair, alone):
        for length in (1, 15, 16, 17, 31, 32, 33, 100):
            expected, _ = ask(alone, prompt(length), cache_salt="alone")
            tokens, proof = ask(pair, prompt(length), cache_salt=f"{length}")
            assert tokens == expected, length
            assert (proof["mode"], proof["exact"], proof["tokens_recomputed"]) == ("disaggregated", True, 0)
            assert proof["blocks_moved"] == -(-length // sizes[0])
        # The decode node caches the beginning: what it shares with others is neither sent nor written.
        longer = prompt(100) + prompt(30, seed=1)
        expected, _ = ask(alone, longer, cache_salt="alone")
        tokens, proof = ask(pair, longer, cache_salt="100")
        assert tokens == expected
        cached = 100 // sizes[1] * sizes[1]
        assert proof["blocks_moved"] == -(-130 // sizes[0]) - cached // sizes[0]
        assert proof["tokens_recomputed"] == 0
        assert ask(pair, prompt(100), cache_salt="100")[0] == ask(alone, prompt(100), cache_salt="alone")[0]


def test_a_lossy_wire_says_so_and_its_blocks_serve_nobody_else(model: str, tmp_path: Path) -> None:
    with unlike(model, tmp_path, both=["--kv-wire-dtype", "int8"]) as (pair, alone):
        expected, _ = ask(alone, prompt(64))
        _, proof = ask(pair, prompt(64))
        # The decode node has these blocks in its cache, but exact ones: those of the wire are others.
        assert (proof["mode"], proof["exact"], proof["blocks_moved"]) == ("disaggregated", False, 4)
        # A row of 16 float32 numbers becomes 16 bytes and a scale.
        assert proof["bytes_moved"] == 4 * 8192 * (16 + 4) // (4 * 16)
        _, again = ask(pair, prompt(64))
        assert again["blocks_moved"] == 0
        assert ask(alone, prompt(64))[0] == expected
        _, other = ask(pair, prompt(64, seed=2))
        assert other["blocks_moved"] == 4
        tokens, proof = ask(alone, prompt(64, seed=2))
        assert proof["cached_tokens"]["decode"] == 0, "lossy blocks are found as exact ones"
        assert tokens == ask(alone, prompt(64, seed=2), cache_salt="fresh")[0]


def test_dtypes_may_differ(model: str, tmp_path: Path) -> None:
    both = ["--dtype", "bfloat16"]
    with unlike(model, tmp_path, decode=["--kv-cache-dtype", "int8"], both=both) as (pair, _):
        _, proof = ask(pair, prompt(33))
        assert (proof["mode"], proof["exact"], proof["blocks_moved"]) == ("disaggregated", False, 3)
        assert proof["tokens_recomputed"] == 0


def test_a_cache_of_codes_on_both_sides(model: str, tmp_path: Path) -> None:
    """The decode node alone says what the pair says, token for token; blocks travel as they are, here between sizes."""
    both = ["--dtype", "bfloat16", "--kv-cache-dtype", "int8", "--kv-connector", "tcp", "--kv-encrypt"]
    with unlike(model, tmp_path, prefill=["--block-size", "32"], both=both, env=KEY) as (pair, alone):
        for length in (1, 33, 100):
            expected, _ = ask(alone, prompt(length), cache_salt="alone")
            tokens, proof = ask(pair, prompt(length), cache_salt=f"{length}")
            assert tokens == expected
            assert (proof["mode"], proof["exact"], proof["tokens_recomputed"]) == ("disaggregated", True, 0)
            # Of 32 tokens, 2 layers, 2 heads, K and V: 16 codes and a scale.
            assert proof["bytes_moved"] == proof["blocks_moved"] * 32 * 2 * 2 * 2 * (16 + 4)


def test_a_seal_takes_a_cluster_key(model: str) -> None:
    command = [sys.executable, "-m", "pdserve_decode_node.main", "--model", model, "--port", "0", "--kv-encrypt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PATH": ""}, check=False)
    assert done.returncode == 2
    assert "--cluster-key" in done.stderr
