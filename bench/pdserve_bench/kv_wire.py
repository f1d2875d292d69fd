"""What a lossy wire does to a model's choices: ``python -m pdserve_bench.kv_wire``.

For each prompt the model continues greedily on its own KV. Then the prompt's KV goes over the wire into other blocks,
and the model is given the same continuation on them: how often is its most probable token the same? The control is the
same on blocks that went over the wire as they are cached: always.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from pdserve_engine import kv_memory
from pdserve_engine.models.config import read_config
from pdserve_engine.models.decoder import Decoder
from pdserve_engine.weights import load_weights, resolve_model
from pdserve_engine.worker import block_layout
from pdserve_kernels.interface import AttentionMetadata
from pdserve_kernels.select import select_backend
from pdserve_kv_transfer.codec import Lander, Packer
from pdserve_kv_transfer.wire import NUMBERS, Wire
from pdserve_text.files import load_tokenizer_files
from pdserve_text.tokenizer import Tokenizer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over ``num_tokens`` continued tokens of all prompts."""

    wire: str
    num_tokens: int
    num_equal: int
    bytes_ratio: float

    @property
    def share(self) -> float:
        return self.num_equal / self.num_tokens


class _Model:
    """A decoder with a small cache: room for one sequence, and a second time for what came over a wire."""

    def __init__(self, folder: Path, num_tokens: int, num_threads: int) -> None:
        config = read_config(folder)
        backend = select_backend("auto")
        backend.set_threads(num_threads)
        self._decoder = Decoder(config, load_weights(folder, torch.bfloat16), backend, num_tokens)
        self.layout = block_layout(config, BLOCK, "bfloat16", backend.kv_order)
        self.num_blocks = -(-num_tokens // BLOCK)
        self.kv_bytes = kv_memory.allocate(2 * self.num_blocks, self.layout)
        self._kv_cache = kv_memory.as_tensor(torch.from_numpy(self.kv_bytes), self.layout)

    def argmax(self, token_ids: Sequence[int], start: int, first_block: int, *, all_rows: bool = True) -> list[int]:
        """The most probable next token after each of ``token_ids``, the first of which is at position ``start``.

        Their KV is written to the blocks from ``first_block`` on, where that of all before them lies.
        """
        count = len(token_ids)
        table = torch.arange(first_block, first_block + self.num_blocks, dtype=torch.int32)
        positions = torch.arange(start, start + count, dtype=torch.int32)
        metadata = AttentionMetadata(
            positions_T=positions,
            slots_T=table[positions // BLOCK] * BLOCK + positions % BLOCK,
            query_start_R1=torch.tensor([0, count], dtype=torch.int32),
            seq_lens_R=torch.tensor([start + count], dtype=torch.int32),
            block_tables_RP=table.unsqueeze(0),
            query_lens=[count],
            seq_lens=[start + count],
        )
        rows = torch.arange(0 if all_rows else count - 1, count)
        tokens = torch.tensor(token_ids, dtype=torch.int32)
        logits_NV = self._decoder.forward(tokens, metadata, self._kv_cache, rows)
        return [int(token_id) for token_id in logits_NV.argmax(dim=-1)]


def prompts_of(folder: Path, count: int, length: int) -> list[list[int]]:
    """English text at hand everywhere, the reference of the Python language, cut into prompts."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    token_ids = Tokenizer.from_files(load_tokenizer_files(folder)).encode(text, add_special_tokens=False)
    step = max(1, (len(token_ids) - length) // count)
    return [token_ids[start : start + length] for start in range(0, count * step, step)]


def agreement(
    folder: Path,
    wire_dtypes: Sequence[str],
    *,
    num_prompts: int,
    prompt_len: int,
    output_len: int,
    num_threads: int = 1,
) -> list[Agreement]:
    """One for each of ``wire_dtypes``."""
    model = _Model(folder, prompt_len + output_len, num_threads)
    wires = [
        Wire(model.layout, model.layout, NUMBERS[dtype], digest="xxh3-128", sealed=False, context=b"")
        for dtype in wire_dtypes
    ]
    equal = [0] * len(wires)
    prompts = prompts_of(folder, num_prompts, prompt_len)
    for prompt in tqdm(prompts, unit="prompt", disable=None):
        continued = model.argmax(prompt, 0, 0, all_rows=False)
        while len(continued) < output_len:
            continued += model.argmax(continued[-1:], prompt_len + len(continued) - 1, 0)
        for index, wire in enumerate(wires):
            _carry(model, wire, -(-prompt_len // BLOCK))
            # The first token was sampled before anything travelled.
            chosen = model.argmax(continued[:-1], prompt_len, model.num_blocks)
            equal[index] += int(np.sum(np.array(chosen) == np.array(continued[1:])))
    num_tokens = len(prompts) * (output_len - 1)
    return [
        Agreement(wire.name, num_tokens, num_equal, wire.slot_bytes / model.layout.block_bytes)
        for wire, num_equal in zip(wires, equal, strict=True)
    ]


def _carry(model: _Model, wire: Wire, num_blocks: int) -> None:
    """The prompt's blocks over the wire, into the second half of the cache."""
    packer, lander = Packer(model.kv_bytes, wire), Lander(model.kv_bytes, wire)
    staging_B = np.empty(wire.slot_bytes, dtype=np.uint8)
    for block in range(num_blocks):
        tag = packer.pack(block, "", block, staging_B if packer.is_staged else None)
        slot_B = staging_B if packer.is_staged else model.kv_bytes[block]
        if not lander.land(slot_B, tag, "", block, model.num_blocks + block):
            raise RuntimeError("a block that went nowhere does not match its digest")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pdserve_bench.kv_wire", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    found = agreement(
        resolve_model(args.model),
        ["bfloat16", "int8", "fp8"],
        num_prompts=args.num_prompts,
        prompt_len=args.input_len,
        output_len=args.output_len,
        num_threads=args.threads,
    )
    table = Table("wire", "bytes / bfloat16", "tokens", "same argmax", "share")
    for one in found:
        table.add_row(
            one.wire, f"{one.bytes_ratio:.3f}", str(one.num_tokens), str(one.num_equal), f"{100 * one.share:.2f} %"
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
