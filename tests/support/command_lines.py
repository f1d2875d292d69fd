"""Reads a command line of ours with the parser of the command that it calls, without running the command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve_cli.args import build_parser
from pdserve_decode_node.main import add_decode_flags
from pdserve_engine.args import parse_node_args
from pdserve_protocol.door import DECODE_PORT, PREFILL_PORT
from pdserve_router.args import parse_args as parse_router_args

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = ("prefill-node", "decode-node", "router", "pdserve")


def parse_command(words: Sequence[str]) -> Any:
    """What the command would see.

    Raises:
        SystemExit: its parser refuses.
        ValueError: it is no command of ours.
    """
    program, *argv = words
    match program:
        case "prefill-node" | "decode-node":
            decodes = program == "decode-node"
            return parse_node_args(
                program,
                "",
                default_port=DECODE_PORT if decodes else PREFILL_PORT,
                max_num_batched_tokens=1,
                argv=argv,
                add_own=add_decode_flags if decodes else lambda parser: None,
            )
        case "router":
            return parse_router_args(argv, {})
        case "pdserve":
            return build_parser().parse_args(argv)
    raise ValueError(f"{program} is no command of ours")
