"""Children on cores of their own, each with a line on stdout when it is ready."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

from pdserve_bench.errors import ServerNotUsable

if TYPE_CHECKING:
    from collections.abc import Sequence

_STOP_S = 10.0
_READY_S = 20.0


class Child:
    """A Python module as a process. Use as a context manager: it ends with the block.

    Attributes:
        ready_line: the first thing it said.
    """

    def __init__(self, module: str, args: Sequence[str], cores: set[int]) -> None:
        """Starts it and waits until it is ready.

        Raises:
            ServerNotUsable: it ended instead.
        """
        ours = os.sched_getaffinity(0)
        # A child inherits the cores of the thread that starts it, and all its threads do.
        os.sched_setaffinity(0, cores)
        try:
            self._process = subprocess.Popen([sys.executable, "-m", module, *args], stdout=subprocess.PIPE, text=True)
        finally:
            os.sched_setaffinity(0, ours)
        assert self._process.stdout is not None
        self.ready_line = self._process.stdout.readline().strip()
        if not self.ready_line:
            self.close()
            raise ServerNotUsable(module, f"it ended with {self._process.returncode}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """SIGKILL: none of them has anything to lose."""
        self._process.kill()
        self._process.wait(_STOP_S)
        if self._process.stdout is not None:
            self._process.stdout.close()


def wait_until_ready(port: int) -> None:
    """Until a router on this machine has a prefill and a decode node that can work together.

    Raises:
        ServerNotUsable: it has not in time.
    """
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_READY_S)
        connection.request("GET", "/health")
        answer = json.loads(connection.getresponse().read())
        connection.close()
        if answer["pair"]:
            connection.request("GET", "/ready")
            is_ready = connection.getresponse().status == 200
            connection.close()
            if is_ready:
                return
        time.sleep(0.05)
    raise ServerNotUsable(f"127.0.0.1:{port}", f"not ready within {_READY_S:g} s")
