"""Flags -> what is asked for, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_bench.errors import BadOption
from pdserve_bench.kernels.config import KernelsBench

if TYPE_CHECKING:
    import argparse


def kernels_options(args: argparse.Namespace) -> KernelsBench:
    """What the flags of ``pdserve bench kernels`` ask for.

    Raises:
        BadOption: a value that makes no sense.
    """
    numbers = [("--threads", args.threads), ("--context", args.context), ("--repetitions", args.repetitions)]
    numbers += [("--batch-sizes", size) for size in args.batch_sizes]
    numbers += [("--prefill-lens", length) for length in args.prefill_lens]
    for flag, value in numbers:
        if value < 1:
            raise BadOption(flag, value, "at least 1 is expected")
    return KernelsBench(
        model=args.model,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        backend=args.backend,
        baseline=args.baseline if args.baseline != "none" else None,
        threads=args.threads,
        batch_sizes=tuple(args.batch_sizes),
        context=args.context,
        prefill_lens=tuple(args.prefill_lens),
        repetitions=args.repetitions,
        label=args.label,
        json_path=args.json,
        plot_path=args.plot,
    )
