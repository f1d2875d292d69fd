"""Decode steps as captured graphs: which graph a step takes, the rows that pad it, and the replay.

A graph repeats the same launches on the same addresses. So there is one for each of a few batch sizes, its inputs lie
in buffers that stay, and a smaller batch is padded by rows that touch nothing: length 0, slot -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from pdserve_kernels.interface import AttentionMetadata

    from pdserve_engine.step_buffers import StepBuffers

    Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]
    """Takes launches; returns their result, whose memory stays its own, and what makes it anew from the same inputs."""

    Forward = Callable[[torch.Tensor, AttentionMetadata, torch.Tensor], torch.Tensor]
    """Token ids, metadata, rows whose logits are wanted -> logits, all on the device."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes with a graph of their own: powers of two, and the largest batch.

    Decode is bound by the weights, which every batch reads once, so that rows up to twice as many cost little.
    """
    sizes = [1 << power for power in range(max_num_seqs.bit_length()) if 1 << power < max_num_seqs]
    return [*sizes, max_num_seqs]


def graph_size(sizes: Sequence[int], num_seqs: int) -> int | None:
    """The smallest of ``sizes``, which rise, that holds a batch; None where none does."""
    return next((size for size in sizes if size >= num_seqs), None)


def is_decode(metadata: AttentionMetadata) -> bool:
    """Whether every request computes one token."""
    return len(metadata.query_lens) == len(metadata.positions_T)


class DecodeGraphs:
    """A graph for each size, captured at once, the largest first, so that the others fit the memory that it took.

    Args:
        max_model_len: tokens of a request at most; the graphs serve every length up to it.
    """

    def __init__(
        self, forward: Forward, buffers: StepBuffers, capture: Capture, *, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.sizes = graph_sizes(max_num_seqs)
        self._buffers = buffers
        self._graphs: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}
        for size in reversed(self.sizes):
            token_ids_T, metadata, rows_N = buffers.decode_views(size, max_model_len)
            buffers.fill_with_padding(size)
            self._graphs[size] = capture(_bound(forward, token_ids_T, metadata, rows_N))

    def run(self, token_ids_T: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """A decode step of host tensors. Returns logits on the device, a row for each request, until the next call."""
        num_seqs = len(metadata.query_lens)
        size = graph_size(self.sizes, num_seqs)
        assert size is not None, "no step has more requests than max_num_seqs"
        self._buffers.load_decode(token_ids_T, metadata, size)
        logits_NV, replay = self._graphs[size]
        replay()
        return logits_NV[:num_seqs]


def _bound(
    forward: Forward, token_ids_T: torch.Tensor, metadata: AttentionMetadata, rows_N: torch.Tensor
) -> Callable[[], torch.Tensor]:
    return lambda: forward(token_ids_T, metadata, rows_N)
