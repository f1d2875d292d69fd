"""What `pdserve bench kernels` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve_engine.config import CacheDType, DType


@dataclass(frozen=True, kw_only=True)
class KernelsBench:
    """One run.

    Attributes:
        model: a Hugging Face folder, a GGUF file, or the demo model.
        backend: that is measured.
        baseline: that it is compared with; None compares with nothing.
        batch_sizes: requests of the decode steps, ``context`` tokens each.
        prefill_lens: prompts of the prefill steps.
    """

    model: str
    dtype: DType
    kv_cache_dtype: CacheDType
    backend: str
    baseline: str | None
    threads: int
    batch_sizes: tuple[int, ...]
    context: int
    prefill_lens: tuple[int, ...]
    repetitions: int
    label: str
    json_path: Path | None
    plot_path: Path | None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A kind of step.

    Attributes:
        num_tokens: for ``decode`` the number of requests, each with one token to compute and ``context`` tokens with
            it; for ``prefill`` the length of the one prompt.
    """

    kind: Literal["decode", "prefill"]
    num_tokens: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.num_tokens}"


def scenarios(bench: KernelsBench) -> list[Scenario]:
    decodes = [Scenario(kind="decode", num_tokens=size, context=bench.context) for size in bench.batch_sizes]
    return decodes + [Scenario(kind="prefill", num_tokens=size, context=size) for size in bench.prefill_lens]
