"""A prefill node whose KV writes wait until a file exists: slow_prefill_node.py GATE [prefill-node arguments]."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from pdserve_engine.args import parse_node_args
from pdserve_engine.node import NodeParts, run_node
from pdserve_kv_transfer.slow import slow
from pdserve_prefill_node.policy import RecentSpeed

if __name__ == "__main__":
    gate = Path(sys.argv[1])
    args = parse_node_args(
        "prefill-node", "held back", default_port=7001, max_num_batched_tokens=512, argv=sys.argv[2:]
    )
    wrap = partial(slow, gate=gate.exists)
    sys.exit(run_node("prefill", args, NodeParts(send_policy=RecentSpeed(), wrap_connector=wrap)))
