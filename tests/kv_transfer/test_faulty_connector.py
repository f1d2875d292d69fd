"""Faults as an operator asks for them, and that each of them is what it says."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pdserve_kv_transfer.connector import Network
from pdserve_kv_transfer.connectors import ConnectorSpec, default_connectors, make_connector, parse_connectors
from pdserve_kv_transfer.errors import BadConnectorSpec, ConnectorMissing, RegionUnreachable, WriteFault
from pdserve_kv_transfer.faults import Faults, parse_faults
from pdserve_kv_transfer.faulty import REORDER_S, FaultySource
from pdserve_kv_transfer.loopback import LOOPBACK
from pdserve_protocol.handoff import Region
from support.docs import code_of
from support.movers import cache_of

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_BLOCKS = 64
BLOCK_BYTES = 64
ALL = [(block, block) for block in range(NUM_BLOCKS)]


class Drill:
    """A faulty source over loopback, with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cache = cache_of(NUM_BLOCKS, BLOCK_BYTES, seed=9)
        self.memory = cache_of(NUM_BLOCKS, BLOCK_BYTES)
        self.target = LOOPBACK.target()
        self.region = Region(
            name="r",
            num_slots=NUM_BLOCKS,
            slot_bytes=BLOCK_BYTES,
            metadata=self.target.open_region("r", self.memory),
        )

    def source(self, faults: Faults) -> FaultySource:
        self.memory[:] = 0
        source = FaultySource(LOOPBACK.source(self.cache), NUM_BLOCKS, faults, lambda: self.now)
        source.connect("d", self.region)
        return source

    def wrong(self) -> list[int]:
        """Slots that do not hold their block."""
        return [slot for slot in range(NUM_BLOCKS) if not np.array_equal(self.memory[slot], self.cache[slot])]


@pytest.fixture
def drill() -> Iterator[Drill]:
    drill = Drill()
    yield drill
    drill.target.close()


# ---- what is asked for ---------------------------------------------------------------------------------------------


def test_specs() -> None:
    assert parse_connectors("tcp") == [ConnectorSpec("tcp")]
    assert parse_connectors("nixl, tcp") == [ConnectorSpec("nixl"), ConnectorSpec("tcp")]
    assert parse_connectors("faulty:tcp?seed=7&corrupt=0.01&delay_ms=5,nixl") == [
        ConnectorSpec("tcp", Faults(seed=7, corrupt=0.01, delay_ms=5)),
        ConnectorSpec("nixl"),
    ]
    assert parse_connectors("faulty:loopback") == [ConnectorSpec("loopback", Faults())]
    assert parse_connectors(default_connectors())[-1] == ConnectorSpec("tcp")


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "tcp,", "tcp,tcp", "tcp,faulty:tcp", "good:tcp", "faulty:", "faulty:?drop=1", "faulty:tcp?drop"),
        *("faulty:tcp?drop=2", "faulty:tcp?drop=-1", "faulty:tcp?drop=nan", "faulty:tcp?seed=x", "faulty:tcp?dropp=1"),
    ],
)
def test_what_cannot_be_asked_for_is_told(text: str) -> None:
    with pytest.raises(BadConnectorSpec):
        parse_connectors(text)


def test_faults_are_written_as_they_are_read() -> None:
    text = "seed=7&delay_ms=5&corrupt=0.01&lose=0.5"
    assert str(parse_faults(text)) == text
    assert str(parse_faults("")) == ""


def test_a_drill_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_connector(ConnectorSpec("loopback", Faults(drop=0.5)), Network())
    assert "goes wrong on purpose: drop=0.5" in caplog.text


