"""Flags -> what is asked for, checked."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from pdserve_bench.errors import BadOption
from pdserve_bench.router.config import RouterBench

if TYPE_CHECKING:
    import argparse


def router_options(args: argparse.Namespace) -> RouterBench:
    """What the flags of ``pdserve bench router`` ask for.

    Raises:
        BadOption: a value that makes no sense.
    """
    for flag, value, least in (("--concurrency", args.concurrency, 1), ("--output-len", args.output_len, 3)):
        if value < least:
            raise BadOption(flag, value, f"at least {least} is expected")
    for flag, value in (("--step-ms", args.step_ms), ("--seconds", args.seconds)):
        if not 0 < value < math.inf:
            raise BadOption(flag, value, "a positive number is expected")
    cores = os.sched_getaffinity(0)
    if args.router_core is not None and args.router_core not in cores:
        raise BadOption("--router-core", args.router_core, f"this process may use {sorted(cores)}")
    return RouterBench(
        model=args.model,
        router_core=args.router_core,
        concurrency=args.concurrency,
        output_len=args.output_len,
        step_ms=args.step_ms,
        seconds=args.seconds,
        label=args.label,
        json_path=args.json,
    )
