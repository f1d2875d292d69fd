"""Errors of the kernels.

KernelError
├── UnknownBackend      no backend of that name
├── NoSuchFamily        the processor lacks the instruction family that was asked for
├── NotBuilt            the C kernels were asked for and are not installed
├── NoQuantization      weights were to be quantized, and this backend or dtype has no such thing
├── NoTriton            the Triton kernels were asked for and cannot run here
└── NoFlashAttn         the same of flash_attn
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of all errors of this package."""


class UnknownBackend(KernelError):
    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"there is no kernel backend {name!r}; known: {', '.join(known)}")


class NoSuchFamily(KernelError):
    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"this machine has no instruction family {name!r}; it has: {', '.join(known)}")


class NotBuilt(KernelError):
    def __init__(self) -> None:
        super().__init__(
            "the C kernels are not installed: reinstall where there is a C compiler, or use another backend"
        )


class NoQuantization(KernelError):
    def __init__(self, quantization: str, reason: str) -> None:
        super().__init__(f"no {quantization} weights here: {reason}")


class NoTriton(KernelError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"the Triton kernels cannot run: {reason}; use another backend")


class NoFlashAttn(KernelError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"flash_attn cannot be used: {reason}; use another backend")
