"""Asks a prefill and a decode node everything twice, plain and streamed, and compares every word.

    python tests/streams.py 300                     the demo model
    python tests/streams.py 300 --model FOLDER      another one

It exits 0 if no two answers differ: in text, calls, log probabilities, reason of the end or usage.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.progress import Progress
from support.cluster import Cluster
from support.streams import asks, compare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, nargs="?", default=300, help="requests (default: %(default)s)")
    parser.add_argument("--model", default="smollm2", help="what a node takes (default: %(default)s)")
    parser.add_argument("--calls", action="store_true", help="function calls too: the model can be told of tools")
    parser.add_argument("--concurrency", type=int, default=8, help="default: %(default)s")
    args = parser.parse_args()
    node_args = ["--max-model-len", "1024", "--kv-cache-memory", "128MiB"]
    with (
        tempfile.TemporaryDirectory(prefix="streams-") as folder,
        Cluster(model=args.model, folder=Path(folder), node_args=node_args) as cluster,
        Progress() as progress,
    ):
        task = progress.add_task("requests, each twice", total=args.number)
        tally = compare(
            cluster,
            asks(args.number, calls=args.calls),
            concurrency=args.concurrency,
            on_end=lambda: progress.advance(task),
        )
        cluster.wait_until_idle()
    print(f"{tally.total} requests, plain and streamed; ends: {dict(tally.ends)}")
    for different in tally.different[:20]:
        print("different:", different)
    print(f"{len(tally.different)} differ")
    return 1 if tally.different else 0


if __name__ == "__main__":
    sys.exit(main())
