"""oracle_node.py prefill|decode [arguments]: a node whose KV entries say what they must be, and which has no model.

The model's folder has to have a tokenizer; its end ids are those of the oracle. Everything else is an ordinary node's.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pdserve_decode_node.policy import GrantWhenRoom
from pdserve_engine import kv_memory
from pdserve_engine.args import parse_node_args
from pdserve_engine.node import NodeParts, run_node
from pdserve_engine.oracle import OracleWorker, oracle_layout
from pdserve_prefill_node.policy import RecentSpeed
from pdserve_text.files import load_tokenizer_files
from pdserve_text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_engine.config import EngineConfig


def oracle_worker(config: EngineConfig) -> OracleWorker:
    tokenizer = Tokenizer.from_files(load_tokenizer_files(config.model.path))
    block_size = config.cache.block_size
    return OracleWorker(
        kv_memory.num_blocks(config.cache, oracle_layout(block_size)),
        block_size,
        tokenizer.vocab_size,
        max_model_len=config.model.max_model_len or 4096,
        end_token_ids=sorted(tokenizer.end_token_ids),
    )


def main(role: str, argv: Sequence[str]) -> int:
    args = parse_node_args(f"{role}-node", "oracle", default_port=0, max_num_batched_tokens=512, argv=argv)
    if role == "prefill":
        return run_node("prefill", args, NodeParts(send_policy=RecentSpeed(), make_worker=oracle_worker))
    return run_node("decode", args, NodeParts(receive_policy=GrantWhenRoom(), make_worker=oracle_worker))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
