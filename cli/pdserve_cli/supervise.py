"""Runs a fleet for as long as some work takes, and stops it whatever happens: an error, Ctrl-C, SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from pdserve_cli.fleet import Fleet


class Interrupted(Exception):
    """A signal asked for the end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Signals:
    """SIGINT and SIGTERM of this process, one by one. Make it on the main thread, in a running event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._queue.put_nowait, number)

    async def next(self) -> signal.Signals:
        return await self._queue.get()

    def close(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


async def unless_signalled(work: Coroutine[Any, Any, int], signals: Signals) -> int:
    """The work's result.

    Raises:
        Interrupted: a signal came first; the work has been cancelled.
    """
    task, signalled = asyncio.create_task(work), asyncio.create_task(signals.next())
    try:
        await asyncio.wait((task, signalled), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Interrupted(signalled.result())
    finally:
        task.cancel()
        signalled.cancel()
        await asyncio.gather(task, signalled, return_exceptions=True)


async def supervise(
    fleet: Fleet, work: Callable[[Fleet], Coroutine[Any, Any, int]], *, on_stopping: Callable[[], None]
) -> int:
    """Starts the fleet, does the work, stops the fleet; returns what the work returned.

    Raises:
        Interrupted: a signal ended it; a second one while it was stopping killed what was left.
        CliError: what ``start`` or the work raised.
    """
    signals = Signals()

    async def start_and_work() -> int:
        await fleet.start()
        return await work(fleet)

    try:
        return await unless_signalled(start_and_work(), signals)
    finally:
        on_stopping()
        await _stop(fleet.stop(), signals, fleet.kill)
        signals.close()


async def _stop(stopping: Awaitable[object], signals: Signals, kill: Callable[[], None]) -> None:
    task = asyncio.ensure_future(stopping)
    signalled = asyncio.create_task(signals.next())
    await asyncio.wait((task, signalled), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        kill()
    signalled.cancel()
    await asyncio.gather(signalled, return_exceptions=True)
    await task
