"""`pdserve bench handoff`: its options and tables, and one real run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pdserve_bench.errors import BadOption
from pdserve_bench.handoff.config import handoff_options
from pdserve_bench.handoff.measures import Digests, Grants, PolicyCost, num_requests
from pdserve_bench.handoff.view import digests_table, grants_table, policies_table
from pdserve_bench.stats import Distribution
from pdserve_cli.args import build_parser
from pdserve_cli.main import main
from support.models import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve_bench.handoff.config import HandoffBench

SOME = Distribution(count=2, mean=0.02, min=0.01, p50=0.02, p90=0.03, p99=0.03, max=0.03)


def options(*flags: str) -> HandoffBench:
    return handoff_options(build_parser().parse_args(["bench", "handoff", *flags]))


def test_options() -> None:
    bench = options("--measures", "gap", "gap", "digests", "--num-prompts", "9", "--repetitions", "2")
    assert bench.measures == ("gap", "digests")
    assert num_requests(bench, "gap") == 9
    assert num_requests(bench, "grants") == 36
    assert num_requests(bench, "policies") == 162
    assert num_requests(bench, "digests") == 72


@pytest.mark.parametrize(
    "flags", [("--num-prompts", "0"), ("--output-len", "3"), ("--concurrency", "0"), ("--repetitions", "0")]
)
def test_values_that_make_no_sense(flags: tuple[str, str]) -> None:
    with pytest.raises(BadOption):
        options(*flags)


def test_tables() -> None:
    bench = options()
    grants = grants_table(Grants(mean=0.002, p99_at_most=0.01, step=SOME, running=16))
    assert grants.rows[0][-1] == "0.50"
    cost = PolicyCost(
        policy="offer",
        reserved_block_seconds=1.0,
        reserved_most=3,
        ttft=SOME,
        gap=SOME,
        second=SOME,
        tokens_per_s=50.0,
    )
    digests = Digests(on=[96.0, 105.0], off=[100.0, 100.0])
    for table in (grants, policies_table(bench, [cost]), digests_table(digests)):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert [row[-1] for row in digests_table(digests).rows] == ["0.960", "1.050"]
    assert digests.ratio == pytest.approx((0.96 * 1.05) ** 0.5)


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    model, result = tiny_model(tmp_path / "tiny"), tmp_path / "handoff.json"
    flags = ["--model", str(model), "--measures", "grants", "--input-len", "40", "--output-len", "6"]
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "handoff", *flags, "--num-prompts", "5", "--json", str(result)])
    grants = json.loads(result.read_text())["result"]["grants"]
    assert 0 < grants["mean"] <= grants["p99_at_most"]
    assert grants["step"]["count"] > 0
