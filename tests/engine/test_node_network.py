"""Off loopback: which nodes may start without being told that the network is to be trusted."""

from __future__ import annotations

import pytest
from pdserve_engine.args import parse_node_args
from pdserve_engine.node import NodeParts, run_node

NOWHERE = "192.0.2.7"
"""An address that no machine has: a node that may listen on it fails when it tries to."""


@pytest.mark.parametrize(
    ("flags", "is_told"),
    [
        (["--kv-connector", "tcp", "--kv-encrypt"], False),
        (["--kv-connector", "nixl,tcp", "--kv-encrypt"], True),
        (["--kv-connector", "tcp"], True),
        (["--kv-connector", "tcp", "--kv-trusted-network"], False),
    ],
)
def test_a_sealed_wire_over_tcp_needs_no_trusted_network(
    flags: list[str], is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", "no such model", "--host", NOWHERE, "--cluster-key", "secret", *flags]
    args = parse_node_args("decode-node", "", default_port=0, max_num_batched_tokens=64, argv=argv)
    assert run_node("decode", args, NodeParts()) == 2
    assert ("--kv-trusted-network" in capsys.readouterr().err) is is_told
