"""Distributions, lengths, arrivals, objectives: what holds for any values."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, strategies as st
from pdserve_bench.errors import BadOption
from pdserve_bench.serve.arrivals import arrival_times
from pdserve_bench.serve.lengths import LogNormal, Uniform, parse_lengths
from pdserve_bench.serve.records import RequestRecord
from pdserve_bench.serve.slo import Objective, keeps, parse_slo
from pdserve_bench.stats import distribution, moving_rate
from pdserve_bench.tables import number

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(values)
def test_percentiles_rise_and_stay_among_the_values(numbers: list[float]) -> None:
    found = distribution(numbers)
    assert found is not None
    assert min(numbers) == found.min <= found.p50 <= found.p90 <= found.p99 <= found.max == max(numbers)
    assert found.min <= found.mean <= found.max
    assert found.p50 == pytest.approx(statistics.median(numbers))


@given(values, st.randoms(use_true_random=False))
def test_the_order_of_values_means_nothing(numbers: list[float], random: Random) -> None:
    shuffled = random.sample(numbers, len(numbers))
    before, after = distribution(numbers), distribution(shuffled)
    assert before is not None
    assert after is not None
    assert (before.p50, before.p90, before.p99) == (after.p50, after.p90, after.p99)


def test_percentiles_of_a_known_row() -> None:
    found = distribution([float(value) for value in range(101)])
    assert found is not None
    assert (found.count, found.mean, found.p50, found.p90, found.p99) == (101, 50, 50, 90, 99)
    assert distribution([]) is None


@given(st.lists(st.floats(0, 100), max_size=30), st.floats(0.1, 10))
def test_rates_count_every_event_once(times: list[float], width: float) -> None:
    middles, rates = moving_rate(times, width)
    assert sum(rates) * width == pytest.approx(len(times))
    assert all(after - before == pytest.approx(width) for before, after in pairwise(middles))


@given(st.integers(0, 2**32))
def test_lengths_stay_where_they_were_asked_to(seed: int) -> None:
    random = Random(seed)
    assert parse_lengths("512", "--input-len").draw(random) == 512
    assert 3 <= parse_lengths("uniform:3-9", "--input-len").draw(random) <= 9
    assert parse_lengths("lognormal:2,3", "--input-len").draw(random) >= 1


def test_lengths_have_the_asked_distribution() -> None:
    random = Random(0)
    drawn = [LogNormal(median=500, sigma=0.5).draw(random) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(500, rel=0.05)
    assert statistics.stdev([math.log(length) for length in drawn]) == pytest.approx(0.5, rel=0.05)
    assert {Uniform(low=1, high=4).draw(random) for _ in range(200)} == {1, 2, 3, 4}


@pytest.mark.parametrize("text", ["", "0", "-1", "uniform:9-3", "uniform:0-3", "lognormal:0,1", "lognormal:5", "a"])
def test_lengths_without_meaning_are_refused(text: str) -> None:
    with pytest.raises(BadOption, match="--input-len"):
        parse_lengths(text, "--input-len")


@pytest.mark.parametrize(
    ("process", "burstiness", "deviation"),
    [("constant", 1.0, 0.0), ("poisson", 9.0, 1.0), ("gamma", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)],
)
def test_arrivals(process: str, burstiness: float, deviation: float) -> None:
    times = arrival_times(8000, 5.0, process, burstiness, Random(1))  # type: ignore[arg-type]
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(gaps) / 0.2 == pytest.approx(deviation, rel=0.06, abs=1e-6)


def test_objectives() -> None:
    objectives = parse_slo("ttft:500ms, itl:50ms,e2e:2s")
    assert objectives[0] == Objective(what="ttft", limit_s=0.5)
    record = RequestRecord(due=10.0, sent=10.0, token_times=[10.4, 10.44], ended=10.5, num_output_tokens=2)
    assert keeps(record, objectives)
    record.token_times = [10.4, 10.46]
    assert not keeps(record, objectives)
    record.token_times = [10.51]
    assert not keeps(record, objectives)
    record.token_times = [10.5]
    assert keeps(record, objectives), "one token has no gaps to be too long"
    record.error = "timeout"
    assert not keeps(record, objectives)
    assert parse_slo("") == ()


@pytest.mark.parametrize("text", ["ttft", "ttft:500", "ttft:fast", "speed:5ms", "ttft:5ms;itl:5ms"])
def test_objectives_without_meaning_are_refused(text: str) -> None:
    with pytest.raises(BadOption, match="--slo"):
        parse_slo(text)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0, "0"), (0.01234, "0.0123"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text
