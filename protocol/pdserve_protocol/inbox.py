"""What a thread of a node sleeps on: one reader, any number of writers."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """A queue whose reader also has things to do at a time of its own, however soon that is.

    ``queue.SimpleQueue`` is not used for that: CPython 3.11's computes anew how long is left, waits for ever where that
    is less than nothing, and so may never return from a ``get`` of some microseconds.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        # Held, except when something may have come since the reader last looked.
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def put(self, item: Item) -> None:
        """From any thread, and from a signal handler."""
        self._items.append(item)
        with suppress(RuntimeError):  # It is free already: the reader is about to look.
            self._quiet.release()

    def get(self, timeout: float | None = None) -> Item:
        """The oldest item.

        Args:
            timeout: seconds to wait for one; None waits for ever.

        Raises:
            queue.Empty: none has come in time.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self._items:
            left = -1.0 if until is None else max(until - time.monotonic(), 0.0)
            if not self._quiet.acquire(timeout=left) and not self._items:
                raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Item:
        """The oldest item. Raises queue.Empty where there is none."""
        return self.get(0.0)
