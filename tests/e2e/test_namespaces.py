"""Prefill node, decode node and router on three hosts: network namespaces with an address of their own each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from pdserve_protocol.door import Address
from support.clients import Stream, greedy, prompt_of
from support.cluster import Cluster, Process, node_status, wait_for
from support.listening import listening_addresses
from support.models import tiny_model
from support.namespaces import Hosts, NamespacesForbidden

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

KEY = "the key of this cluster"
NODE_ARGS = ["--dtype", "float32", "--kv-cache-memory", "64MiB", "--threads", "1"]
ENV = {"UCX_TLS": "tcp"}
BODIES = [
    *(greedy(prompt_of(seed, length), 30) for seed, length in enumerate([1, 16, 17, 300, 2000])),
    {**greedy(prompt_of(10, 500), 30), "temperature": 1.0, "seed": 7},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return str(tiny_model(folder / "tiny"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(names=("prefill", "decode", "router")))
        except NamespacesForbidden as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"no network namespaces here: {error}")
        yield hosts


@dataclass
class Spread:
    """The three processes, each on its host and at its default port."""

    hosts: Hosts
    prefill: Process
    decode: Process
    router: Process

    def stream(self, body: dict[str, Any], *, stream: bool = True) -> Stream:
        """A completion."""
        return Stream(8000, body, host=self.hosts.address("router"), stream=stream)

    def serves(self) -> bool:
        """Whether a short request is answered over both nodes."""
        with self.stream(greedy([5, 6, 7], 2)) as stream:
            return stream.wait_end().is_whole and stream.proof["transport"] == "nixl"


@pytest.fixture(scope="module")
def spread(hosts: Hosts, model: str, folder: Path) -> Iterator[Spread]:
    env = {**ENV, "PDSERVE_CLUSTER_KEY": KEY}
    with ExitStack() as stack:

        def start(name: str, module: str, *args: str) -> Process:
            command = ["-m", module, "--host", hosts.address(name), *args]
            return stack.enter_context(closing(Process(name, command, folder, env, prefix=hosts.prefix(name))))

        node_args = ["--model", model, "--kv-trusted-network", *NODE_ARGS]
        prefill = start("prefill", "pdserve_prefill_node.main", *node_args)
        decode = start("decode", "pdserve_decode_node.main", *node_args)
        nodes = ["--prefill", hosts.address("prefill"), "--decode", hosts.address("decode")]
        router = start("router", "pdserve_router.main", *nodes)
        for process in (prefill, decode, router):
            process.wait_ready()
        spread = Spread(hosts, prefill, decode, router)
        wait_for(spread.serves, 20, "the router is ready")
        yield spread


def test_the_same_answers_as_on_loopback(spread: Spread, model: str, folder: Path) -> None:
    with Cluster(model=model, folder=folder, node_args=NODE_ARGS, env=ENV) as loopback:
        expected = [loopback.complete(**body)["choices"][0] for body in BODIES]
    hosts = spread.hosts
    sent, received = hosts.bytes_sent("prefill"), hosts.bytes_received("decode")
    bytes_moved = 0
    for body, choice in zip(BODIES, expected, strict=True):
        answer = spread.stream(body, stream=False).wait_end()
        assert answer.is_whole, answer
        assert answer.events[0]["choices"] == [choice]
        proof = answer.proof
        assert proof["prefill_node"] == f"{hosts.address('prefill')}:7001"
        assert proof["decode_node"] == f"{hosts.address('decode')}:7002"
        assert proof["transport"] == "nixl"
        assert proof["tokens_recomputed"] == 0
        assert proof["blocks_moved"] == -(-len(body["prompt"]) // 16)
        bytes_moved += proof["bytes_moved"]
    assert bytes_moved > 1 << 20
    assert hosts.bytes_sent("prefill") - sent >= bytes_moved
    assert hosts.bytes_received("decode") - received >= bytes_moved


def test_nothing_listens_but_at_the_given_address(spread: Spread) -> None:
    for name, process in (("prefill", spread.prefill), ("decode", spread.decode), ("router", spread.router)):
        assert {host for host, _ in listening_addresses(process.pid)} == {spread.hosts.address(name)}, name


def test_a_wrong_cluster_key_gets_no_answer(spread: Spread) -> None:
    address = f"{spread.hosts.address('prefill')}:7001"

    def status(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pdserve_cli.main", "node", "status", address, *words]
        prefix = spread.hosts.prefix("router")
        return subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=60, check=False)

    assert address in status("--cluster-key", KEY).stdout
    for words in (["--cluster-key", "another"], []):
        refused = status("--timeout", "1.5", *words)
        assert refused.returncode != 0
        assert "no answer" in refused.stderr
        assert refused.stdout == ""
    assert spread.serves()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--kv-trusted-network"], "--cluster-key"),
        (["--insecure"], "--kv-trusted-network"),
        (["--cluster-key", "secret", "--kv-encrypt"], "--kv-trusted-network"),
    ],
    ids=["no key", "no trust", "sealed, but UCX lets anybody in"],
)
def test_a_node_off_loopback_is_not_opened_by_accident(hosts: Hosts, model: str, args: list[str], named: str) -> None:
    command = [sys.executable, "-m", "pdserve_decode_node.main", "--model", model, "--port", "0", *NODE_ARGS]
    done = subprocess.run(
        [*hosts.prefix("decode"), *command, "--host", hosts.address("decode"), *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert named in done.stderr


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_network_that_is_gone_for_a_while(spread: Spread, name: str) -> None:
    keys = {"cluster_key": KEY}
    doors = {host: Address(spread.hosts.address(host), port) for host, port in (("prefill", 7001), ("decode", 7002))}

    def is_idle(host: str) -> bool:
        load = node_status(doors[host], **keys).load
        return load.running == load.waiting == load.handoffs == 0 == load.blocks_held == load.blocks_in_use

    text = spread.stream(BODIES[3]).wait_end().text
    with ExitStack() as stack:
        generating = [stack.enter_context(spread.stream(greedy(prompt_of(20 + n, 50), 4000))) for n in range(2)]
        for stream in generating:
            stream.wait_tokens(3)
        since = time.monotonic()
        spread.hosts.unplug(name)
        try:
            # One more, for which a hand-off begins and does not come to its end.
            late = stack.enter_context(spread.stream(greedy(prompt_of(22, 2000), 4)))
            late.wait_end(since + 6 - time.monotonic())
            if name == "decode":
                # Unless the prefill node, which decodes on while it holds, could do all of it.
                assert late.is_whole or late.error is not None
                for stream in generating:
                    stream.wait_end(since + 6 - time.monotonic())
                    assert stream.error is not None, stream
            other = "prefill" if name == "decode" else "decode"
            for stream in generating:
                stream.close()
            wait_for(lambda: is_idle(other), 6, "the other node holds nothing")
        finally:
            spread.hosts.plug(name)
    wait_for(spread.serves, 15, "both serve again")
    wait_for(
        lambda: is_idle("prefill") and is_idle("decode"),
        6,
        "nothing is left",
        lambda: str([node_status(door, **keys).load for door in doors.values()]),
    )
    assert spread.stream({**BODIES[3], "cache_salt": name}).wait_end().text == text
