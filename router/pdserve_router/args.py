"""The command line of the router."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve_protocol.door import (
    CLUSTER_KEY_VARIABLE,
    DECODE_PORT,
    PREFILL_PORT,
    ROUTER_PORT,
    Address,
    cluster_key,
    parse_address,
)
from pdserve_protocol.errors import AddressError
from pdserve_protocol.timing import DRAIN_TIMEOUT_S, REQUEST_TIMEOUT_S
from pdserve_text.reasoning import REASONING_PARSERS
from pdserve_text.tool_parsers import TOOL_PARSERS

from pdserve_router.errors import ArgumentError
from pdserve_router.parsers import AUTO, NONE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DESCRIPTION = """\
The OpenAI API (chat completions, completions, responses) in front of any number of prefill and decode nodes.

Each request is prefilled on one node and decoded on another; the first token is streamed before the KV has moved.
While prefill nodes are busy decode nodes compute some prompts themselves (--local-prefill).
Without --prefill the decode nodes do both. Nodes may start later, stop and come back at any time.
"""
_EPILOG = """\
examples:
  router --prefill 10.0.0.1 --decode 10.0.0.2 --host 0.0.0.0
  router --prefill host1 host2:7101 --decode host3 host4       two of each, the least busy first
  router --decode 127.0.0.1                                    aggregated serving on one node

SIGTERM or Ctrl-C: running requests finish within --drain-timeout, new ones are answered 503. A second one ends at once.
Also served: /v1/models /tokenize /detokenize /openapi.json /health /ready /metrics /version.
"""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """What the command line said. Times are seconds."""

    prefill: tuple[Address, ...]
    decode: tuple[Address, ...]
    host: str
    port: int
    tokenizer: Path | None
    local_prefill: str = "auto"
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    cluster_key: str | None
    request_timeout_s: float
    drain_timeout_s: float
    log_level: str


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="router", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--version", action="version", version=f"pdserve {version('pdserve')}")
    many = {"nargs": "+", "action": "extend", "default": [], "metavar": "HOST[:PORT]"}
    add("--prefill", help=f"addresses of prefill nodes (default port {PREFILL_PORT})", **many)  # type: ignore[arg-type]
    add("--decode", help=f"addresses of decode nodes (default port {DECODE_PORT})", **many)  # type: ignore[arg-type]
    add("--host", default="127.0.0.1", help="interface to listen on (default: %(default)s; 0.0.0.0 for all)")
    add("--port", type=int, default=ROUTER_PORT, help="port of the API (default: %(default)s; 0 picks a free one)")
    add(
        "--local-prefill",
        default="auto",
        choices=["auto", "never"],
        help="whether a decode node computes a prompt itself where prefill nodes are busy and that starts the answer "
        "earlier (default: %(default)s)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="Hugging Face folder with tokenizer.json, instead of what the nodes hand over",
    )
    add(
        "--tool-call-parser",
        default=AUTO,
        choices=[AUTO, NONE, *TOOL_PARSERS],
        help="format of the model's function calls (default: %(default)s, what its chat template shows)",
    )
    add(
        "--reasoning-parser",
        default=AUTO,
        choices=[AUTO, NONE, *REASONING_PARSERS],
        help="how the model's thinking is told from its answer (default: %(default)s, what its chat template shows)",
    )
    add(
        "--cluster-key",
        metavar="KEY",
        help=f"secret shared by all nodes and routers (default: ${CLUSTER_KEY_VARIABLE}, which ps does not show)",
    )
    add(
        "--request-timeout",
        type=float,
        default=REQUEST_TIMEOUT_S,
        metavar="S",
        help="seconds after which a request is ended with 504 (default: %(default)g)",
    )
    add(
        "--drain-timeout",
        type=float,
        default=DRAIN_TIMEOUT_S,
        metavar="S",
        help="seconds that running requests have to finish when the router is stopped (default: %(default)g)",
    )
    add(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="what goes to stderr (default: %(default)s; info is a line per request)",
    )
    return parser


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> RouterConfig:
    """Configuration from a command line.

    Raises:
        ArgumentError: an address or a number that makes no sense, or no decode node.
        SystemExit: argparse's own, after --help (0) and for unknown flags (2).
    """
    args = build_parser().parse_args(argv)
    if not args.decode:
        raise ArgumentError(
            "--decode is needed: a decode node finishes every request (alone, where --prefill is not given)"
        )
    for flag, value in (("--request-timeout", args.request_timeout), ("--drain-timeout", args.drain_timeout)):
        if not 0 <= value < float("inf") or (flag == "--request-timeout" and value == 0):
            raise ArgumentError(f"{flag} {value:g}: a positive number of seconds is expected")
    if not 0 <= args.port <= 65535:
        raise ArgumentError(f"--port {args.port}: a port is 0 to 65535")
    try:
        prefill = tuple(parse_address(text, PREFILL_PORT) for text in args.prefill)
        decode = tuple(parse_address(text, DECODE_PORT) for text in args.decode)
    except AddressError as error:
        raise ArgumentError(str(error)) from error
    addresses = [*prefill, *decode]
    for address in addresses:
        if addresses.count(address) > 1:
            raise ArgumentError(f"{address} is given more than once")
    return RouterConfig(
        prefill=prefill,
        decode=decode,
        host=args.host,
        port=args.port,
        tokenizer=args.tokenizer,
        local_prefill=args.local_prefill,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        cluster_key=cluster_key(args.cluster_key, environ),
        request_timeout_s=args.request_timeout,
        drain_timeout_s=args.drain_timeout,
        log_level=args.log_level,
    )
