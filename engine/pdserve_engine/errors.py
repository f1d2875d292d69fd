"""Errors of the engine.

EngineError
├── RequestRejected     the engine cannot take this request; carries the protocol's error code
│   ├── DoesNotFit      it is longer than the context or the KV cache
│   └── BadRequest      a field has a value that the engine cannot work with
├── DeviceSetupError    a worker that cannot start as configured
│   ├── NoRoomForCache  the KV cache would not hold one block
│   ├── ContextTooLong  more positions than the model was made for
│   ├── NoKernels       no kernel backend computes as configured
│   └── NoCudaDevice    a CUDA device was asked for, and torch sees none
├── UntrustedNetwork    KV would travel off loopback, and nobody has said that the network may see it
├── GenerationFailed    the device failed under the offline API
├── StepNotRun          a step that was queued behind one that failed
├── ContractBroken      a step that contradicts what the executor was told before
└── WrongKV             an entry of the KV cache is not what the sequence says it is (fake executor only)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve_protocol.outputs import ErrorCode


class EngineError(Exception):
    """Base of all errors of this package."""


class RequestRejected(EngineError):
    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message


class DoesNotFit(RequestRejected):
    def __init__(self, num_tokens: int, limit: int, what: str) -> None:
        super().__init__(
            "does_not_fit", f"{num_tokens} tokens of prompt and output exceed the {what} of {limit} tokens"
        )


class BadRequest(RequestRejected):
    def __init__(self, message: str) -> None:
        super().__init__("bad_request", message)


class DeviceSetupError(EngineError):
    """Base of what keeps a worker from starting."""


class NoRoomForCache(DeviceSetupError):
    def __init__(self, memory_bytes: int, block_bytes: int) -> None:
        super().__init__(f"{memory_bytes} bytes for the KV cache do not hold one block of {block_bytes} bytes")


class ContextTooLong(DeviceSetupError):
    def __init__(self, max_model_len: int, limit: int) -> None:
        super().__init__(f"max_model_len {max_model_len} exceeds the {limit} positions that the model was made for")


class NoKernels(DeviceSetupError):
    """``reason``: in the words of the kernels."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class NoCudaDevice(DeviceSetupError):
    def __init__(self) -> None:
        super().__init__("--device cuda: torch sees no CUDA device; is this a CUDA build of torch, and a driver there?")


class UntrustedNetwork(EngineError):
    def __init__(self, host: str) -> None:
        super().__init__(
            f"--host {host} lets KV blocks travel off this machine, unencrypted: if the network is trusted, say so "
            "with --kv-trusted-network, or use --kv-connector tcp with --kv-encrypt"
        )


class GenerationFailed(EngineError):
    def __init__(self, detail: str) -> None:
        super().__init__(f"a step failed: {detail}")


class StepNotRun(EngineError):
    def __init__(self) -> None:
        super().__init__("the step before it failed")


class ContractBroken(EngineError):
    def __init__(self, request_id: str, detail: str) -> None:
        super().__init__(f"step for request {request_id}: {detail}")


class WrongKV(EngineError):
    def __init__(self, request_id: str, position: int, block_id: int) -> None:
        super().__init__(f"request {request_id} reads a wrong KV entry at position {position} in block {block_id}")
