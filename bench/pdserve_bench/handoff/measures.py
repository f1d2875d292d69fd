"""The four loads of `pdserve bench handoff`, and what is read off them. Times in seconds."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from operator import truediv
from typing import TYPE_CHECKING

from pdserve_bench.errors import NothingMeasured
from pdserve_bench.handoff.fleet import Fleet, Processes
from pdserve_bench.serve.lengths import Uniform
from pdserve_bench.serve.load import closed_loop
from pdserve_bench.serve.prompts import random_prompts, request_body
from pdserve_bench.stats import distribution

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from pdserve_protocol.node import NodeStatus

    from pdserve_bench.handoff.config import HandoffBench
    from pdserve_bench.serve.records import RequestRecord
    from pdserve_bench.stats import Distribution

    _Flags = Mapping[str, tuple[Sequence[str], Sequence[str]]]
    """By name: flags of both nodes of a pair, and of its decode node alone."""

BATCH = 16
"""Requests that the decode node of ``grants`` decodes at a time."""

POLICIES = ("offer", "dispatch", "finished")

_GRANTS_PROMPT_LEN = 32
_KV_MEMORY = "1GiB"
_SAMPLE_S = 0.2
_PARTS = ("grant", "transfer", "landing", "admission")


@dataclass(frozen=True, kw_only=True)
class Gap:
    """``beyond_step``: from token 0 to token 1 of a request less the median of its later gaps. ``parts``: medians."""

    first_gap: Distribution
    step: Distribution
    beyond_step: Distribution
    parts: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Grants:
    """Offer sent to grant received, by the prefill node's clock; its p99 is no more than ``p99_at_most``.

    ``running``: requests that the decode node had, sampled, median.
    """

    mean: float
    p99_at_most: float
    step: Distribution
    running: float


@dataclass(frozen=True, kw_only=True)
class PolicyCost:
    """``reserved_block_seconds`` of blocks whose requests did not decode yet, ``reserved_most`` at a time.

    ``gap``: from the first token to the second. ``tokens_per_s``: median of the turns.
    """

    policy: str
    reserved_block_seconds: float
    reserved_most: float
    ttft: Distribution
    gap: Distribution
    second: Distribution
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Digests:
    """Output tokens per second of each turn; in the first half the pair with digests was started first."""

    on: list[float]
    off: list[float]

    @property
    def ratio(self) -> float:
        """Median of the turns' on / off in each half, and of the two the geometric mean."""
        ratios = list(map(truediv, self.on, self.off))
        half = len(ratios) // 2
        return math.sqrt(statistics.median(ratios[:half]) * statistics.median(ratios[half:]))


async def measure_gap(bench: HandoffBench, on_record: Callable[[RequestRecord], None]) -> Gap:
    """One request at a time."""
    async with _fleet(bench) as fleet:
        records = await _load(bench, fleet, on_record, concurrency=1, output_len=min(bench.output_len, 16))
    steps = [statistics.median(record.gaps[1:]) for record in records]
    firsts = [record.gaps[0] for record in records]
    return Gap(
        first_gap=_distribution(firsts),
        step=_distribution(steps),
        beyond_step=_distribution([first - step for first, step in zip(firsts, steps, strict=True)]),
        parts={part: statistics.median(_times(records, part)) for part in _PARTS},
    )


async def measure_grants(bench: HandoffBench, on_record: Callable[[RequestRecord], None]) -> Grants:
    """Short prompts, so that more are offered than the decode node's full batch can take on."""
    async with _fleet(bench, "--max-num-seqs", str(BATCH)) as fleet:
        before = await fleet.status("prefill")
        load = asyncio.create_task(
            _load(
                bench,
                fleet,
                on_record,
                concurrency=BATCH * 3 // 2,
                input_len=_GRANTS_PROMPT_LEN,
                num_prompts=bench.num_prompts * 4,
            )
        )
        running = []
        while not load.done():
            running.append((await fleet.status("decode")).load.running)
            await asyncio.wait([load], timeout=_SAMPLE_S)
        records, after = load.result(), await fleet.status("prefill")
    gaps = [gap for record in records for gap in record.gaps[1:]]
    mean, p99_at_most = _since_histogram(before, after, "offer_to_grant_s")
    return Grants(
        mean=mean,
        p99_at_most=p99_at_most,
        step=_distribution(gaps),
        running=statistics.median(running),
    )


async def measure_policies(bench: HandoffBench, on_record: Callable[[RequestRecord], None]) -> list[PolicyCost]:
    """A pair of nodes for each policy."""
    compared = await _compare(bench, {policy: ([], ["--grant-policy", policy]) for policy in POLICIES}, on_record)
    return [
        PolicyCost(
            policy=policy,
            reserved_block_seconds=sum(
                _since(before, after, "reserved_block_seconds") for before, after in compared[policy].statuses
            ),
            reserved_most=max(after.gauges["blocks_reserved_most"] for _, after in compared[policy].statuses),
            ttft=_distribution([record.latency("ttft") for record in compared[policy].records]),
            gap=_distribution([record.gaps[0] for record in compared[policy].records]),
            second=_distribution([record.latency("second") for record in compared[policy].records]),
            tokens_per_s=statistics.median(compared[policy].tokens_per_s),
        )
        for policy in POLICIES
    ]


