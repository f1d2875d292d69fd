"""Flags -> what is asked for, checked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pdserve_protocol.door import CLUSTER_KEY_VARIABLE, check_door, cluster_key, parse_address
from pdserve_protocol.errors import AddressError, UnsafeDoor

from pdserve_bench.errors import BadOption
from pdserve_bench.kv.config import KvBench, Way
from pdserve_bench.kv.pushes import ROW_BYTES
from pdserve_bench.reports import check_plot_path

if TYPE_CHECKING:
    import argparse

    from pdserve_protocol.door import Address

DEFAULT_PORT = 7003


def kv_options(args: argparse.Namespace) -> KvBench:
    """What the flags of ``pdserve bench kv`` ask for.

    Raises:
        BadOption: a value that makes no sense.
    """
    numbers = [("--repetitions", args.repetitions)]
    numbers += [("--block-bytes", size) for size in args.block_bytes]
    numbers += [("--blocks", number) for number in args.blocks]
    numbers += [("--concurrency", number) for number in args.concurrency]
    for flag, value in numbers:
        if value < 1:
            raise BadOption(flag, value, "at least 1 is expected")
    for size in args.block_bytes:
        if size % ROW_BYTES:
            raise BadOption("--block-bytes", size, f"a multiple of {ROW_BYTES} is expected: K and V of one token")
    if args.connect and args.mooncake:
        raise BadOption("--mooncake", args.mooncake, "it is measured on one host only")
    check_plot_path(args.plot)
    key = cluster_key(args.cluster_key, os.environ)
    listen = _address("--listen", args.listen)
    if listen is not None:
        try:
            check_door(listen.host, key, args.insecure)
        except UnsafeDoor as error:
            raise BadOption("--listen", args.listen, f"{CLUSTER_KEY_VARIABLE} or --insecure is expected") from error
    return KvBench(
        ways=tuple(Way(*name.partition("/")[::2]) for name in args.connectors),
        block_bytes=tuple(args.block_bytes),
        num_blocks=tuple(args.blocks),
        concurrency=tuple(args.concurrency),
        wire_dtypes=tuple(args.wire_dtypes),
        repetitions=args.repetitions,
        listen=listen,
        connect=_address("--connect", args.connect),
        cluster_key=key,
        mooncake=args.mooncake,
        label=args.label,
        csv_path=args.csv,
        json_path=args.json,
        plot_path=args.plot,
    )


def _address(flag: str, text: str | None) -> Address | None:
    if text is None:
        return None
    try:
        return parse_address(text, DEFAULT_PORT)
    except AddressError as error:
        raise BadOption(flag, text, "HOST or HOST:PORT is expected") from error