def test_another_distribution_adds_a_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    example = code_of("kv-connectors.md")["unix_connector"]

    class Point(importlib.metadata.EntryPoint):
        def load(self) -> object:
            return example

    points = [
        Point("unix", "your_package.unix:unix_connector", "pdserve.kv_connectors"),
        Point("tcp", "your_package.unix:unix_connector", "pdserve.kv_connectors"),
        importlib.metadata.EntryPoint("broken", "no_such_package:connector", "pdserve.kv_connectors"),
    ]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda *, group: points if group == "pdserve.kv_connectors" else []
    )
    made = make_connector(ConnectorSpec("unix"), Network())
    assert made.source.__name__ == "UnixSource"  # type: ignore[attr-defined]
    # Ours are not replaced.
    assert make_connector(ConnectorSpec("tcp"), Network()).source is not made.source
    with pytest.raises(ConnectorMissing, match="no_such_package"):
        make_connector(ConnectorSpec("broken"), Network())
    with pytest.raises(ConnectorMissing, match=r"there are broken, loopback, nixl, tcp, unix"):
        make_connector(ConnectorSpec("pigeon"), Network())


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def test_no_faults(drill: Drill) -> None:
    source = drill.source(Faults())
    assert source.poll(source.write("d", ALL))
    assert drill.wrong() == []


def test_delay(drill: Drill) -> None:
    source = drill.source(Faults(seed=1, delay_ms=100))
    handle = source.write("d", ALL)
    assert not source.poll(handle)
    assert not drill.memory.any()
    drill.now = 0.1
    assert source.poll(handle)
    assert drill.wrong() == []


def test_dropped_blocks_are_not_written_and_nobody_is_told(drill: Drill) -> None:
    source = drill.source(Faults(seed=1, drop=0.25))
    assert source.poll(source.write("d", ALL))
    wrong = drill.wrong()
    assert 5 < len(wrong) < 30
    assert not drill.memory[wrong].any()
    source = drill.source(Faults(drop=1.0))
    assert source.poll(source.write("d", ALL))
    assert not drill.memory.any()


def test_corrupt_blocks_are_others(drill: Drill) -> None:
    source = drill.source(Faults(seed=1, corrupt=0.25))
    assert source.poll(source.write("d", ALL))
    wrong = drill.wrong()
    assert 5 < len(wrong) < 30
    assert all(any(np.array_equal(drill.memory[slot], block) for block in drill.cache) for slot in wrong)


def test_a_doubled_write_comes_again_after_its_end(drill: Drill) -> None:
    source = drill.source(Faults(double=1.0))
    handle = source.write("d", [(3, 3)])
    drill.cache[3] = 1
    assert source.poll(handle)
    # What the block holds by then.
    assert (drill.memory[3] == 1).all()


def test_a_reordered_write_waits_for_a_later_one_or_a_while(drill: Drill) -> None:
    source = drill.source(Faults(seed=2, reorder=0.5))
    handles: list[int] = []
    while not handles or source.poll(handles[-1]):
        handles.append(source.write("d", [(len(handles), len(handles))]))
    held = len(handles) - 1
    assert not drill.memory[held].any()
    drill.now += REORDER_S
    assert source.poll(handles[-1])
    while source.poll(first := source.write("d", [(30, 30)])):
        pass
    while not source.poll(source.write("d", [(31, 31)])):
        drill.now += 0.0
    assert source.poll(first)


def test_a_stalled_write_never_ends(drill: Drill) -> None:
    source = drill.source(Faults(stall=1.0))
    handle = source.write("d", ALL)
    drill.now = 1e6
    assert not source.poll(handle)
    source.abandon(handle)
    source.disconnect("d")
    assert not drill.memory.any()


def test_a_failed_write_says_so(drill: Drill) -> None:
    source = drill.source(Faults(fail=1.0))
    handle = source.write("d", ALL)
    with pytest.raises(WriteFault):
        source.poll(handle)


def test_a_late_write_to_a_peer_that_has_gone_fails(drill: Drill) -> None:
    source = drill.source(Faults(delay_ms=10))
    handle = source.write("d", ALL)
    drill.target.fence("r")
    drill.now = 1.0
    with pytest.raises(RegionUnreachable):
        source.poll(handle)


def test_the_same_seed_is_the_same_drill(drill: Drill) -> None:
    def run(seed: int) -> list[int]:
        source = drill.source(Faults(seed=seed, corrupt=0.2, drop=0.1))
        assert source.poll(source.write("d", ALL))
        return drill.wrong()

    assert run(1) == run(1) != run(2)
