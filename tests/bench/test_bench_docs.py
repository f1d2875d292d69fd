"""The page of benchmarks: its commands are commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.command_lines import parse_command

PAGE = Path(__file__).parent.parent.parent / "docs" / "benchmarks.md"
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("line", LINES)
def test_every_command_exists(line: str) -> None:
    words = shlex.split(line.replace("$ROUTER", "1"))
    assert parse_command(words[words.index("pdserve") :]) is not None


def test_every_benchmark_is_there() -> None:
    assert all(any(f"pdserve bench {name}" in line for line in LINES) for name in ("serve", "kernels", "router"))
