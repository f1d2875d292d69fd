"""One run of `pdserve bench router` from what is asked for to files."""

from __future__ import annotations

import itertools
import json
import os
import time
from typing import TYPE_CHECKING

from pdserve_engine.weights import resolve_model
from pdserve_text.files import load_tokenizer_files
from pdserve_text.tokenizer import Tokenizer

from pdserve_bench.machine import Machine
from pdserve_bench.reports import write_json
from pdserve_bench.router.config import phases
from pdserve_bench.router.fake_nodes import MODEL_NAME, TEXT
from pdserve_bench.router.load import closed_loop
from pdserve_bench.router.process import Child, wait_until_ready
from pdserve_bench.router.summary import Moment, cost
from pdserve_bench.router.view import table
from pdserve_bench.serve.usage import process_usage
from pdserve_bench.tables import for_terminal

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from pdserve_bench.router.config import Phase, RouterBench
    from pdserve_bench.router.load import Counted
    from pdserve_bench.router.summary import PhaseCost


def bench_router(bench: RouterBench, *, console: Console, log: Console) -> int:
    """Measures, prints, writes.

    Args:
        console: the result goes here.
        log: progress goes here.

    Raises:
        BenchError: nothing could be measured.
        ModelError, WeightsError: the model cannot be used.
    """
    machine, folder = Machine(), resolve_model(bench.model)
    router_core = min(machine.cores) if bench.router_core is None else bench.router_core
    others = set(machine.cores) - {router_core} or {router_core}
    tokenizer, costs = Tokenizer.from_files(load_tokenizer_files(folder)), []
    os.sched_setaffinity(0, others)
    try:
        for phase in phases(bench):
            log.print(f"{phase.name} ...")
            costs.append(_measure(bench, phase, folder, _request(phase, tokenizer), router_core, others))
    finally:
        os.sched_setaffinity(0, machine.cores)
    if bench.json_path is not None:
        config = {key: value for key, value in vars(bench).items() if key not in ("json_path", "label")}
        head = {"benchmark": "router", "label": bench.label, "machine": machine, "config": config}
        write_json(bench.json_path, head | {"result": costs})
    console.print(for_terminal(table(bench, costs, router_core)))
    return 0


def _measure(
    bench: RouterBench, phase: Phase, folder: Path, request: bytes, router_core: int, others: set[int]
) -> PhaseCost:
    moments: list[Moment] = []
    with Child("pdserve_bench.router.fake_nodes", [str(folder), str(phase.step_ms)], others) as nodes:
        prefill, decode = nodes.ready_line.split()
        addresses = ["--prefill", f"127.0.0.1:{prefill}", "--decode", f"127.0.0.1:{decode}"]
        with Child(
            "pdserve_router.main",
            [*addresses, "--port", "0", "--local-prefill", "never", "--log-level", "warning"],
            {router_core},
        ) as router:
            port = int(router.ready_line.rpartition(":")[2])
            wait_until_ready(port)

            def on_window(counted: Counted) -> None:
                cpu_s = process_usage(router.pid).cpu_s
                now = time.monotonic()
                moments.append(Moment(at=now, router_cpu_s=cpu_s, requests=counted.requests, chunks=counted.chunks))

            closed_loop(port, request, bench.concurrency, bench.seconds, on_window)
    return cost(phase, *moments)


def _request(phase: Phase, tokenizer: Tokenizer) -> bytes:
    ids = itertools.islice(itertools.cycle(tokenizer.encode(TEXT, add_special_tokens=False)), phase.prompt_tokens)
    body = json.dumps(
        {
            "model": MODEL_NAME,
            "prompt": b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "ignore"),
            "max_tokens": phase.output_len,
            "ignore_eos": True,
            "stream": phase.stream,
        }
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
