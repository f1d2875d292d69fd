"""What the model runner remembers of each request, and the flat tensors of a step that it makes of that.

A request's tokens and block ids live in one row of two tables from its first step to its last. A step gathers what it
needs of them into buffers that were allocated at the start, in a few array operations over all its requests. Where it
computes the next token of each request of the step before, as most steps do, the buffers are only moved on by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from pdserve_kernels.interface import AttentionMetadata

from pdserve_engine.errors import ContractBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pdserve_engine.sampler import SamplerState

    Ints = npt.NDArray[np.int32]


class _Buffer:
    """An int32 array and the tensor that shares its memory."""

    def __init__(self, *shape: int) -> None:
        self.array = np.zeros(shape, dtype=np.int32)
        self.tensor = torch.from_numpy(self.array)


@dataclass(slots=True)
class _LastStep:
    """What is in the buffers. ``is_decode``: one token for each request."""

    req_ids: Sequence[str]
    rows_R: npt.NDArray[np.intp]
    is_decode: bool
    token_ids_T: torch.Tensor
    metadata: AttentionMetadata


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
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self._sampler_states: list[SamplerState | None] = [None] * max_num_seqs
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._step_tokens = _Buffer(max_num_tokens)
        self._step_positions = _Buffer(max_num_tokens)
        self._step_slots = _Buffer(max_num_tokens)
        self._step_query_start = _Buffer(max_num_seqs + 1)
        self._step_seq_lens = _Buffer(max_num_seqs)
        self._step_block_ids = _Buffer(max_num_seqs, max_num_blocks)
        self._last: _LastStep | None = None
        self._tables_changed = False
        self._indexes = np.arange(max_num_tokens, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, req_id: str, token_ids: Sequence[int], block_ids: Sequence[int], sampler_state: SamplerState) -> None:
        """Takes in a request that is not known."""
        if req_id in self._rows:
            raise ContractBroken(req_id, "it is announced as new, but is known")
        if not self._free_rows:
            raise ContractBroken(req_id, f"{len(self._rows)} requests are known already, and no more fit")
        row = self._rows[req_id] = self._free_rows.pop()
        self._num_tokens[row] = self._num_blocks[row] = 0
        self._sampler_states[row] = sampler_state
        self.append_tokens(req_id, token_ids)
        self.append_blocks(req_id, block_ids)

    def remove(self, req_id: str) -> None:
        """Forgets a request; does nothing if it is not known, since it may have ended before its first step."""
        row = self._rows.pop(req_id, None)
        if row is not None:
            self._sampler_states[row] = None
            self._free_rows.append(row)
            # Its row may be given to another request of the same name.
            self._last = None

    def token_ids(self, req_id: str, start: int, stop: int) -> list[int]:
        """Known tokens at positions ``start`` to ``stop``."""
        return self._token_ids[self._row(req_id), start:stop].tolist()  # type: ignore[no-any-return]

    def append_tokens(self, req_id: str, token_ids: Sequence[int]) -> None:
        """Tokens that were not sampled here."""
        row = self._row(req_id)
        start = self._num_tokens[row]
        end = start + len(token_ids)
        if end > self._token_ids.shape[1]:
            raise ContractBroken(req_id, f"it has {end} tokens, more than a request may have")
        self._token_ids[row, start:end] = token_ids
        self._num_tokens[row] = end

    def append_blocks(self, req_id: str, block_ids: Sequence[int]) -> None:
        row = self._row(req_id)
        start = self._num_blocks[row]
        end = start + len(block_ids)
        if end > self._block_ids.shape[1]:
            raise ContractBroken(req_id, f"it has {end} blocks, more than a request may have")
        self._block_ids[row, start:end] = block_ids
        self._num_blocks[row] = end
        self._tables_changed = True

    def sampler_states(self, req_ids: Sequence[str]) -> list[SamplerState]:
        """Of known requests."""
        return [self._sampler_states[self._rows[req_id]] for req_id in req_ids]  # type: ignore[misc]

    def append_sampled(self, req_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """One token for each of several requests of the last step, all of whose tokens are computed."""
        if self._last is not None and self._last.req_ids is req_ids:
            rows = self._last.rows_R
        else:
            rows = np.array([self._rows[req_id] for req_id in req_ids], dtype=np.intp)
        num_tokens = self._num_tokens[rows]
        self._token_ids[rows, num_tokens] = token_ids
        self._num_tokens[rows] = num_tokens + 1

    def make_step(
        self, req_ids: Sequence[str], starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[torch.Tensor, AttentionMetadata, npt.NDArray[np.intp]]:
        """Inputs of a step that computes ``counts`` tokens of each request from ``starts`` on, in this order.

        The tensors share the buffers: they are valid until the next call.

        Returns:
            Token ids [T]; where they belong; the indexes in ``req_ids`` of those whose last known token is computed.

        Raises:
            ContractBroken
        """
        last, self._last = self._last, None
        is_decode = max(counts) == 1
        if last and last.is_decode and is_decode and last.req_ids == req_ids and last.metadata.seq_lens == starts:
            self._move_on(req_ids, last.rows_R)
            last.req_ids, last.metadata = req_ids, self._moved(last.metadata)
            self._last = last
            return last.token_ids_T, last.metadata, self._sampling(last.rows_R)
        rows_R = np.array([self._row(req_id) for req_id in req_ids], dtype=np.intp)
        total = self._gather(req_ids, rows_R, np.array(starts, dtype=np.int32), np.array(counts, dtype=np.int32))
        metadata = self._metadata(len(starts), total, list(counts))
        self._last = _LastStep(req_ids, rows_R, is_decode, self._step_tokens.tensor[:total], metadata)
        return self._last.token_ids_T, metadata, self._sampling(rows_R)

    def _gather(self, req_ids: Sequence[str], rows_R: npt.NDArray[np.intp], start_R: Ints, count_R: Ints) -> int:
        """Fills the buffers; returns how many tokens the step has."""
        block_size, num = self._block_size, len(rows_R)
        end_R = start_R + count_R
        self._check(req_ids, rows_R, start_R, end_R)
        query_start_R1 = self._step_query_start.array[: num + 1]
        np.cumsum(count_R, out=query_start_R1[1:])
        total = int(query_start_R1[num])
        self._step_seq_lens.array[:num] = end_R
        row_T = np.repeat(rows_R, count_R)
        position_T = self._step_positions.array[:total]
        np.add(np.repeat(start_R - query_start_R1[:-1], count_R), self._indexes[:total], out=position_T)
        self._step_tokens.array[:total] = self._token_ids[row_T, position_T]
        block_T = self._block_ids[row_T, position_T // block_size]
        np.add(block_T * block_size, position_T % block_size, out=self._step_slots.array[:total])
        self._copy_tables(rows_R)
        return total

    def _move_on(self, req_ids: Sequence[str], rows_R: npt.NDArray[np.intp]) -> None:
        """The buffers of a step of decodes, made those of the next."""
        block_size, num = self._block_size, len(rows_R)
        position_R, slot_R = self._step_positions.array[:num], self._step_slots.array[:num]
        end_R = self._step_seq_lens.array[:num]
        self._check(req_ids, rows_R, end_R, end_R + 1)
        position_R += 1
        slot_R += 1
        end_R += 1
        (at_border,) = (position_R % block_size == 0).nonzero()
        if at_border.size:
            slot_R[at_border] = self._block_ids[rows_R[at_border], position_R[at_border] // block_size] * block_size
        self._step_tokens.array[:num] = self._token_ids[rows_R, position_R]
        if self._tables_changed:
            self._copy_tables(rows_R)

    def _copy_tables(self, rows_R: npt.NDArray[np.intp]) -> None:
        width = int(self._num_blocks[rows_R].max())
        self._step_block_ids.array[: len(rows_R), :width] = self._block_ids[rows_R, :width]
        self._tables_changed = False

    def _moved(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """That of the last step, made that of the next: the same parts of the buffers, where those are long enough."""
        num = len(metadata.seq_lens)
        seq_lens = self._step_seq_lens.array[:num].tolist()
        if -(-max(seq_lens) // self._block_size) != metadata.block_tables_RP.shape[1]:
            return self._metadata(num, num, metadata.query_lens)
        return replace(metadata, seq_lens=seq_lens)

    def _metadata(self, num: int, total: int, query_lens: list[int]) -> AttentionMetadata:
        seq_lens = self._step_seq_lens.array[:num].tolist()
        return AttentionMetadata(
            positions_T=self._step_positions.tensor[:total],
            slots_T=self._step_slots.tensor[:total],
            query_start_R1=self._step_query_start.tensor[: num + 1],
            seq_lens_R=self._step_seq_lens.tensor[:num],
            block_tables_RP=self._step_block_ids.tensor[:num, : -(-max(seq_lens) // self._block_size)],
            query_lens=query_lens,
            seq_lens=seq_lens,
        )

    def _sampling(self, rows_R: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Indexes of the requests whose last known token the step computes."""
        (sampling,) = (self._step_seq_lens.array[: len(rows_R)] == self._num_tokens[rows_R]).nonzero()
        return sampling  # type: ignore[no-any-return]

    def _row(self, req_id: str) -> int:
        row = self._rows.get(req_id)
        if row is None:
            raise ContractBroken(req_id, "it is not known")
        return row

    def _check(self, req_ids: Sequence[str], rows_R: npt.NDArray[np.intp], start_R: Ints, end_R: Ints) -> None:
        """The tokens to compute must be there, and blocks for them."""
        most_R = np.minimum(self._num_tokens[rows_R], self._num_blocks[rows_R] * self._block_size)
        bad_R = (start_R >= end_R) | (end_R > most_R)
        index = int(bad_R.argmax())
        if bad_R[index]:
            row = rows_R[index]
            raise ContractBroken(
                req_ids[index],
                f"tokens {start_R[index]} to {end_R[index]} are to be computed, "
                f"but it has {self._num_tokens[row]} tokens and {self._num_blocks[row]} blocks",
            )
