"""The `prefill-node` command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pdserve_engine.args import parse_node_args
from pdserve_engine.node import NodeParts, run_node
from pdserve_protocol.door import PREFILL_PORT

from pdserve_prefill_node.policy import RecentSpeed

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION = """Computes prompts and first tokens and ships the KV blocks to the decode node that the router names.
Start at least one, start a decode-node, then: router --prefill HOST --decode HOST"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a prefill node until it is told to stop."""
    args = parse_node_args(
        "prefill-node", DESCRIPTION, default_port=PREFILL_PORT, max_num_batched_tokens=512, argv=argv
    )
    return run_node("prefill", args, NodeParts(send_policy=RecentSpeed()))


if __name__ == "__main__":
    sys.exit(main())
