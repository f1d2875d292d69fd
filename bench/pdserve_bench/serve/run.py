"""One run of `pdserve bench serve` from what is asked for to files."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import secrets
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve_bench.errors import BadOption, ServerNotUsable
from pdserve_bench.machine import Machine
from pdserve_bench.reports import check_plot_path, write_json, write_plot
from pdserve_bench.serve.arrivals import arrival_times
from pdserve_bench.serve.client import Client
from pdserve_bench.serve.config import ClosedLoop, OpenLoop
from pdserve_bench.serve.lengths import parse_lengths
from pdserve_bench.serve.load import closed_loop, load_beside, open_loop
from pdserve_bench.serve.plot import plot
from pdserve_bench.serve.prompts import file_prompts, random_prompts, request_body
from pdserve_bench.serve.server import served_model
from pdserve_bench.serve.summary import summarize
from pdserve_bench.serve.usage import process_usage
from pdserve_bench.serve.view import describe_load, tables
from pdserve_bench.tables import for_terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from rich.console import Console

    from pdserve_bench.serve.config import ServeBench
    from pdserve_bench.serve.prompts import Prompt
    from pdserve_bench.serve.records import RequestRecord
    from pdserve_bench.serve.server import ServedModel

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def bench_serve(bench: ServeBench, *, console: Console, log: Console) -> int:
    """Measures, prints, writes.

    Args:
        console: the result goes here.
        log: progress goes here.

    Raises:
        BenchError: nothing could be measured.
    """
    check_plot_path(bench.plot_path)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_bench(bench, console, log))


async def _bench(bench: ServeBench, console: Console, log: Console) -> int:
    machine, seed = Machine(), bench.seed if bench.seed is not None else secrets.randbits(32)
    model = await served_model(bench.url, bench.model)
    warmup, bodies = _bodies(bench, model, random.Random(seed))
    client = Client(bench.url + _PATHS[bench.endpoint], timeout_s=bench.timeout_s)
    try:
        if warmup:
            with _progress(log, "warm-up", len(warmup)) as on_record:
                await closed_loop(client, warmup, _warmup_concurrency(bench), on_record)
        before = [process_usage(pid) for pid in bench.watch_pids]
        cpu_s = time.process_time()
        async with _beside(bench, client, model, random.Random(seed + 2)) as others:
            with _progress(log, describe_load(bench), len(bodies)) as on_record:
                records = await _run_load(bench, client, bodies, random.Random(seed + 1), on_record)
            num_beside = len(others)
        cpu_s = time.process_time() - cpu_s
        watched = [(usage, process_usage(usage.pid)) for usage in before]
    finally:
        await client.close()
    summary = summarize(records, bench.objectives, client_cpu_s=cpu_s, watched=watched, num_beside=num_beside)
    shown = tables(bench, model, summary)
    if bench.json_path is not None:
        result = {"benchmark": "serve", "label": bench.label, "seed": seed, "model": model.name, "machine": machine}
        requests = [_request_json(record) for record in records]
        write_json(bench.json_path, result | {"config": _config_json(bench), "summary": summary, "requests": requests})
    if bench.plot_path is not None:
        title = f"{bench.label or model.name}: {describe_load(bench)}"
        write_plot(bench.plot_path, title, plot(records, summary, bench.objectives, title), shown)
    for table in shown:
        console.print(for_terminal(table))
    return 0


def _bodies(bench: ServeBench, model: ServedModel, rng: random.Random) -> tuple[list[bytes], list[bytes]]:
    """Requests of the warm-up and of the run. All are made before the first is sent."""
    total = bench.num_warmup + bench.num_prompts
    output_lengths = [bench.output_lengths.draw(rng) for _ in range(total)]
    if bench.prompt_file is not None:
        prompts: Iterator[Prompt] = itertools.cycle(file_prompts(bench.prompt_file))
    else:
        vocab_size = bench.vocab_size or model.vocab_size
        if vocab_size is None and bench.endpoint == "completions":
            raise ServerNotUsable(bench.url, "it does not say its vocabulary's size: use --tokenizer-vocab")
        limit = None
        if model.max_model_len is not None:
            limit = model.max_model_len - max(output_lengths)
            if limit < 1:
                raise BadOption("--output-len", max(output_lengths), f"the context is {model.max_model_len} tokens")
        prompts = random_prompts(bench.endpoint, bench.input_lengths, vocab_size or 0, limit, rng)
    bodies = [
        request_body(prompt, bench.endpoint, model.name, length, bench.temperature, bench.extra_body)
        for prompt, length in zip(prompts, output_lengths, strict=False)
    ]
    return bodies[: bench.num_warmup], bodies[bench.num_warmup :]


async def _run_load(
    bench: ServeBench,
    client: Client,
    bodies: Sequence[bytes],
    rng: random.Random,
    on_record: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    match bench.load:
        case OpenLoop(rate=rate, process=process, burstiness=burstiness):
            times = arrival_times(len(bodies), rate, process, burstiness, rng)
            return await open_loop(client, bodies, times, on_record)
        case ClosedLoop(concurrency=concurrency):
            return await closed_loop(client, bodies, concurrency, on_record)


def _beside(
    bench: ServeBench, client: Client, model: ServedModel, rng: random.Random
) -> AbstractAsyncContextManager[Sequence[RequestRecord]]:
    """The load that is not measured, if there is one."""
    if bench.beside is None:
        return nullcontext(())
    lengths = parse_lengths(str(bench.beside.input_len), "--beside")
    prompts = random_prompts(bench.endpoint, lengths, bench.vocab_size or model.vocab_size or 0, None, rng)
    output_len, extra = bench.beside.output_len, bench.extra_body
    bodies = (
        request_body(prompt, bench.endpoint, model.name, output_len, bench.temperature, extra) for prompt in prompts
    )
    return load_beside(client, bodies, bench.beside.concurrency)


def _warmup_concurrency(bench: ServeBench) -> int:
    return bench.load.concurrency if isinstance(bench.load, ClosedLoop) else bench.num_warmup


class _progress:
    """A progress bar that counts answers and failures."""

    def __init__(self, log: Console, title: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
        )
        # Drawn rarely: the client shares the machine with what it measures.
        self._bar = Progress(*columns, console=log, refresh_per_second=2, disable=not log.is_terminal)
        self._task = self._bar.add_task(title, total=total, rate="")
        self._tokens = self._failed = 0
        self._start = time.monotonic()

    def __enter__(self) -> Callable[[RequestRecord], None]:
        self._bar.start()
        return self._on_record

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _on_record(self, record: RequestRecord) -> None:
        self._tokens += record.num_output_tokens
        self._failed += record.error is not None
        rate = f"{self._tokens / (time.monotonic() - self._start):,.0f} tok/s"
        failed = f", {self._failed} failed" if self._failed else ""
        self._bar.update(self._task, advance=1, rate=rate + failed)


def _config_json(bench: ServeBench) -> dict[str, Any]:
    names = [name for name in bench.__dataclass_fields__ if name not in ("json_path", "plot_path", "label", "model")]
    config = {name: getattr(bench, name) for name in names}
    return config | {"prompt_file": os.fspath(bench.prompt_file) if bench.prompt_file else None}


def _request_json(record: RequestRecord) -> dict[str, Any]:
    return {
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "ttft_s": record.latency("ttft"),
        "second_s": record.latency("second"),
        "tpot_s": record.latency("tpot"),
        "max_gap_s": max(record.gaps, default=None),
        "e2e_s": record.latency("e2e"),
        "error": record.error,
    }
