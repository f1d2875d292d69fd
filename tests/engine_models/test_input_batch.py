"""A step of decodes that is moved on from the one before is the step that is gathered anew."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from pdserve_engine.errors import ContractBroken
from pdserve_engine.input_batch import InputBatch
from pdserve_engine.sampler import SamplerState
from pdserve_kernels.interface import AttentionMetadata
from pdserve_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 4
LENS = {"a": 3, "b": 7, "c": 8, "d": 1}
"""Tokens at the start; three of them reach a border of blocks at different steps."""


def make_batch() -> InputBatch:
    batch = InputBatch(max_num_seqs=8, max_num_tokens=64, max_model_len=40, block_size=BLOCK)
    random = Random(1)
    for number, (req_id, length) in enumerate(LENS.items()):
        tokens = [random.randrange(1000) for _ in range(length)]
        state = SamplerState(SamplingParams(), tokens, length, choice=0, vocab_size=1000, end_token_ids=[])
        batch.add(req_id, tokens, [10 * number + block for block in range(-(-length // BLOCK))], state)
    return batch


def decode(batch: InputBatch, lens: dict[str, int]) -> tuple[list[int], AttentionMetadata, list[int]]:
    """A step for the last token of each request."""
    req_ids = list(lens)
    tokens_T, metadata, sampling = batch.make_step(req_ids, [n - 1 for n in lens.values()], [1] * len(req_ids))
    return tokens_T.tolist(), metadata, sampling.tolist()


def grow(batch: InputBatch, req_ids: Sequence[str], lens: dict[str, int], token_id: int) -> None:
    batch.append_sampled(req_ids, [token_id + index for index in range(len(req_ids))])
    for number, req_id in enumerate(LENS):
        if req_id in req_ids and lens[req_id] % BLOCK == 0:
            batch.append_blocks(req_id, [10 * number + lens[req_id] // BLOCK])


def forget_the_last_step(batch: InputBatch) -> None:
    state = SamplerState(SamplingParams(), [1], 1, choice=0, vocab_size=1000, end_token_ids=[])
    batch.add("other", [1], [99], state)
    batch.remove("other")


def test_steps_over_the_borders_of_blocks() -> None:
    moved, gathered = make_batch(), make_batch()
    lens = dict(LENS)
    for step in range(24):
        ours, theirs = decode(moved, lens), decode(gathered, lens)
        assert ours[0] == theirs[0], "tokens"
        assert ours[2] == theirs[2] == list(range(len(lens))), "all sample"
        for field in fields(AttentionMetadata):
            found, wanted = (getattr(metadata, field.name) for _, metadata, _ in (ours, theirs))
            if field.name == "block_tables_RP":
                assert found.shape == wanted.shape
                for row, length in enumerate(lens.values()):
                    num_blocks = -(-length // BLOCK)
                    assert torch.equal(found[row, :num_blocks], wanted[row, :num_blocks]), (step, row)
            elif isinstance(found, torch.Tensor):
                assert torch.equal(found, wanted), (step, field.name)
            else:
                assert found == wanted, (step, field.name)
        for batch in (moved, gathered):
            grow(batch, list(lens), lens, 100 * step)
        forget_the_last_step(gathered)
        lens = {req_id: length + 1 for req_id, length in lens.items()}


def test_tokens_of_some_requests_of_a_step_are_theirs() -> None:
    batch = make_batch()
    decode(batch, LENS)
    batch.append_sampled(["c", "a"], [501, 502])
    assert batch.token_ids("a", 3, 4) == [502]
    assert batch.token_ids("c", 8, 9) == [501]


def test_a_step_beyond_the_blocks_is_refused_also_when_moved_on() -> None:
    batch, lens = make_batch(), dict(LENS)
    decode(batch, lens)
    batch.append_sampled(list(lens), [1, 2, 3, 4])
    with pytest.raises(ContractBroken, match="tokens 8 to 9 are to be computed, but it has 9 tokens and 2 blocks"):
        decode(batch, {req_id: length + 1 for req_id, length in lens.items()})
