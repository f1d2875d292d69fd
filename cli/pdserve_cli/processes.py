"""One child process: how it starts, says that it is ready, logs and ends. Knows nothing of nodes or routers.

A child is in a session of its own, so that Ctrl-C in a terminal reaches the parent alone, which then stops the children
in order; and it is tied to the parent's life (launch.py), so that no child outlives a parent that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve_cli.errors import ChildFailed, ChildNotReady

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping, Sequence

_LAUNCH = str(Path(__file__).with_name("launch.py"))
_MAX_LINE_BYTES = 1 << 20
_LAST_WORDS_S = 2.0
_AFTER_KILL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to run.

    Attributes:
        name: what log lines and errors call it.
        argv: the program, by an absolute path, and its arguments.
        cores: it may run on these alone; None leaves it free.
        env: added to this process's environment.
    """

    name: str
    argv: Sequence[str]
    cores: Sequence[int] | None = None
    env: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A running child. Make one with ``start_child``.

    Attributes:
        name: of its command.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, on_line: Callable[[str, str], None]) -> None:
        self.name = name
        self._process = process
        self._on_line = on_line
        self._out: asyncio.Queue[str | None] = asyncio.Queue()
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self._out.put_nowait)),
            asyncio.create_task(self._read(process.stderr, self._show)),
        ]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N where signal N ended it."""
        return self._process.returncode

    async def ready(self, line: re.Pattern[str], timeout: float) -> re.Match[str]:
        """Waits for a line of its standard output that ``line`` matches. Other lines are shown as log lines.

        Raises:
            ChildFailed: it ended before.
            ChildNotReady: it said no such thing within ``timeout`` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                while (text := await self._out.get()) is not None:
                    if match := line.search(text):
                        return match
                    self._show(text)
                code = await self.ended()
        except TimeoutError as error:
            raise ChildNotReady(self.name, timeout) from error
        raise ChildFailed(self.name, code, "before it was ready")

    async def ended(self) -> int:
        """Waits for its end, and for the last of its log; returns the exit code."""
        code = await self._process.wait()
        # A grandchild may hold the pipes open; its words are not waited for.
        await asyncio.wait(self._readers, timeout=_LAST_WORDS_S)
        return code

    async def stop(self, timeout: float) -> int:
        """SIGTERM; SIGKILL after ``timeout`` seconds. Returns the exit code. Idempotent.

        Raises:
            ChildNotReady: not even SIGKILL ended it.
        """
        if self.exit_code is None:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(timeout):
                    await self._process.wait()
            except TimeoutError:
                self._show(f"(did not stop within {timeout:g} s and was killed)")
                self.kill()
        try:
            async with asyncio.timeout(_AFTER_KILL_S):
                code = await self.ended()
        except TimeoutError as error:
            raise ChildNotReady(f"the end of {self.name} (pid {self.pid})", _AFTER_KILL_S) from error
        finally:
            for reader in self._readers:
                reader.cancel()
        return code

    def kill(self) -> None:
        """SIGKILL, now."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            self._process.send_signal(number)

    def _show(self, line: str | None) -> None:
        if line is not None:
            self._on_line(self.name, line)

    async def _read(self, stream: asyncio.StreamReader | None, put: Callable[[str | None], None]) -> None:
        """Lines of a pipe to ``put``, then None."""
        assert stream is not None, "started with pipes"
        while True:
            try:
                data = await stream.readline()
            except ValueError:
                put(f"(a line of more than {_MAX_LINE_BYTES} bytes is not shown)")
                continue
            if not data:
                put(None)
                return
            put(data.decode("utf-8", "replace").rstrip("\r\n"))


async def start_child(command: Command, on_line: Callable[[str, str], None]) -> Child:
    """Starts a child.

    Args:
        on_line: called with (name, line) for every line that it logs.

    Raises:
        OSError: the program cannot be started.
    """
    cores = ",".join(map(str, command.cores)) if command.cores else "-"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        _LAUNCH,
        str(os.getpid()),
        cores,
        *command.argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **command.env},
        start_new_session=True,
        limit=_MAX_LINE_BYTES,
    )
    return Child(command.name, process, on_line)
