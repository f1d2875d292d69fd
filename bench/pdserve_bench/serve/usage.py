"""Processor time and memory of processes on this machine, as /proc tells them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve_bench.errors import BadOption

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """``cpu_s``: of all its threads, since it started. ``rss_bytes``: resident now, shared pages included."""

    pid: int
    name: str
    cpu_s: float
    rss_bytes: int


def process_usage(pid: int) -> ProcessUsage:
    """Of one process.

    Raises:
        BadOption: there is none.
    """
    folder = Path("/proc", str(pid))
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        command = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError as error:
        raise BadOption("--watch-pid", pid, "there is no such process") from error
    ticks = int(fields[11]) + int(fields[12])
    return ProcessUsage(
        pid=pid,
        name=_name([part.decode("utf-8", "replace") for part in command if part]),
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        rss_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


def _name(command: Sequence[str]) -> str:
    """The module that Python runs, or the program."""
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    programs = [Path(part).name for part in command[:2] if not part.startswith("-")]
    if len(programs) == 2 and programs[0].startswith("python"):
        return programs[1]
    return programs[0] if programs else "?"
