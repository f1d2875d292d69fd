"""What `pdserve bench serve` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve_bench.serve.arrivals import Process
    from pdserve_bench.serve.lengths import Lengths
    from pdserve_bench.serve.slo import Objective

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, kw_only=True)
class OpenLoop:
    """Requests come when they come. ``rate``: per second."""

    rate: float
    process: Process
    burstiness: float


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """Each of ``concurrency`` users sends the next request when the last one is answered."""

    concurrency: int


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Requests that are not measured: ``concurrency`` of them are under way for as long as the measured ones are."""

    concurrency: int
    input_len: int
    output_len: int


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """One run.

    Attributes:
        url: of the server, without /v1.
        model: as requests name it; None asks the server.
        input_lengths, output_lengths: in tokens. Outputs are of exactly this length: end tokens are ignored.
        vocab_size: token ids of random prompts are below it; None asks the server.
        prompt_file: prompts instead of random ones.
        num_warmup: requests before the measured ones.
        beside: other load meanwhile.
        seed: of prompts, lengths and arrivals; None draws one, so that no run finds the last one's prompts cached.
        extra_body: more fields of every request.
        timeout_s: after which a request has failed.
        watch_pids: processes whose processor time is measured as well.
        label: names the run in its record.
    """

    url: str
    model: str | None
    endpoint: Endpoint
    load: OpenLoop | ClosedLoop
    num_prompts: int
    input_lengths: Lengths
    output_lengths: Lengths
    vocab_size: int | None
    prompt_file: Path | None
    num_warmup: int
    beside: Beside | None
    seed: int | None
    temperature: float
    extra_body: dict[str, Any]
    timeout_s: float
    objectives: tuple[Objective, ...]
    watch_pids: tuple[int, ...]
    label: str
    json_path: Path | None
    plot_path: Path | None
