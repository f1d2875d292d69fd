"""One run of `pdserve bench kv` from what is asked for to files."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve_protocol.errors import ProtocolError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve_bench.errors import BadOption, ProcessFailed
from pdserve_bench.kv import mooncake_peer
from pdserve_bench.kv.config import points
from pdserve_bench.kv.messages import SenderTask, Started, StartReceiver
from pdserve_bench.kv.plot import plot
from pdserve_bench.kv.processes import HOST, receiver, samples, serve_receivers
from pdserve_bench.kv.results import results_of
from pdserve_bench.kv.sender import Asking, ReceiverRefuses
from pdserve_bench.kv.view import tables, write_csv
from pdserve_bench.machine import Machine
from pdserve_bench.reports import write_json, write_plot
from pdserve_bench.tables import for_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve_bench.kv.config import KvBench, Point, Way
    from pdserve_bench.kv.messages import Sample
    from pdserve_bench.kv.results import KvResult

MOONCAKE_S = 120.0


def bench_kv(bench: KvBench, *, console: Console, log: Console) -> int:
    """Measures, prints, writes; or receives for a run on another host until interrupted.

    Args:
        console: the result goes here.
        log: progress goes here.

    Raises:
        ProcessFailed: a sender or a receiver has ended too soon; it says why on stderr.
        BadOption: the other host, or an address of this one, cannot be used.
    """
    if bench.listen is not None:
        return _listen(bench, log)
    machine = Machine()
    results = _measure(bench, log)
    shown = tables(bench.label, results)
    if bench.json_path is not None:
        config = {key: value for key, value in vars(bench).items() if key in _CONFIG}
        head = {"benchmark": "kv", "label": bench.label, "machine": machine, "config": config}
        write_json(bench.json_path, head | {"result": results})
    if bench.csv_path is not None:
        write_csv(bench.csv_path, results)
    if bench.plot_path is not None:
        title = bench.label or "KV blocks between two processes"
        write_plot(bench.plot_path, title, plot(results, title), shown)
    for table in shown:
        console.print(for_terminal(table))
    return 0


_CONFIG = ("ways", "block_bytes", "num_blocks", "concurrency", "wire_dtypes", "repetitions")


def _measure(bench: KvBench, log: Console) -> list[KvResult]:
    wanted = points(bench)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=log, refresh_per_second=2, disable=not log.is_terminal) as progress:
        for way in bench.ways:
            task = progress.add_task(way.name, total=len(wanted) * bench.repetitions)
            found: list[Sample] = []
            for sample in _samples(bench, way, wanted):
                found.append(sample)
                progress.update(task, advance=sample.what == "connector")
            peer = {point: _mooncake(bench, point) for point in wanted if bench.mooncake is not None}
            results += results_of(way, found, peer)
    return results


def _samples(bench: KvBench, way: Way, wanted: list[Point]) -> list[Sample]:
    """Of a sender here and a receiver here or there."""
    with ExitStack() as stack:
        if bench.connect is None:
            host, port = HOST, stack.enter_context(receiver(way, HOST, bench.cluster_key))
        else:
            host, port = bench.connect.host, _start_remote(bench, way)
        task = SenderTask(
            way=way,
            host=host,
            port=port,
            points=wanted,
            wire_dtypes=list(bench.wire_dtypes),
            repetitions=bench.repetitions,
        )
        return list(samples(task, bench.cluster_key))


def _start_remote(bench: KvBench, way: Way) -> int:
    assert bench.connect is not None, "there is another host"
    asking = Asking(bench.connect, bench.cluster_key)
    try:
        started: Started = asking.ask(StartReceiver(way=way))
    except ReceiverRefuses as error:
        raise BadOption("--connect", bench.connect, str(error)) from error
    finally:
        asking.close()
    return started.port


def _mooncake(bench: KvBench, point: Point) -> list[float]:
    """Seconds of the same blocks through a peer; all writes of the point in one call."""
    numbers = [str(n) for n in (point.total_blocks, point.block_bytes, bench.repetitions)]
    ended = subprocess.run(
        [str(bench.mooncake), str(Path(mooncake_peer.__file__)), *numbers],
        capture_output=True,
        text=True,
        timeout=MOONCAKE_S,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    if ended.returncode or not lines:
        raise ProcessFailed("sender", f"Mooncake: {ended.stderr.strip().rpartition(chr(10))[2]}")
    return [float(seconds) for seconds in json.loads(lines[-1])]


def _listen(bench: KvBench, log: Console) -> int:
    assert bench.listen is not None, "it was asked for"
    log.print(f"listening on {bench.listen}; end with Ctrl-C")
    try:
        for way in serve_receivers(bench.listen, bench.cluster_key):
            log.print(f"receiving over {way.name}")
    except ProtocolError as error:
        raise BadOption("--listen", bench.listen, str(error)) from error
    except KeyboardInterrupt:
        return 0
    return 0
