"""Bytes that must be read or written, and FLOPs that must be done: the least that any program could.

Every weight and every key and value counts once a step, whatever is read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_engine.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Cost:
    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def floor_s(self, bandwidth: float, peak: float) -> float:
        """Seconds in which memory and arithmetic could be through with it, side by side.

        Args:
            bandwidth: bytes per second.
            peak: FLOPs per second.
        """
        return max(self.num_bytes / bandwidth, self.flops / peak)


def layer_parameters(config: DecoderConfig) -> int:
    """Numbers in the matrices of one layer."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)


def step_cost(
    config: DecoderConfig,
    itemsize: int,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    kv_itemsize: float | None = None,
) -> Cost:
    """Of a step that computes the last ``query_lens`` tokens of requests that are then ``seq_lens`` long, and the
    logits of the last one of each. Weights and KV are read once, and new KV is written; all else is small or can stay
    in caches. ``kv_itemsize``: bytes of a number in the KV cache; by default ``itemsize``.
    """
    layers = config.num_layers * layer_parameters(config)
    head = config.hidden_size * config.vocab_size
    num_tokens, num_requests = sum(query_lens), len(query_lens)
    return Cost(
        num_bytes=(layers + head) * itemsize + kv_bytes(config, kv_itemsize or itemsize, sum(seq_lens)),
        flops=2.0 * layers * num_tokens
        + 2.0 * head * num_requests
        + config.num_layers * attention_flops(config, query_lens, seq_lens),
    )


def kv_bytes(config: DecoderConfig, itemsize: float, num_tokens: int) -> float:
    """Of all layers."""
    return 2.0 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize * num_tokens


def attention_flops(config: DecoderConfig, query_lens: Sequence[int], seq_lens: Sequence[int]) -> float:
    """Of one layer: two products of head_dim for each pair of a token and one that it sees."""
    pairs = 0.0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        for_each = seq_len - query_len + (query_len + 1) / 2
        if config.sliding_window is not None:
            for_each = min(for_each, config.sliding_window)
        pairs += query_len * for_each
    return 4.0 * config.num_heads * config.head_dim * pairs


def linear_cost(num_rows: int, num_in: int, num_out: int, itemsize: int) -> Cost:
    """Weights, inputs and outputs of one product."""
    numbers = num_in * num_out + num_rows * (num_in + num_out)
    return Cost(float(numbers * itemsize), 2.0 * num_rows * num_in * num_out)


def attention_cost(
    config: DecoderConfig,
    itemsize: int,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    kv_itemsize: float | None = None,
) -> Cost:
    """Of one layer: its keys and values, queries and results."""
    width = config.num_heads * config.head_dim
    num_bytes = kv_bytes(config, kv_itemsize or itemsize, sum(seq_lens)) / config.num_layers
    num_bytes += 2 * sum(query_lens) * width * itemsize
    return Cost(num_bytes, attention_flops(config, query_lens, seq_lens))
