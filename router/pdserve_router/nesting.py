"""How deep what a client sends may be nested: whatever handles it later, recursing, then has the room."""

from __future__ import annotations

from itertools import chain
from typing import Any

from pdserve_router.errors import BadRequest

MAX_NESTING = 128


def too_deep(param: str) -> BadRequest:
    return BadRequest(f"'{param}' is nested too deeply; at most {MAX_NESTING} levels", param)


def check_nesting(value: object, param: str) -> None:
    """Refuse a JSON value of more than ``MAX_NESTING`` objects and lists within one another.

    Raises:
        BadRequest
    """
    outer: list[Any] = [value]
    for _ in range(MAX_NESTING + 1):
        outer = [item for item in outer if isinstance(item, (dict, list))]
        if not outer:
            return
        outer = list(chain.from_iterable(item.values() if isinstance(item, dict) else item for item in outer))
    raise too_deep(param)
