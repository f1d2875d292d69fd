"""Command lines of ``pdserve``: subcommands, flags, and the configurations they give."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import Any

from pdserve_bench.args import add_bench
from pdserve_protocol.door import CLUSTER_KEY_VARIABLE, DECODE_PORT, PREFILL_PORT, ROUTER_PORT
from pdserve_protocol.timing import CONNECT_S, DRAIN_TIMEOUT_S, REQUEST_TIMEOUT_S

from pdserve_cli.commands import FleetConfig
from pdserve_cli.errors import ArgumentError

DEMO_MODEL = "smollm2"
_DEMO_KV_MEMORY = "512MiB"
_DESCRIPTION = """\
Serves language models with the two halves of generation in different processes: a prefill node computes a prompt and
its first token, a decode node receives the prompt's KV cache and generates the rest, a router speaks OpenAI's HTTP API.
"""
_EPILOG = """\
The processes themselves are `prefill-node`, `decode-node` and `router`; use those on several machines:
  prefill-node --model MODEL --host 0.0.0.0 ...          on host1
  decode-node --model MODEL --host 0.0.0.0 ...           on host2
  router --prefill host1 --decode host2 ...              anywhere

Exit codes: 0 done, 1 something failed, 2 the command line cannot work as it is.
"""
_SERVE = """\
Starts prefill nodes, decode nodes and the router on this machine and serves until Ctrl-C or SIGTERM. The cores that
this command may use are split evenly between the nodes; the router shares them. If one process ends by itself, all do.
"""
_SERVE_EPILOG = """\
examples:
  pdserve serve --model smollm2
  pdserve serve --model models/Qwen3-0.6B --prefill 1 --decode 2 --port 8080 --max-model-len 8192
