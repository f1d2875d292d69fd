"""``pdserve bench kv`` with small blocks: all ways, files, another host, and what it divides by."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pdserve_bench.errors import BadOption, ProcessFailed
from pdserve_bench.kv.config import Point, Way
from pdserve_bench.kv.messages import Sample, SenderTask
from pdserve_bench.kv.options import kv_options
from pdserve_bench.kv.processes import samples
from pdserve_bench.kv.pushes import cache_of, pieces_of, wire_of
from pdserve_bench.kv.results import results_of
from pdserve_cli.args import build_parser
from pdserve_cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve_bench.kv.config import KvBench

SMALL = ["--block-bytes", "8192", "--blocks", "2", "5", "--concurrency", "1", "2", "--repetitions", "2"]


def options(*words: str) -> KvBench:
    return kv_options(build_parser().parse_args(["bench", "kv", *words]))


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "kv", *words])
    assert end.value.code == 0


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, result, page = tmp_path / "kv.csv", tmp_path / "kv.json", tmp_path / "kv.png"
    files = ["--csv", str(table), "--json", str(result), "--plot", str(page)]
    wires = ["--wire-dtypes", "auto", "int8"]
    run("--connectors", "nixl", "tcp", *SMALL, *wires, *files)
    out = capsys.readouterr().out
    assert "raw NIXL, one buffer" in out
    assert "mover: int8 on the wire" in out
    assert page.read_bytes().startswith(b"\x89PNG")
    found = json.loads(result.read_bytes())["result"]
    assert {(row["way"], row["what"]) for row in found} == {
        *((way, what) for way in ("nixl", "tcp") for what in ("memcpy", "socket", "connector", "mover auto")),
        *(("nixl", "nixl"), ("nixl", "mover int8"), ("tcp", "mover int8")),
    }
    assert all(row["seconds"]["count"] == 2 for row in found)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == len(found) == 4 * (6 + 5)
    [row] = [
        row
        for row in rows
        if (row["connector"], row["what"], row["blocks"], row["concurrency"]) == ("tcp", "connector", "5", "2")
    ]
    assert float(row["bytes_per_s"]) == pytest.approx(10 * 8192 / float(row["p50_s"]))


@pytest.mark.slow
def test_two_hosts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CLUSTER_KEY", "secret")
    command = [sys.executable, "-m", "pdserve_cli.main", "bench", "kv", "--listen", "127.0.0.1:17003"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as other:
        try:
            assert other.stderr is not None
            assert "listening on 127.0.0.1:17003" in other.stderr.readline()
            words = ["--connectors", "tcp", *SMALL, "--connect", "127.0.0.1:17003"]
            run(*words)
            assert "receiving over tcp" in other.stderr.readline()
        finally:
            other.terminate()
    assert "connector, write only" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        *(["--blocks", "0"], ["--block-bytes", "1000"], ["--repetitions", "0"], ["--connect", "h:port"]),
        *(["--listen", "0.0.0.0"], ["--plot", "kv.gif"], ["--connect", "h", "--mooncake", "python"]),
    ],
)
def test_what_cannot_be_is_told(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_CLUSTER_KEY", raising=False)
    with pytest.raises(BadOption, match=words[-2]):
        options(*words)


def test_ways() -> None:
    assert options().ways == (Way("nixl"), Way("nixl", "tcp"), Way("tcp"))
    assert [way.name for way in options().ways] == ["nixl", "nixl/tcp", "tcp"]


@pytest.mark.slow
def test_a_sender_that_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    task = SenderTask(
        way=Way("pigeon"), host="127.0.0.1", port=9, points=[Point(8192, 1, 1)], wire_dtypes=[], repetitions=1
    )
    with pytest.raises(ProcessFailed):
        list(samples(task, None))
    assert "pigeon" in capfd.readouterr().err


def test_ratios_are_within_repetitions() -> None:
    point = Point(1000, 2, 1)
    found = [("memcpy", 1.0), ("connector", 2.0), ("memcpy", 3.0), ("connector", 12.0), ("memcpy", 5.0)]
    found += [("connector", 15.0)]
    memcpy, connector = results_of(Way("tcp"), [Sample(what, point, seconds) for what, seconds in found], {})
    assert memcpy.over == {}
    assert connector.over == {"memcpy": pytest.approx(1 / 3)}
    assert connector.bytes_per_s == pytest.approx(2000 / 12)


def test_blocks_and_slots_lie_apart_and_are_all_there() -> None:
    point = Point(512, 3, 4)
    writes = pieces_of(point)
    assert [len(pieces) for pieces in writes] == [3] * 4
    blocks, slots = zip(*(piece for pieces in writes for piece in pieces), strict=True)
    assert sorted(blocks) == sorted(slots) == list(range(0, 24, 2))
    assert cache_of(512, point.total_blocks).shape == (24, 512)
    assert wire_of(512, "auto").slot_bytes == 512
    assert wire_of(512, "int8").slot_bytes == 256 + 4 * 4
