"""The page of benchmarks: its commands are commands."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.command_lines import parse_command

PAGE = Path(__file__).parent.parent.parent / "docs" / "benchmarks.md"
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("line", LINES)
def test_every_command_exists(line: str) -> None:
    words = shlex.split(re.sub(r"\$(ROUTER|PREFILL|DECODE)\b", "1", line), comments=True)
    if "-m" in words:
        assert find_spec(words[words.index("-m") + 1]) is not None
        return
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (PAGE.parent.parent / "Makefile").read_text(), re.MULTILINE)
        return
    start = words.index("pdserve") if "pdserve" in words else 0
    assert parse_command(words[start:]) is not None


def test_every_benchmark_is_there() -> None:
    assert all(any(f"pdserve bench {name}" in line for line in LINES) for name in ("serve", "kernels", "router"))
