"""Steps one after the other on a thread, and what happens to those behind a failed one."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace

import pytest
from pdserve_engine.errors import StepNotRun
from pdserve_engine.executor import UniProcExecutor
from pdserve_engine.scheduler_output import CachedRequestData, ModelRunnerOutput, SchedulerOutput

STEP = SchedulerOutput([], CachedRequestData(), {}, 0, {}, set())
QUEUED = replace(STEP, queued=True)


class Worker:
    """Waits until it may go on; fails when told."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.fails = False
        self.num_steps = 0

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        assert self.may_go_on.wait(5)
        if self.fails:
            raise MemoryError("no room")
        return ModelRunnerOutput({}, {})


def test_a_step_queued_behind_a_failed_one_is_not_run_and_the_next_is() -> None:
    worker = Worker()
    with closing(UniProcExecutor(worker)) as executor:  # type: ignore[arg-type]
        worker.fails = True
        first, second, third = (executor.execute_model(step) for step in (STEP, QUEUED, QUEUED))
        worker.may_go_on.set()
        assert isinstance(first.exception(5), MemoryError)
        assert isinstance(second.exception(5), StepNotRun)
        assert isinstance(third.exception(5), StepNotRun)
        assert worker.num_steps == 1
        worker.fails = False
        assert executor.execute_model(STEP).result(5) == ModelRunnerOutput({}, {})
        assert executor.execute_model(QUEUED).result(5) == ModelRunnerOutput({}, {})
    with pytest.raises(RuntimeError):
        executor.execute_model(STEP)
