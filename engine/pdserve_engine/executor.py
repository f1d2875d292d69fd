"""Executor: where the forward passes of an engine happen."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pdserve_engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
    from pdserve_engine.worker import Worker


class Executor(Protocol):
    """Runs steps in order. The engine needs nothing else of the device."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Starts one step. Steps run in the order of the calls; a failed step fails its future."""
        ...

    def close(self) -> None:
        """Waits for the step under way and releases the device. Idempotent."""
        ...


class UniProcExecutor:
    """One worker in this process on a thread of its own, so that the engine loop answers messages while a step runs."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._thread.submit(self.worker.execute_model, scheduler_output)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
