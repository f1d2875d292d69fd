"""Thousands of requests over nodes that are killed, links that lose, writes that go wrong: `make chaos`, `make soak`.

    python tests/chaos.py --requests 20000                   the oracle: a single wrong KV entry fails its request
    python tests/chaos.py --model smollm2 --requests 2000    a real model: every answer as without faults, or an error
    python tests/chaos.py --model smollm2 --seconds 1200 --kill-every 120

It exits 0 if every request ended, with the right tokens or a clear error, and afterwards no node has a request or a
block left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from support.chaos import (
    Ask,
    OracleCluster,
    Tally,
    faults_in_logs,
    kill_now_and_then,
    oracle_asks,
    recorded_asks,
    send_all,
)
from support.cluster import Cluster
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FAULTS = "corrupt=0.01&delay_ms=3&double=0.01&reorder=0.02&fail=0.001&lose=0.01&repeat=0.01&late_ms=5"
IDLE_S = 40.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="oracle", help="oracle, or what a node takes (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=None, help="how many; by default as many as fit into --seconds")
    parser.add_argument("--seconds", type=float, default=120.0, help="where --requests is not given")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--kv-connector", default="nixl", help="nixl or tcp")
    parser.add_argument("--faults", default=FAULTS, help="of KV writes and messages (default: %(default)s)")
    parser.add_argument("--local-prefill", default="never", help="auto: some prompts are never handed over")
    parser.add_argument("--kill-every", type=float, default=10.0, metavar="SECONDS", help="0: never")
    parser.add_argument("--aborts", type=float, default=0.05, help="share of clients that go away")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        return run(args, folder)


def run(args: argparse.Namespace, folder: Path) -> int:
    console = Console()
    asks: Iterator[Ask]
    connector = f"faulty:{args.kv_connector}?seed={args.seed}&{args.faults}"
    if args.model == "oracle":
        model = str(tiny_model(folder / "model"))
        asks = oracle_asks(Path(model), args.requests, args.seed, abort_share=args.aborts)
        # A pool that is too small, so that requests are preempted and prompts wait.
        make, node_args = OracleCluster, ["--kv-cache-memory", "48KiB", "--max-num-seqs", "32"]
    else:
        model = args.model
        make, node_args = Cluster, ["--max-model-len", "2048", "--kv-cache-memory", "128MiB"]
        with Cluster(model=model, folder=folder, node_args=node_args) as calm:
            asks = recorded_asks(calm, args.requests, args.seed, abort_share=args.aborts)
    with make(
        model=model,
        folder=folder,
        num_prefill=2,
        num_decode=2,
        node_args=[*node_args, "--kv-connector", connector, "--log-level", "warning"],
        local_prefill=args.local_prefill,
    ) as cluster:
        tally, began = Tally(), time.monotonic()
        if args.requests is None:
            asks = itertools.takewhile(lambda _: time.monotonic() - began < args.seconds, asks)
        with Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"), TimeElapsedColumn()
        ) as progress:
            task = progress.add_task("requests", total=args.requests)
            asyncio.run(storm(cluster, asks, tally, args, on_end=lambda: progress.advance(task)))
        seconds = time.monotonic() - began
        console.print(f"{tally.total} requests in {seconds:.0f} s, {tally.total / seconds:.0f}/s: {dict(tally.ends)}")
        problems = [*tally.wrong, *faults_in_logs(cluster)]
        try:
            cluster.wait_until_idle(IDLE_S)
        except AssertionError as error:
            problems.append(str(error))
        for status in cluster.statuses():
            console.print(status.counters, soft_wrap=True)
    for problem in problems[:20]:
        console.print(f"[red]wrong[/]: {problem}", highlight=False)
    console.print("[green]nothing wrong[/]" if not problems else f"[red]{len(problems)} things wrong[/]")
    return 1 if problems else 0


async def storm(
    cluster: Cluster, asks: Iterator[Ask], tally: Tally, args: argparse.Namespace, *, on_end: Callable[[], None]
) -> None:
    """All requests, while nodes are killed."""
    url = f"http://127.0.0.1:{cluster.port}"
    killer = asyncio.create_task(kill_now_and_then(cluster, args.kill_every, args.seed)) if args.kill_every else None
    try:
        await send_all(url, asks, tally, concurrency=args.concurrency, on_end=on_end)
    finally:
        if killer is not None:
            killer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await killer


if __name__ == "__main__":
    sys.exit(main())
