"""A backend by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_kernels.errors import UnknownBackend
from pdserve_kernels.torch_backend import TorchBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve_kernels.interface import Backend

_BACKENDS: dict[str, Callable[[], Backend]] = {"torch": TorchBackend}


def select_backend(name: str = "torch") -> Backend:
    """The backend of this name.

    Raises:
        UnknownBackend: there is none.
    """
    if name not in _BACKENDS:
        raise UnknownBackend(name, sorted(_BACKENDS))
    return _BACKENDS[name]()
