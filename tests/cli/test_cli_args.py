"""Command lines: the flags that exist, what they turn into, and what is refused."""

from __future__ import annotations

import argparse

import pytest
from pdserve_cli.args import build_parser, demo_config, serve_config
from pdserve_cli.commands import DECODE, NODE_READY, PREFILL, ROUTER_READY, FleetConfig, node_commands, router_command
from pdserve_cli.errors import ArgumentError
from pdserve_cli.main import main
from pdserve_protocol.door import cluster_key

# A new flag is a decision: it is added here as well.
FLAGS = {
    "serve": {
        *("--model", "--prefill", "--decode", "--host", "--port", "--served-model-name", "--dtype", "--max-model-len"),
        *("--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--kv-cache-memory", "--cluster-key"),
        "--kv-cache-dtype",
        *("--request-timeout", "--drain-timeout", "--log-level", "--quantization"),
        "--local-prefill",
    },
    "demo": {"--model", "--log-level"},
    "node status": {"--cluster-key", "--timeout", "--json"},
    "node reset-cache": {"--cluster-key", "--timeout"},
}


def _flags(parser: argparse.ArgumentParser, path: str = "") -> dict[str, set[str]]:
    """Long flags of each leaf command."""
    found: dict[str, set[str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                found |= _flags(sub, f"{path} {name}".strip())
        elif path:
            found.setdefault(path, set()).update(o for o in action.option_strings if o.startswith("--"))
    return {name: flags - {"--help"} for name, flags in found.items() if name != "node"}


def test_flags_are_frozen() -> None:
    flags = _flags(build_parser())
    # The commands of bench/ are frozen by its own tests.
    assert {name: own for name, own in flags.items() if not name.startswith("bench")} == FLAGS


@pytest.mark.parametrize("command", ["", *FLAGS, "node"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([*command.split(), "--help"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: pdserve {command}".rstrip())
    assert all(flag in out for flag in FLAGS.get(command, ()))


@pytest.mark.parametrize("command", ["", "serve", "node", "node status", "sing", "demo --port 1"])
def test_incomplete_and_unknown_command_lines_end_with_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(command.split())
    assert exit.value.code == 2
    assert "usage: pdserve" in capsys.readouterr().err


def _serve(*argv: str) -> FleetConfig:
    return serve_config(build_parser().parse_args(["serve", "--model", "M", *argv]))


def test_serve_passes_node_flags_to_every_node_and_the_rest_to_the_router() -> None:
    config = _serve(
        "--prefill", "2", "--max-model-len", "99", "--port", "0", "--request-timeout", "7", "--dtype", "float32"
    )
    nodes = node_commands(config)
    assert [node.name for node in nodes] == ["prefill-node 1", "prefill-node 2", "decode-node"]
    for node in nodes:
        text = " ".join(node.argv)
        assert "--model M" in text
        assert "--max-model-len 99" in text
        assert "--dtype float32" in text
        assert "--port 0" in text
        assert node.cores is not None
        assert f"--threads {len(node.cores)}" in text
        assert "--request-timeout" not in text
        assert "--block-size" not in text  # not given: the node's own default
    router = router_command(config, prefill=["a:1", "b:2"], decode=["c:3"])
    assert (
        "--prefill a:1 b:2 --decode c:3 --host 127.0.0.1 --port 0 --local-prefill auto --request-timeout 7"
        in " ".join(router.argv)
    )
    assert router.cores is None


def test_without_prefill_nodes_the_router_aggregates() -> None:
    config = _serve("--prefill", "0")
    assert [node.name for node in node_commands(config)] == [DECODE]
    assert "--prefill" not in router_command(config, prefill=[], decode=["c:3"]).argv


def test_the_cluster_key_travels_in_the_environment_alone() -> None:
    config = _serve("--cluster-key", "hunter2")
    commands = [*node_commands(config), router_command(config, prefill=["a:1"], decode=["b:1"])]
    for command in commands:
        assert command.env["PDSERVE_CLUSTER_KEY"] == "hunter2"
        assert "hunter2" not in " ".join(command.argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--decode", "0"), "at least one decode node"),
        (("--prefill", "-1"), "at least one decode node"),
        (("--drain-timeout", "-1"), "--drain-timeout -1"),
        (("--drain-timeout", "nan"), "--drain-timeout nan"),
        (("--port", "70000"), "--port 70000"),
    ],
)
def test_numbers_that_make_no_sense(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        _serve(*argv)


def test_demo_uses_the_demo_model_and_free_ports() -> None:
    config = demo_config(build_parser().parse_args(["demo"]))
    assert (config.num_prefill, config.num_decode, config.host, config.port) == (1, 1, "127.0.0.1", 0)
    assert [node.name for node in node_commands(config)] == [PREFILL, DECODE]
    assert "smollm2" in config.node_flags


def test_cluster_key_of_the_node_command() -> None:
    given = build_parser().parse_args(["node", "status", "h", "--cluster-key", "a"]).cluster_key
    not_given = build_parser().parse_args(["node", "status", "h"]).cluster_key
    assert cluster_key(given, {"PDSERVE_CLUSTER_KEY": "b"}) == "a"
    assert cluster_key(not_given, {"PDSERVE_CLUSTER_KEY": "b"}) == "b"
    assert cluster_key(not_given, {"PDSERVE_CLUSTER_KEY": ""}) is None


def test_a_bad_address_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["node", "status", "host:port"])
    assert exit.value.code == 2
    assert capsys.readouterr().err == (
        "pdserve: 'host:port' is not an address: use HOST or HOST:PORT, [HOST]:PORT for IPv6\n"
    )


def test_ready_lines() -> None:
    match = NODE_READY.search("prefill-node ready on [::1]:4711 (model smollm2, 12 KV blocks)")
    assert match is not None
    assert (match["address"], match["what"]) == ("[::1]:4711", "model smollm2, 12 KV blocks")
    url = ROUTER_READY.search("router ready on http://127.0.0.1:8000")
    assert url is not None
    assert url["url"] == "http://127.0.0.1:8000"
