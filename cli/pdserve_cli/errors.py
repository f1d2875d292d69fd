"""Errors of the command line.

CliError
├── ArgumentError       a flag whose value makes no sense
├── ChildFailed         a process that we started ended although it should not
├── ChildNotReady       a process that we started did not become ready in time
├── ApiError            the router answered something other than what was asked for
└── DemoFailed          an answer is there and is not what it must be

``exit_code`` is what the command ends with: 2 where the user can mend it by another command line, else 1.
"""

from __future__ import annotations


class CliError(Exception):
    """Base of all errors of this package."""

    exit_code = 1


class ArgumentError(CliError):
    exit_code = 2


class ChildFailed(CliError):
    def __init__(self, name: str, code: int, when: str) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"{name} {how} {when}; its last words are above")
        # A node or router ends with 2 where its own command line, which came from ours, is at fault.
        self.exit_code = 2 if code == 2 else 1


class ChildNotReady(CliError):
    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(f"{name} was not ready within {seconds:g} s")


class ApiError(CliError):
    def __init__(self, what: str, detail: str) -> None:
        super().__init__(f"{what}: {detail}")


class DemoFailed(CliError):
    pass