"""
_DEMO = """\
Starts one prefill node, one decode node and the router, streams the answer to a question and the continuation of a
prompt of about 1,000 tokens, shows for both what moved and what it took, and stops all three. Fails if the answer is
wrong, if no KV was moved, or if any token was computed twice.
"""
_NODE = "Asks running nodes how they are, over the same port that routers use."

_COMMON_FLAGS = (
    ("--served-model-name", "NAME", "name that requests ask for (default: the model's own)"),
    ("--dtype", "DTYPE", "bfloat16 (default) or float32"),
    ("--quantization", "NAME", "int8: weights of the layers in 8 bits"),
    ("--max-model-len", "N", "prompt and output tokens of one request at most (default: the model's own limit)"),
    ("--max-num-seqs", "N", "requests that a node runs at the same time"),
    ("--max-num-batched-tokens", "N", "tokens that a node computes in one step; longer prompts go in chunks"),
    ("--block-size", "N", "tokens in a KV block (default: 16)"),
    ("--kv-cache-dtype", "NAME", "int8 or fp8: a KV cache that holds nearly twice the tokens"),
    ("--kv-cache-memory", "SIZE", "memory for KV of each node, as in 512MiB or 4GiB (default: the node's)"),
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdserve", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"pdserve {version('pdserve')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")

    serve = _sub(commands, "serve", "one of each on this machine, until Ctrl-C", _SERVE, _SERVE_EPILOG)
    _add_model(serve, None)
    serve.add_argument(
        "--prefill", type=int, default=1, metavar="N", help="prefill nodes (default: %(default)s; 0: none)"
    )
    serve.add_argument("--decode", type=int, default=1, metavar="N", help="decode nodes (default: %(default)s)")
    serve.add_argument(
        "--host", default="127.0.0.1", help="interface of the router (default: %(default)s); nodes stay on loopback"
    )
    serve.add_argument(
        "--port", type=int, default=ROUTER_PORT, help="port of the router (default: %(default)s; 0 picks one)"
    )
    for flag, metavar, text in _COMMON_FLAGS:
        serve.add_argument(flag, metavar=metavar, help=text)
    serve.add_argument(
        "--local-prefill",
        default="auto",
        choices=["auto", "never"],
        help="whether decode nodes compute prompts while prefill nodes are busy (default: %(default)s)",
    )
    _add_key(serve)
    serve.add_argument(
        "--request-timeout",
        type=float,
        default=REQUEST_TIMEOUT_S,
        metavar="S",
        help="seconds after which a request is ended (default: %(default)g)",
    )
    serve.add_argument(
        "--drain-timeout",
        type=float,
        default=DRAIN_TIMEOUT_S,
        metavar="S",
        help="seconds that running requests have to finish when it is stopped (default: %(default)g)",
    )
    _add_log_level(serve, "info")

    demo = _sub(commands, "demo", "two prompts, and the proof of disaggregation", _DEMO, "")
    _add_model(demo, DEMO_MODEL)
    _add_log_level(demo, "warning")

    add_bench(commands)

    node = _sub(commands, "node", "ask a running node", _NODE, "")
    verbs = node.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    status = _sub(verbs, "status", "blocks, requests, counters, peers", "Prints what nodes tell of themselves.", "")
    _add_addresses(status)
    status.add_argument("--json", action="store_true", help="one line of JSON for each node")
    reset = _sub(
        verbs, "reset-cache", "forget the prefix cache", "Empties prefix caches; exit code 1 if a block was in use.", ""
    )
    _add_addresses(reset)
    return parser


def serve_config(args: argparse.Namespace) -> FleetConfig:
    """What ``pdserve serve`` starts.

    Raises:
        ArgumentError: a number that makes no sense. What the nodes and the router check is left to them.
    """
    if args.prefill < 0 or args.decode < 1:
        raise ArgumentError(f"--prefill {args.prefill} --decode {args.decode}: at least one decode node is needed")
    if not args.drain_timeout >= 0:
        raise ArgumentError(f"--drain-timeout {args.drain_timeout:g}: a number of seconds is expected")
    if not 0 <= args.port <= 65535:
        raise ArgumentError(f"--port {args.port}: a port is 0 to 65535")
    both = ["--drain-timeout", f"{args.drain_timeout:g}", "--log-level", args.log_level]
    node_flags = ["--model", args.model, *both]
    for flag, _, _ in _COMMON_FLAGS:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        node_flags += [flag, value] if value is not None else []
    return FleetConfig(
        num_prefill=args.prefill,
        num_decode=args.decode,
        host=args.host,
        port=args.port,
        node_flags=node_flags,
        router_flags=[
            *("--local-prefill", args.local_prefill),
            *("--request-timeout", f"{args.request_timeout:g}"),
            *both,
        ],
        drain_timeout_s=args.drain_timeout,
        # In the environment, where other users of the machine do not see it.
        env={CLUSTER_KEY_VARIABLE: args.cluster_key} if args.cluster_key else {},
    )


def demo_config(args: argparse.Namespace) -> FleetConfig:
    """What ``pdserve demo`` starts: one of each, on loopback, with a cache just large enough."""
    log_level = ["--log-level", args.log_level]
    return FleetConfig(
        node_flags=["--model", args.model, "--kv-cache-memory", _DEMO_KV_MEMORY, *log_level],
        router_flags=log_level,
        drain_timeout_s=DRAIN_TIMEOUT_S,
    )


def _sub(subparsers: Any, name: str, text: str, description: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=text,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_model(parser: argparse.ArgumentParser, default: str | None) -> None:
    text = "a Hugging Face folder, a GGUF file, or smollm2, the demo model"
    if default is None:
        parser.add_argument("--model", required=True, help=text)
    else:
        parser.add_argument("--model", default=default, help=f"{text} (default: %(default)s)")


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster-key",
        metavar="KEY",
        help=f"secret shared by all nodes and routers (default: ${CLUSTER_KEY_VARIABLE}, which ps does not show)",
    )


def _add_log_level(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--log-level",
        default=default,
        choices=["debug", "info", "warning", "error"],
        help="what the processes log, shown behind their names (default: %(default)s)",
    )


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address",
        nargs="+",
        metavar="HOST[:PORT]",
        help=f"door of a node (default port {PREFILL_PORT}, a prefill node's; a decode node's is {DECODE_PORT})",
    )
    _add_key(parser)
    parser.add_argument(
        "--timeout", type=float, default=CONNECT_S, metavar="S", help="seconds to wait for it (default: %(default)g)"
    )
