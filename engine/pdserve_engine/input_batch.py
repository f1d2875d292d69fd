"""What the model runner remembers of each request, and the flat tensors of a step that it makes of that.

A request's tokens and block ids live in one row of two tables from its first step to its last; a step only copies what
it needs of them into buffers that were allocated at the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from pdserve_kernels.interface import AttentionMetadata

from pdserve_engine.errors import ContractBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_engine.sampler import SamplerState


@dataclass(slots=True)
class CachedRequest:
    """``row``: of the tables. ``num_tokens``: known tokens, prompt and output."""

    req_id: str
    row: int
    num_tokens: int
    num_blocks: int
    sampler_state: SamplerState


class _Buffer:
    """An int32 array and the tensor that shares its memory."""

    def __init__(self, *shape: int) -> None:
        self.array = np.zeros(shape, dtype=np.int32)
        self.tensor = torch.from_numpy(self.array)


class InputBatch:
    """Rows of requests, and the buffers of a step.

    Args:
        max_num_seqs: requests known at the same time.
        max_num_tokens: tokens of one step.
        max_model_len: tokens of one request.
    """

    def __init__(self, *, max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        # One token more: the last step of a full request samples a token that nobody will compute.
        max_num_blocks = -(-(max_model_len + 1) // block_size)
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._block_ids = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._requests: dict[str, CachedRequest] = {}
        self._step_tokens = _Buffer(max_num_tokens)
        self._step_positions = _Buffer(max_num_tokens)
        self._step_slots = _Buffer(max_num_tokens)
        self._step_query_start = _Buffer(max_num_seqs + 1)
        self._step_seq_lens = _Buffer(max_num_seqs)
        self._step_block_ids = _Buffer(max_num_seqs, max_num_blocks)
        self._positions = np.arange(max_model_len, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, req_id: str, token_ids: Sequence[int], block_ids: Sequence[int], sampler_state: SamplerState) -> None:
        """Takes in a request that is not known."""
        if req_id in self._requests:
            raise ContractBroken(req_id, "it is announced as new, but is known")
        if not self._free_rows:
            raise ContractBroken(req_id, f"{len(self._requests)} requests are known already, and no more fit")
        self._requests[req_id] = CachedRequest(req_id, self._free_rows.pop(), 0, 0, sampler_state)
        self.append_tokens(req_id, token_ids)
        self.append_blocks(req_id, block_ids)

    def remove(self, req_id: str) -> None:
        """Forgets a request; does nothing if it is not known, since it may have ended before its first step."""
        request = self._requests.pop(req_id, None)
        if request is not None:
            self._free_rows.append(request.row)

    def get(self, req_id: str) -> CachedRequest:
        request = self._requests.get(req_id)
        if request is None:
            raise ContractBroken(req_id, "it is not known")
        return request

    def append_tokens(self, req_id: str, token_ids: Sequence[int]) -> None:
        request = self.get(req_id)
        end = request.num_tokens + len(token_ids)
        if end > self._token_ids.shape[1]:
            raise ContractBroken(req_id, f"it has {end} tokens, more than a request may have")
        self._token_ids[request.row, request.num_tokens : end] = token_ids
        request.num_tokens = end

    def append_blocks(self, req_id: str, block_ids: Sequence[int]) -> None:
        request = self.get(req_id)
        end = request.num_blocks + len(block_ids)
        if end > self._block_ids.shape[1]:
            raise ContractBroken(req_id, f"it has {end} blocks, more than a request may have")
        self._block_ids[request.row, request.num_blocks : end] = block_ids
        request.num_blocks = end

    def make_step(self, spans: Sequence[tuple[CachedRequest, int, int]]) -> tuple[torch.Tensor, AttentionMetadata]:
        """Token ids [T] and metadata of a step that computes tokens [start, end) of each request, in this order.

        The tensors share the buffers: they are valid until the next call.
        """
        block_size = self._block_size
        total = 0
        for index, (request, start, end) in enumerate(spans):
            if not (0 <= start < end <= request.num_tokens and end <= request.num_blocks * block_size):
                have = f"{request.num_tokens} tokens and {request.num_blocks} blocks"
                raise ContractBroken(request.req_id, f"tokens {start} to {end} are to be computed, but it has {have}")
            positions = self._positions[start:end]
            blocks = self._block_ids[request.row]
            stop = total + end - start
            self._step_tokens.array[total:stop] = self._token_ids[request.row, start:end]
            self._step_positions.array[total:stop] = positions
            self._step_slots.array[total:stop] = blocks[positions // block_size] * block_size + positions % block_size
            self._step_query_start.array[index + 1] = stop
            self._step_seq_lens.array[index] = end
            num_blocks = -(-end // block_size)
            self._step_block_ids.array[index, :num_blocks] = blocks[:num_blocks]
            total = stop
        num = len(spans)
        seq_lens = [end for _, _, end in spans]
        max_blocks = -(-max(seq_lens) // block_size)
        return self._step_tokens.tensor[:total], AttentionMetadata(
            positions_T=self._step_positions.tensor[:total],
            slots_T=self._step_slots.tensor[:total],
            query_start_R1=self._step_query_start.tensor[: num + 1],
            seq_lens_R=self._step_seq_lens.tensor[:num],
            block_tables_RP=self._step_block_ids.tensor[:num, :max_blocks],
            query_lens=[end - start for _, start, end in spans],
            seq_lens=seq_lens,
        )
