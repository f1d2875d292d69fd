"""From the parsed flags of ``pdserve bench`` to an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

_FILE_WIDTH = 140


def run_bench(args: argparse.Namespace, *, console: Console, log: Console) -> int:
    """Runs the benchmark of ``args``. Each imports only what it needs: the load generator does without torch.

    Args:
        console: the result goes here.
        log: progress goes here.

    Raises:
        BenchError: nothing could be measured.
    """
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    if args.benchmark == "serve":
        from pdserve_bench.serve.options import serve_options
        from pdserve_bench.serve.run import bench_serve

        return bench_serve(serve_options(args), console=console, log=log)
    if args.benchmark == "router":
        from pdserve_bench.router.options import router_options
        from pdserve_bench.router.run import bench_router

        return bench_router(router_options(args), console=console, log=log)
    if args.benchmark == "kv":
        from pdserve_bench.kv.options import kv_options
        from pdserve_bench.kv.run import bench_kv

        return bench_kv(kv_options(args), console=console, log=log)
    if args.benchmark == "handoff":
        from pdserve_bench.handoff.config import handoff_options
        from pdserve_bench.handoff.run import bench_handoff

        return bench_handoff(handoff_options(args), console=console, log=log)
    from pdserve_bench.kernels.options import kernels_options
    from pdserve_bench.kernels.run import bench_kernels

    return bench_kernels(kernels_options(args), console=console, log=log)
