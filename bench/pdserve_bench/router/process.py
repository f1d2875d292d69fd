"""Children on cores of their own, each with a line on stdout when it is ready."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Self

from pdserve_bench.errors import ServerNotUsable

if TYPE_CHECKING:
    from collections.abc import Sequence

_STOP_S = 10.0


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
