"""Errors of the benchmarks.

BenchError
├── BadOption           a flag whose value makes no sense
├── BadPromptFile       a file of prompts that cannot be read as one
├── ServerNotUsable     the server cannot be asked, or does not say what is needed
├── NothingMeasured     no request was answered
└── NodeFailed          a node of the GPU check has not started, or a request to it has failed

``exit_code`` is what the command ends with: 2 where the user can mend it by another command line, else 1.
"""

from __future__ import annotations


class BenchError(Exception):
    """Base of all errors of this package."""

    exit_code = 1


class BadOption(BenchError):
    exit_code = 2

    def __init__(self, flag: str, value: object, expected: str) -> None:
        super().__init__(f"{flag} {value}: {expected}")


class BadPromptFile(BenchError):
    exit_code = 2

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"prompts of {path}: {detail}")


class ServerNotUsable(BenchError):
    def __init__(self, url: str, detail: str) -> None:
        super().__init__(f"{url}: {detail}")


class NothingMeasured(BenchError):
    def __init__(self, failures: dict[str, int]) -> None:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in failures.items()) or "nothing was sent"
        super().__init__(f"no request was answered: {kinds}")


class NodeFailed(BenchError):
    def __init__(self, role: str, detail: str) -> None:
        super().__init__(f"the {role} node: {detail}")


class ProcessFailed(BenchError):
    def __init__(self, part: str, of: str) -> None:
        super().__init__(f"the {part} of {of} has ended before it was through; see above")
