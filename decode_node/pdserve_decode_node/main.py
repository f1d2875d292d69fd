"""The `decode-node` command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pdserve_engine.args import parse_node_args
from pdserve_engine.node import run_node
from pdserve_protocol.door import DECODE_PORT

from pdserve_decode_node.policy import GrantWhenRoom

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION = """Takes over prompts that a prefill node has computed and generates the rest. Without any prefill node it
computes prompts as well: router --decode HOST"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a decode node until it is told to stop."""
    args = parse_node_args("decode-node", DESCRIPTION, default_port=DECODE_PORT, max_num_batched_tokens=512, argv=argv)
    return run_node("decode", args, receive_policy=GrantWhenRoom())


if __name__ == "__main__":
    sys.exit(main())
