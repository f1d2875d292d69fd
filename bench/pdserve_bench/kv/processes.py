"""Senders and receivers as processes, here or on another host."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import msgspec
import zmq
from pdserve_protocol.codec import encode
from pdserve_protocol.door import CLUSTER_KEY_VARIABLE, Address, Door
from pdserve_protocol.errors import BadMessage

from pdserve_bench.errors import ProcessFailed
from pdserve_bench.kv.messages import RECEIVER_HEARS, Refused, Sample, Started, StartReceiver

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve_bench.kv.config import Way
    from pdserve_bench.kv.messages import SenderTask

HOST = "127.0.0.1"
END_S = 5.0


def _environment(way: Way, key: str | None) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if key is not None:
        env[CLUSTER_KEY_VARIABLE] = key
    if way.transports:
        env["UCX_TLS"] = way.transports
    return env


@contextmanager
def _process(arguments: Sequence[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A module of ours; it is ended with the context. Its stdin closes if this process dies."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)


@contextmanager
def receiver(way: Way, host: str, key: str | None) -> Iterator[int]:
    """A receiver on an address of this host; its port.

    Raises:
        ProcessFailed: it does not start.
    """
    with _process(["pdserve_bench.kv.receiver", host], _environment(way, key)) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line.isdigit():
            raise ProcessFailed("receiver", way.name)
        yield int(line)


def samples(task: SenderTask, key: str | None) -> Iterator[Sample]:
    """What a sender measures, as it does so.

    Raises:
        ProcessFailed: it has ended before it was through.
    """
    with _process(["pdserve_bench.kv.sender"], _environment(task.way, key)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        process.stdin.flush()
        for line in process.stdout:
            yield msgspec.json.decode(line, type=Sample)
        if process.wait(END_S):
            raise ProcessFailed("sender", task.way.name)


def serve_receivers(address: Address, key: str | None) -> Iterator[Way]:
    """Starts receivers for a run on another host, one at a time, until interrupted; yields what each is for.

    Raises:
        PortTaken, AddressError: the address cannot be listened on.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    door = Door(context, address.host, address.port, key)
    try:
        with ExitStack() as last:
            while True:
                identity, payload = door.socket.recv_multipart()
                try:
                    message = RECEIVER_HEARS.decode(payload)
                except BadMessage as error:
                    door.socket.send_multipart([identity, encode(Refused(reason=str(error)))])
                    continue
                if not isinstance(message, StartReceiver):
                    door.socket.send_multipart([identity, encode(Refused(reason="only StartReceiver is heard here"))])
                    continue
                last.close()
                port = last.enter_context(receiver(message.way, address.host, key))
                door.socket.send_multipart([identity, encode(Started(port=port))])
                yield message.way
    finally:
        door.close()
        context.destroy(linger=0)
