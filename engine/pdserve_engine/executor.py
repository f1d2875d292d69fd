"""Executor: where the forward passes of an engine happen."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from pdserve_engine.errors import StepNotRun

if TYPE_CHECKING:
    from pdserve_kv_transfer.cache_memory import Cache
    from pdserve_protocol.node import KVLayout

    from pdserve_engine.grammar import Grammars
    from pdserve_engine.scheduler_output import ModelRunnerOutput, SchedulerOutput


class WorkerBase(Protocol):
    """What computes: one model on one device. ``Worker`` says what the attributes are."""

    layout: KVLayout
    num_blocks: int
    weight_bytes: int
    model_id: str
    numerics: str
    vocab_size: int
    max_model_len: int
    end_token_ids: tuple[int, ...]
    grammars: Grammars | None

    def kv_bytes(self) -> Cache:
        """The memory of the KV cache itself, [num_blocks, block_bytes], writable."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput, /) -> ModelRunnerOutput:
        """Computes one step; steps must not overlap."""
        ...


class Executor(Protocol):
    """Runs steps in order. The engine needs nothing else of the device."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Takes one step. Steps run in the order of the calls, one after the other; a failed step fails its future.

        A step with ``queued`` set whose predecessor failed, or was itself not run, is not run either: its future fails
        with StepNotRun, and the device is as the failed step left it.
        """
        ...

    def close(self) -> None:
        """Waits for the steps under way and releases the device. Idempotent."""
        ...


class UniProcExecutor:
    """One worker in this process on a thread of its own, so that the engine loop answers messages while a step runs."""

    def __init__(self, worker: WorkerBase) -> None:
        self.worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._failed = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._thread.submit(self._run, scheduler_output)

    def _run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if scheduler_output.queued and self._failed:
            raise StepNotRun
        self._failed = True
        output = self.worker.execute_model(scheduler_output)
        self._failed = False
        return output

    def close(self) -> None:
        self._thread.shutdown(wait=True)
