"""The `decode-node` command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pdserve_engine.args import milliseconds, parse_node_args
from pdserve_engine.node import NodeParts, run_node
from pdserve_protocol.door import DECODE_PORT

from pdserve_decode_node.policy import GrantWhenRoom

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Sequence

DESCRIPTION = """Takes over prompts that a prefill node has computed and generates the rest. Without any prefill node it
computes prompts as well: router --decode HOST"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a decode node until it is told to stop."""
    args = parse_node_args(
        "decode-node",
        DESCRIPTION,
        default_port=DECODE_PORT,
        max_num_batched_tokens=512,
        argv=argv,
        add_own=add_decode_flags,
    )
    parts = NodeParts(receive_policy=GrantWhenRoom(args.grant_policy), itl_target_s=args.itl_target_ms / 1000 or None)
    return run_node("decode", args, parts)


def add_decode_flags(parser: ArgumentParser) -> None:
    """The flags that a decode node alone has."""
    group = parser.add_argument_group("hand-off")
    group.add_argument(
        "--grant-policy",
        choices=["offer", "dispatch", "finished"],
        default="offer",
        help="when KV blocks are reserved for a prompt: when it is next on its prefill node, when its request arrives "
        "here, or when it is computed; the others are there to be compared with (default: %(default)s)",
    )
    parser.add_argument(
        "--itl-target-ms",
        type=milliseconds,
        default=50.0,
        metavar="MS",
        help="prompts computed here are cut so that streams beside them wait about so long for a token; 0 does not "
        "limit (default: %(default)g)",
    )


if __name__ == "__main__":
    sys.exit(main())
