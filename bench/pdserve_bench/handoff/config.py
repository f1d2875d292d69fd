"""What `pdserve bench handoff` is asked for, from flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_bench.errors import BadOption

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class HandoffBench:
    """One run.

    Attributes:
        measures: of ``gap``, ``grants``, ``policies``, ``digests``.
        num_prompts: of each load; four times as many short ones where grants are measured.
        input_len, output_len: tokens.
        concurrency: requests under way at any time, where there is a load.
        repetitions: loads of each of what is compared with one another, in turns; as often as there are to compare.
        connector: of both nodes.
    """

    model: str
    measures: Sequence[str]
    num_prompts: int
    input_len: int
    output_len: int
    concurrency: int
    repetitions: int
    connector: str
    label: str
    json_path: Path | None


def handoff_options(args: argparse.Namespace) -> HandoffBench:
    """What the flags of ``pdserve bench handoff`` ask for.

    Raises:
        BadOption: a value that makes no sense.
    """
    least = (
        ("--num-prompts", args.num_prompts, 1),
        ("--input-len", args.input_len, 1),
        ("--output-len", args.output_len, 4),
        ("--concurrency", args.concurrency, 1),
        ("--repetitions", args.repetitions, 1),
    )
    for flag, value, at_least in least:
        if value < at_least:
            raise BadOption(flag, value, f"at least {at_least} is expected")
    return HandoffBench(
        model=args.model,
        measures=tuple(dict.fromkeys(args.measures)),
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        concurrency=args.concurrency,
        repetitions=args.repetitions,
        connector=args.kv_connector,
        label=args.label,
        json_path=args.json,
    )
