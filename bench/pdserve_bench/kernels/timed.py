"""A backend that times another one's steps, and in other steps its operations.

A step is computed in one of two ways. As the other backend does it, where only the call for the whole decoder is
timed; or operation by operation, where each call is. A backend may fuse what is several operations here, so that the
second way says where time goes, but only the first how long a step takes.
Every method of the other one is an operation, also those that the interface does not have yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdserve_kernels.operations import DecoderOfOperations

from pdserve_bench.kernels.costs import Cost, attention_cost, linear_cost

if TYPE_CHECKING:
    import torch
    from pdserve_engine.models.config import DecoderConfig
    from pdserve_kernels.interface import AttentionMetadata, AttentionSpec, Backend, DecoderForward, DecoderWeights

Operation = Callable[..., Any]
_NOT_IN_STEPS = ("fingerprint", "set_threads", "pack_linear", "pack_gate_up", "decoder")


@dataclass(slots=True)
class OperationTime:
    """All calls of an operation in one step. ``cost``: None where it is not known."""

    calls: int = 0
    seconds: float = 0.0
    cost: Cost | None = None


@dataclass(frozen=True, slots=True)
class _Weight:
    """``packed`` is kept so that its id stays its own."""

    packed: Any
    name: str
    num_in: int
    num_out: int


class TimedBackend:
    """Stands for ``backend``.

    Attributes:
        fuses: its decoder is more than its operations one after another.
        decoder_s: the last call for a whole decoder, where operations were not timed.
        times: of each operation since ``start``.
        own_s: seconds since ``start`` that went into this, outside the operations.
    """

    def __init__(
        self, backend: Backend, config: DecoderConfig, itemsize: int, kv_itemsize: float | None = None
    ) -> None:
        self._backend = backend
        self._config = config
        self._itemsize = itemsize
        self._kv_itemsize = kv_itemsize
        self._names = _weight_names(config)
        self._weights: dict[int, _Weight] = {}
        self._lens: tuple[list[int], list[int]] = ([], [])
        self.times: dict[str, OperationTime] = {}
        self.own_s = self.decoder_s = 0.0
        self.fuses = False
        self._by_operation = False
        names = [name for name in dir(backend) if not name.startswith("_") and callable(getattr(backend, name))]
        self._plain: dict[str, Operation] = {name: getattr(backend, name) for name in names}
        self._timed = {
            name: self._wrap(name, operation) for name, operation in self._plain.items() if name not in _NOT_IN_STEPS
        }
        self._plain |= {
            "pack_linear": self._packs(backend.pack_linear),
            "pack_gate_up": self._packs(backend.pack_gate_up),
            "decoder": self._decoder,
        }
        self.stop()

    def start(self) -> None:
        """Times operations, from nothing."""
        self._by_operation = True
        self.times, self.own_s = {}, 0.0
        self.__dict__.update(self._timed)

    def stop(self) -> None:
        """Times whole decoders alone."""
        self._by_operation = False
        self.__dict__.update(self._plain)

    def __getattr__(self, name: str) -> Any:
        """What is not an operation."""
        return getattr(self._backend, name)

    def _packs(self, pack: Operation) -> Operation:
        def packs(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            num_out, num_in = weight.shape
            packed = pack(weight, *args, **kwargs)
            name = self._names.get((num_out, num_in), f"{num_out}x{num_in}")
            self._weights[id(packed)] = _Weight(packed, name, num_in, num_out)
            return packed

        return packs

    def _decoder(self, weights: DecoderWeights, spec: AttentionSpec) -> DecoderForward:
        whole: DecoderForward = self._backend.decoder(weights, spec)
        by_operation = DecoderOfOperations(self, weights, spec)
        self.fuses = not isinstance(whole, DecoderOfOperations)

        def decoder(
            token_ids_T: torch.Tensor,
            metadata: AttentionMetadata,
            kv_cache: torch.Tensor,
            logits_rows_N: torch.Tensor,
        ) -> torch.Tensor:
            if self._by_operation:
                return by_operation(token_ids_T, metadata, kv_cache, logits_rows_N)
            start = time.perf_counter()
            logits_NV = whole(token_ids_T, metadata, kv_cache, logits_rows_N)
            self.decoder_s = time.perf_counter() - start
            return logits_NV

        return decoder

    def _wrap(self, name: str, operation: Operation) -> Operation:
        clock = time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = operation(*args, **kwargs)
            end = clock()
            label, cost = self._describe(name, args, kwargs)
            entry = self.times.setdefault(label, OperationTime())
            entry.calls += 1
            entry.seconds += end - start
            if cost is not None:
                entry.cost = cost if entry.cost is None else entry.cost + cost
            self.own_s += clock() - end
            return result

        return timed

    def _describe(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Cost | None]:
        """What an operation is called in the result, and what it costs at least."""
        config, itemsize = self._config, self._itemsize
        for value in (*args, *kwargs.values()):
            weight = self._weights.get(id(value))
            if weight is not None:
                rows = args[0].shape[0]
                return f"{name} {weight.name}", linear_cost(rows, weight.num_in, weight.num_out, itemsize)
        match name:
            case "plan":
                metadata: AttentionMetadata = args[0]
                self._lens = (metadata.query_lens, metadata.seq_lens)
                return name, None
            case "paged_attention":
                return name, attention_cost(config, itemsize, *self._lens, self._kv_itemsize)
            case "rms_norm":
                num_tensors = 3 if len(args) < 4 or args[3] is None else 4
                return name, Cost(float(num_tensors * args[0].numel() * itemsize))
            case "rope_and_write_kv":
                return name, Cost(2.0 * args[0].numel() * itemsize)
        return name, None


def _weight_names(config: DecoderConfig) -> dict[tuple[int, int], str]:
    """Names by shape [out, in]."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        (config.vocab_size, hidden): "head",
        (hidden, inner): "down",
        (2 * inner, hidden): "gate_up",
        (hidden, heads): "output",
        (heads + 2 * kv_heads, hidden): "qkv",
    }