async def measure_digests(bench: HandoffBench, on_record: Callable[[RequestRecord], None]) -> Digests:
    """A pair of nodes with digests and one without."""
    compared = await _compare(bench, {"on": ([], []), "off": (["--kv-digest", "none"], [])}, on_record)
    return Digests(on=compared["on"].tokens_per_s, off=compared["off"].tokens_per_s)


def num_requests(bench: HandoffBench, measure: str) -> int:
    """Measured requests of a measure."""
    match measure:
        case "grants":
            return bench.num_prompts * 4
        case "policies":
            return bench.num_prompts * bench.repetitions * len(POLICIES) ** 2
        case "digests":
            return bench.num_prompts * bench.repetitions * 4
        case _:
            return bench.num_prompts


@dataclass(frozen=True)
class _Compared:
    """``statuses``: of the decode node, before and after the turns of one start. ``tokens_per_s``: of each turn."""

    records: list[RequestRecord] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    statuses: list[tuple[NodeStatus, NodeStatus]] = field(default_factory=list)


async def _compare(
    bench: HandoffBench, flags: _Flags, on_record: Callable[[RequestRecord], None]
) -> dict[str, _Compared]:
    """The same prompts for pairs of nodes of each, in turns, so that what the machine does meanwhile meets all.

    Always in the same order: what follows itself finds its own memory in the processor's caches, here none does. All
    of it as often as there are pairs, started anew each time and another one first: it may be some percent slower.
    """
    names = list(flags)
    compared = {name: _Compared() for name in names}
    for first in range(len(names)):
        async with _fleets(bench, {name: flags[name] for name in names[first:] + names[:first]}) as fleets:
            before = {name: await fleet.status("decode") for name, fleet in fleets.items()}
            for turn in range(bench.repetitions):
                for name, fleet in fleets.items():
                    started = time.monotonic()
                    records = await _load(bench, fleet, on_record, concurrency=bench.concurrency, seed=turn)
                    num_tokens = sum(record.num_output_tokens for record in records)
                    compared[name].records.extend(records)
                    compared[name].tokens_per_s.append(num_tokens / (time.monotonic() - started))
            for name, fleet in fleets.items():
                compared[name].statuses.append((before[name], await fleet.status("decode")))
    return compared


@asynccontextmanager
async def _fleet(bench: HandoffBench, *decode_flags: str) -> AsyncIterator[Fleet]:
    async with _fleets(bench, {"": ([], decode_flags)}) as fleets:
        yield fleets[""]


@asynccontextmanager
async def _fleets(bench: HandoffBench, flags: _Flags) -> AsyncIterator[dict[str, Fleet]]:
    """Pairs of nodes that have served two requests of the kind that is measured."""
    common = ["--kv-connector", bench.connector, "--kv-cache-memory", _KV_MEMORY]
    async with AsyncExitStack() as running:
        # Starting processes blocks this loop, so that no fleet is talked to before the last one runs.
        processes = {
            name: running.enter_context(Processes(bench.model, [*common, *both], decode))
            for name, (both, decode) in flags.items()
        }
        fleets = {name: await running.enter_async_context(Fleet(started)) for name, started in processes.items()}
        for fleet in fleets.values():
            await _load(bench, fleet, lambda record: None, concurrency=1, num_prompts=2, seed=-1)
        yield fleets


async def _load(
    bench: HandoffBench,
    fleet: Fleet,
    on_record: Callable[[RequestRecord], None],
    *,
    concurrency: int,
    num_prompts: int | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    seed: int = 0,
) -> list[RequestRecord]:
    """Raises:
    NothingMeasured: a request has failed, or was not handed over.
    """
    info = (await fleet.status("decode")).info
    length, rng = input_len or bench.input_len, random.Random(seed)
    prompts = random_prompts("completions", Uniform(low=length, high=length), info.vocab_size, None, rng)
    bodies = [
        request_body(prompt, "completions", info.served_model_name, output_len or bench.output_len, 0.0, {})
        for prompt, _ in zip(prompts, range(num_prompts or bench.num_prompts), strict=False)
    ]
    records = await closed_loop(fleet.client, bodies, concurrency, on_record)
    failures: dict[str, int] = {}
    for record in records:
        moved = (record.proof or {}).get("transport")
        failure = record.error or ("not handed over" if moved is None else None)
        if failure is None and len(record.gaps) < 2:
            failure = "tokens came in less than three chunks"
        if failure is not None:
            failures[failure] = failures.get(failure, 0) + 1
    if failures:
        raise NothingMeasured(failures)
    return records


def _times(records: list[RequestRecord], part: str) -> list[float]:
    return [record.proof["time"][f"{part}_ms"] / 1000 for record in records if record.proof is not None]


def _distribution(values: list[float] | list[float | None]) -> Distribution:
    found = distribution([value for value in values if value is not None])
    assert found is not None, "a load without requests"
    return found


def _since(before: NodeStatus, after: NodeStatus, counter: str) -> float:
    return after.counters[counter] - before.counters[counter]


def _since_histogram(before: NodeStatus, after: NodeStatus, name: str) -> tuple[float, float]:
    """Mean, and the bound of the bucket that the 99th percentile lies in."""
    old, new = before.histograms[name], after.histograms[name]
    counts = [late - early for late, early in zip(new.counts, old.counts, strict=True)]
    up_to, total = list(accumulate(counts)), sum(counts)
    bound = next(i for i, count in enumerate(up_to) if count >= 0.99 * total)
    return (new.sum - old.sum) / max(1, total), [*new.bounds, math.inf][bound]
