"""A visitor who says more to a node's door than it can take."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING

import zmq
from pdserve_protocol.codec import encode
from pdserve_protocol.requests import AbortRequests

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def flooded(port: int) -> Iterator[None]:
    """From a thread of its own, until the block ends."""
    over = threading.Event()

    def flood() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger, dealer.sndtimeo = 0, 100
            dealer.connect(f"tcp://127.0.0.1:{port}")
            frames = itertools.cycle([encode(AbortRequests(ids=["unknown"]))] * 100 + [b"junk"])
            while not over.is_set():
                with contextlib.suppress(zmq.Again):
                    dealer.send(next(frames))

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
