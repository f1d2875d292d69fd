"""What a benchmark ran on, for its record."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Machine:
    """``cores``: those that this process may use. ``load_1min``: of the machine, as the benchmark starts."""

    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    cpu: str = field(default_factory=lambda: _cpu_name())
    cores: list[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    load_1min: float = field(default_factory=lambda: os.getloadavg()[0])
    system: str = field(default_factory=lambda: f"{platform.system()} {platform.release()}")
    python: str = field(default_factory=platform.python_version)
    pdserve: str = field(default_factory=lambda: version("pdserve"))


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
