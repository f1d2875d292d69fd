"""The inputs of a step on a device: written on the host where the device can fetch them, copied without waiting.

Each input has a buffer on the host (page-locked for CUDA) and one on the device, both as large as the largest step,
allocated once; their addresses never change, so graphs may be captured over them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pdserve_kernels.interface import AttentionMetadata


class _Buffer:
    def __init__(self, *shape: int, device: torch.device, dtype: torch.dtype = torch.int32) -> None:
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.device = torch.zeros(shape, dtype=dtype, device=device)

    def load(self, values: torch.Tensor, size: int | None = None, padding: int = 0) -> torch.Tensor:
        """Copies values, and padding after them up to ``size``; returns the device's buffer as far as that."""
        num = len(values)
        size = num if size is None else size
        if values.dim() == 1:
            self.host[:num], self.host[num:size] = values, padding
            return self.device[:size].copy_(self.host[:size], non_blocking=True)
        width = values.shape[1]
        self.host[:num, :width] = values
        # Whole rows: a part of each would be as many copies as there are rows.
        self.device[:num].copy_(self.host[:num], non_blocking=True)
        return self.device[:size]


class StepBuffers:
    """Inputs of one step at a time: the copies of a step must have ended when the next is loaded.

    Args:
        max_num_blocks: of a request.
    """

    def __init__(self, *, max_num_tokens: int, max_num_seqs: int, max_num_blocks: int, device: torch.device) -> None:
        self._token_ids = _Buffer(max_num_tokens, device=device)
        self._positions = _Buffer(max_num_tokens, device=device)
        self._slots = _Buffer(max_num_tokens, device=device)
        self._query_start = _Buffer(max_num_seqs + 1, device=device)
        self._seq_lens = _Buffer(max_num_seqs, device=device)
        self._block_tables = _Buffer(max_num_seqs, max_num_blocks, device=device)
        self._rows = _Buffer(max_num_tokens, device=device, dtype=torch.int64)
        self._decode_start = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._decode_rows = torch.arange(max_num_seqs, device=device)

    def load(
        self, token_ids_T: torch.Tensor, metadata: AttentionMetadata, rows_N: torch.Tensor
    ) -> tuple[torch.Tensor, AttentionMetadata, torch.Tensor]:
        """The same values on the device."""
        on_device = replace(
            metadata,
            positions_T=self._positions.load(metadata.positions_T),
            slots_T=self._slots.load(metadata.slots_T),
            query_start_R1=self._query_start.load(metadata.query_start_R1),
            seq_lens_R=self._seq_lens.load(metadata.seq_lens_R),
            block_tables_RP=self._block_tables.load(metadata.block_tables_RP),
        )
        return self._token_ids.load(token_ids_T), on_device, self._rows.load(rows_N)

    def load_decode(self, token_ids_T: torch.Tensor, metadata: AttentionMetadata, size: int) -> None:
        """A step of one token for each request into what ``decode_views`` shows, padded to ``size`` requests."""
        self._token_ids.load(token_ids_T, size)
        self._positions.load(metadata.positions_T, size)
        self._slots.load(metadata.slots_T, size, padding=-1)
        self._seq_lens.load(metadata.seq_lens_R, size)
        self._block_tables.load(metadata.block_tables_RP, size)

    def fill_with_padding(self, size: int) -> None:
        """A decode step of padding alone."""
        nothing = torch.zeros(0, dtype=torch.int32)
        for buffer, padding in (
            (self._token_ids, 0),
            (self._positions, 0),
            (self._slots, -1),
            (self._seq_lens, 0),
        ):
            buffer.load(nothing, size, padding)

    def decode_views(self, size: int, max_model_len: int) -> tuple[torch.Tensor, AttentionMetadata, torch.Tensor]:
        """Inputs of a step of one token for each of ``size`` requests, of any length; all rows' logits are wanted."""
        metadata = AttentionMetadata(
            positions_T=self._positions.device[:size],
            slots_T=self._slots.device[:size],
            query_start_R1=self._decode_start[: size + 1],
            seq_lens_R=self._seq_lens.device[:size],
            block_tables_RP=self._block_tables.device[:size],
            query_lens=[1] * size,
            seq_lens=[max_model_len] * size,
        )
        return self._token_ids.device[:size], metadata, self._decode_rows[:size]
