"""Mooncake over TCP: `python mooncake_peer.py NUM_BLOCKS BLOCK_BYTES REPETITIONS` prints a JSON list of seconds.

Runs in an interpreter of its own, which need not have pdserve: nothing but the standard library and Mooncake is
imported. Two processes; the sender writes blocks that lie apart in one call, and the first call is not counted.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from typing import Any

HOST = "127.0.0.1"


def start_engine(num_bytes: int) -> tuple[Any, mmap.mmap, int]:
    """An engine with one registered buffer, the buffer and its address."""
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
        raise SystemExit("Mooncake's engine does not start")
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, num_bytes, mmap.PAGESIZE):
        buffer[offset] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    if engine.register_memory(address, num_bytes):
        raise SystemExit("Mooncake's engine does not register the buffer")
    return engine, buffer, address


def receive(num_bytes: int) -> None:
    engine, _buffer, address = start_engine(num_bytes)
    print(json.dumps([engine.get_rpc_port(), address]), flush=True)
    sys.stdin.read()
    # The engine's threads do not end by themselves.
    os._exit(0)


def send(num_blocks: int, block_bytes: int, repetitions: int) -> None:
    num_bytes = 2 * num_blocks * block_bytes
    command = [sys.executable, __file__, "receive", str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        port, remote = next(json.loads(line) for line in receiver.stdout if line.startswith("["))
        engine, _buffer, local = start_engine(num_bytes)
        offsets = [2 * index * block_bytes for index in range(num_blocks)]
        locals_, remotes = [local + offset for offset in offsets], [remote + offset for offset in offsets]
        seconds = []
        for _ in range(repetitions + 1):
            start = time.perf_counter()
            if engine.batch_transfer_sync_write(f"{HOST}:{port}", locals_, remotes, [block_bytes] * num_blocks):
                raise SystemExit("Mooncake's engine does not write")
            seconds.append(time.perf_counter() - start)
        receiver.stdin.close()
    print(json.dumps(seconds[1:]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send(*map(int, sys.argv[1:4]))
