"""Errors of the kernels.

KernelError
└── UnknownBackend      no backend of that name
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of all errors of this package."""


class UnknownBackend(KernelError):
    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"there is no kernel backend {name!r}; known: {', '.join(known)}")
