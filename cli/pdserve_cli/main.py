"""The ``pdserve`` command: from a command line to an exit code."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from pdserve_bench.errors import BenchError
from pdserve_bench.main import run_bench
from pdserve_protocol.door import PREFILL_PORT, cluster_key, parse_address
from pdserve_protocol.errors import AddressError, PortTaken, ProtocolError
from rich.console import Console

from pdserve_cli.args import build_parser, demo_config, serve_config
from pdserve_cli.errors import CliError
from pdserve_cli.node import reset_cache, show_status

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        sys.exit(_run(args))
    except KeyboardInterrupt:
        sys.exit(130)
    except (CliError, BenchError) as error:
        _fail(error, error.exit_code)
    except (ProtocolError, OSError) as error:
        _fail(error, 2 if isinstance(error, AddressError | PortTaken) else 1)


def _fail(error: Exception, exit_code: int) -> None:
    print(f"pdserve: {error}", file=sys.stderr)
    sys.exit(exit_code)


def _run(args: argparse.Namespace) -> int:
    console, log = Console(), Console(stderr=True)
    # aiohttp comes with the router; asking a node works without it.
    if args.command == "serve":
        from pdserve_cli.serve import serve

        return asyncio.run(serve(serve_config(args), console=console, log=log))
    if args.command == "demo":
        from pdserve_cli.demo import demo

        return asyncio.run(demo(demo_config(args), model=args.model, console=console, log=log))
    if args.command == "bench":
        return run_bench(args, console=console, log=log)
    addresses = [parse_address(text, PREFILL_PORT) for text in args.address]
    key, timeout = cluster_key(args.cluster_key, os.environ), args.timeout
    if args.verb == "status":
        work = show_status(addresses, cluster_key=key, timeout=timeout, as_json=args.json, console=console)
    else:
        work = reset_cache(addresses, cluster_key=key, timeout=timeout, console=console)
    return asyncio.run(work)


if __name__ == "__main__":
    main()
