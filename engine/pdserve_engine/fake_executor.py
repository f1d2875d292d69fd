"""FakeExecutor: an oracle whose steps end when the test says so, or fail."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from pdserve_engine.errors import ContractBroken, StepNotRun, WrongKV
from pdserve_engine.oracle import OracleWorker

if TYPE_CHECKING:
    from pdserve_engine.scheduler_output import ModelRunnerOutput, SchedulerOutput


class FakeExecutor:
    """Executor over an OracleWorker.

    Args:
        manual: steps wait for ``complete`` (the device is slow); otherwise ``execute_model`` returns them done.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, *, manual: bool = False) -> None:
        self.worker = OracleWorker(num_blocks, block_size, vocab_size)
        self.manual = manual
        self._pending: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._error: Exception | None = None
        self._failed = False

    @property
    def num_steps(self) -> int:
        return self.worker.num_steps

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        self._pending.append((scheduler_output, future))
        if not self.manual:
            self.complete()
        return future

    def close(self) -> None:
        while self._pending:
            self.complete()

    def complete(self) -> None:
        """Computes the oldest step that waits; only now does it read and write the KV cache."""
        scheduler_output, future = self._pending.popleft()
        if scheduler_output.queued and self._failed:
            future.set_exception(StepNotRun())
            return
        try:
            future.set_result(self._run(scheduler_output))
            self._failed = False
        except (WrongKV, ContractBroken, FakeDeviceError) as error:
            self._failed = True
            future.set_exception(error)

    def fail_next(self, message: str) -> None:
        """Lets the next step fail before it does anything."""
        self._error = FakeDeviceError(message)

    def read_block(self, block_id: int) -> bytes:
        """Content of a block, as a sender of KV reads it."""
        content: bytes = self.worker.kv_bytes()[block_id].tobytes()
        return content

    def write_block(self, block_id: int, content: bytes) -> None:
        """Replaces the content of a block, as a receiver of KV does."""
        self.worker.kv_bytes()[block_id][:] = bytearray(content)

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.worker.execute_model(step)


class FakeDeviceError(RuntimeError):
    """The failure that ``fail_next`` asked for."""
