"""From logits to tokens: the mathematics of sampling, without the parameters and state of a sampler; in numpy.

``select_sampling`` gives this module, or the same functions in C where they are installed. Sums are made in float64; a
token comes before another if its logit is larger, or equal and its id smaller.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pdserve_kernels import cpu

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Row = npt.NDArray[np.float32]
    Wide = npt.NDArray[np.float64]

_FIRST_CANDIDATES = 256


class Sampling(Protocol):
    """Rows are contiguous float32 [V]."""

    def argmax(self, logits_NV: torch.Tensor) -> list[int]:
        """The first token of each row; float32 on the CPU, contiguous."""
        ...

    def draw(self, row: Row, *, temperature: float, top_k: int, top_p: float, min_p: float, random: float) -> int:
        """A token by the probabilities softmax(row / temperature) of those that min_p, top_k and then top_p keep.

        Args:
            min_p: least probability, relative to the largest; 0 keeps all.
            top_k: how many of the first tokens are kept; 0 or V keeps all.
            top_p: the first tokens that make up this share of what top_k left are kept (Holtzman et al., 2020).
            random: in [0, 1). The token is that at which the cumulative probability, in order of ids, passes it.

        Returns:
            Token 0 where the largest logit is not finite.
        """
        ...

    def log_probability(self, row: Row, token_id: int) -> tuple[float, float, int]:
        """log softmax(row)[token_id]; what is subtracted from any logit for it; rank of the token, from 1."""
        ...

    def first_tokens(self, row: Row, count: int) -> list[int]:
        """The ``count`` first tokens, or all, in their order."""
        ...


def select_sampling() -> Sampling:
    """The functions in C, or those of this module where C is not installed."""
    if cpu.is_built():
        from pdserve_kernels.cpu import sampling as in_c

        return in_c
    from pdserve_kernels import sampling as in_numpy

    return in_numpy


def argmax(logits_NV: torch.Tensor) -> list[int]:
    return logits_NV.numpy().argmax(axis=-1).tolist()  # type: ignore[no-any-return]


def draw(row: Row, *, temperature: float, top_k: int, top_p: float, min_p: float, random: float) -> int:
    logits = row.astype(np.float64)
    largest = logits.max()
    if not math.isfinite(largest):
        return 0
    logits = (logits - largest) / temperature
    if min_p > 0:
        logits[logits < math.log(min_p)] = -np.inf
    if 0 < top_k < logits.size or top_p < 1:
        kept = np.sort(_nucleus(logits, top_k, top_p))
        return int(kept[_passes(np.exp(logits[kept]).cumsum(), random)])
    return _passes(np.exp(logits).cumsum(), random)


def log_probability(row: Row, token_id: int) -> tuple[float, float, int]:
    logits = row.astype(np.float64)
    largest = logits.max()
    log_total = float(largest + math.log(np.exp(logits - largest).sum()))
    return float(logits[token_id]) - log_total, log_total, 1 + int((row > row[token_id]).sum())


def first_tokens(row: Row, count: int) -> list[int]:
    if count < 1:
        return []
    return _most_probable(row.astype(np.float64), min(count, row.size)).tolist()  # type: ignore[no-any-return]


def _passes(cumulative: Wide, random: float) -> int:
    # A target equal to the total would be past the last token; one below it is never at a token of probability 0.
    target = min(random * cumulative[-1], np.nextafter(cumulative[-1], 0.0))
    # Where the model yields NaN nothing is right, but other requests of the step must not suffer from it.
    return min(int(cumulative.searchsorted(target, side="right")), cumulative.size - 1)


def _nucleus(logits: Wide, top_k: int, top_p: float) -> npt.NDArray[np.int64]:
    """Ids kept by top_k, then top_p of what top_k left (Holtzman et al., 2020), most probable first."""
    limit = top_k if 0 < top_k < logits.size else logits.size
    total = float(np.exp(logits).sum()) if limit == logits.size else math.nan
    num_candidates = limit if limit < logits.size else _FIRST_CANDIDATES
    while True:
        ids = _most_probable(logits, min(num_candidates, limit))
        cumulative = np.exp(logits[ids]).cumsum()
        mass = top_p * (cumulative[-1] if math.isnan(total) else total)
        if top_p >= 1:
            return ids
        if cumulative[-1] >= mass or len(ids) == limit:
            return ids[: int(cumulative.searchsorted(mass, side="left")) + 1]
        num_candidates *= 16


def _most_probable(logits: Wide, count: int) -> npt.NDArray[np.int64]:
    """Ids of the ``count`` largest, largest first, equal ones by id."""
    if count < logits.size:
        threshold = np.partition(logits, logits.size - count)[logits.size - count]
        candidates = np.flatnonzero(logits >= threshold)
    else:
        candidates = np.arange(logits.size)
    order = np.argsort(-logits[candidates], kind="stable")
    return candidates[order][:count]
