"""A short `make chaos`: the oracle's nodes under faults and kills, over both connectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import chaos
import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("connector", ["nixl", "tcp"])
def test_every_request_ends_and_no_wrong_entry_is_read(connector: str, tmp_path: Path) -> None:
    args = chaos.parse(["--requests", "1200", "--kill-every", "3", "--kv-connector", connector])
    assert chaos.run(args, tmp_path) == 0
