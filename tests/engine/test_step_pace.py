"""When the next step is queued behind the one under way."""

from __future__ import annotations

from math import inf

import pytest
from pdserve_engine.step_pace import LEAD_S, LEAD_SHARE, StepPace, StepTime


def test_the_first_step_is_begun_at_once_and_nothing_is_queued_behind_it() -> None:
    pace = StepPace()
    assert pace.queue_at == -inf
    pace.begun(8, 10.0)
    assert pace.queue_at == inf
    pace.ended(10.5, computed=True)
    assert pace.queue_at == -inf
    assert pace.last == StepTime(8, 0.5)


def test_a_step_like_the_last_one_is_expected_to_take_as_long() -> None:
    pace = StepPace()
    pace.begun(8, 10.0)
    pace.ended(10.5, computed=True)
    pace.begun(8, 11.0)
    assert pace.queue_at == pytest.approx(11.5 - LEAD_S - LEAD_SHARE * 0.5)
    pace.begun(8, 11.4)
    assert pace.queue_at == inf, "two are enough"


def test_of_an_unlike_step_nothing_is_expected() -> None:
    pace = StepPace()
    pace.begun(8, 10.0)
    pace.ended(10.5, computed=True)
    pace.begun(9, 11.0)
    assert pace.queue_at == inf


def test_a_queued_step_takes_its_time_from_the_end_of_the_one_before() -> None:
    pace = StepPace()
    pace.begun(8, 10.0)
    pace.begun(8, 10.1)
    pace.ended(10.5, computed=True)
    assert pace.last == StepTime(8, 0.5)
    assert pace.queue_at == pytest.approx(11.0 - LEAD_S - LEAD_SHARE * 0.5)
    pace.ended(11.25, computed=True)
    assert pace.last == StepTime(8, 0.75)


def test_a_step_that_failed_tells_nothing() -> None:
    pace = StepPace()
    pace.begun(8, 10.0)
    pace.ended(10.5, computed=True)
    pace.begun(8, 11.0)
    pace.begun(8, 11.1)
    pace.ended(11.2, computed=False)
    assert pace.last is None
    assert pace.queue_at == inf
