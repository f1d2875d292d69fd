"""Flags -> what is asked for, checked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve_bench.errors import BadOption
from pdserve_bench.serve.config import Beside, ClosedLoop, OpenLoop, ServeBench
from pdserve_bench.serve.lengths import parse_lengths
from pdserve_bench.serve.slo import parse_slo

if TYPE_CHECKING:
    import argparse


def serve_options(args: argparse.Namespace) -> ServeBench:
    """What the flags of ``pdserve bench serve`` ask for.

    Raises:
        BadOption: a value that makes no sense.
    """
    at_least = (("--num-prompts", 1), ("--warmup", 0), ("--concurrency", 1), ("--tokenizer-vocab", 1))
    for flag, least in at_least:
        value = _value(args, flag)
        if value is not None and value < least:
            raise BadOption(flag, value, f"at least {least} is expected")
    for flag in ("--request-rate", "--burstiness", "--timeout"):
        value = _value(args, flag)
        if value is not None and not 0 < value < math.inf:
            raise BadOption(flag, value, "a positive number is expected")
    if args.request_rate is None:
        load: OpenLoop | ClosedLoop = ClosedLoop(concurrency=args.concurrency or 1)
    else:
        load = OpenLoop(rate=args.request_rate, process=args.arrivals, burstiness=args.burstiness)
    return ServeBench(
        url=args.url.rstrip("/").removesuffix("/v1"),
        model=args.model,
        endpoint=args.endpoint,
        load=load,
        num_prompts=args.num_prompts,
        input_lengths=parse_lengths(args.input_len, "--input-len"),
        output_lengths=parse_lengths(args.output_len, "--output-len"),
        vocab_size=args.tokenizer_vocab,
        prompt_file=args.prompts,
        num_warmup=args.warmup,
        beside=_beside(args.beside) if args.beside else None,
        seed=args.seed,
        temperature=args.temperature,
        extra_body=_object("--extra-body", args.extra_body),
        timeout_s=args.timeout,
        objectives=parse_slo(args.slo),
        watch_pids=tuple(args.watch_pid),
        label=args.label,
        json_path=args.json,
        plot_path=args.plot,
    )


def _object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text is not None else {}
    except msgspec.DecodeError as error:
        raise BadOption(flag, text, "a JSON object is expected") from error


def _value(args: argparse.Namespace, flag: str) -> float | None:
    value: float | None = getattr(args, flag.removeprefix("--").replace("-", "_"))
    return value


def _beside(text: str) -> Beside:
    numbers = text.split(",")
    if len(numbers) != 3 or not all(number.isascii() and number.isdigit() and int(number) for number in numbers):
        raise BadOption(
            "--beside", text, "requests under way, prompt tokens and output tokens are expected, as 1,2000,16"
        )
    concurrency, input_len, output_len = map(int, numbers)
    return Beside(concurrency=concurrency, input_len=input_len, output_len=output_len)
