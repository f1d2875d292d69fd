"""How deep what a client sends may be nested: whatever handles it later, recursing, then has the room."""

from __future__ import annotations

from itertools import chain
from typing import Any

from pdserve_router.errors import BadRequest

MAX_NESTING = 128


def too_deep(param: str) -> BadRequest:
    """The refusal of a value of this field."""
    return BadRequest(f"'{param}' is nested too deeply; at most {MAX_NESTING} levels", param)


def check_nesting(value: object, param: str) -> None:
    """Refuse a JSON value of more than ``MAX_NESTING`` objects and lists within one another.

    Raises:
        BadRequest
    """
    level: list[Any] = [value]
    for _ in range(MAX_NESTING + 1):
        level = [item for item in level if isinstance(item, (dict, list))]
        if not level:
            return
        level = list(chain.from_iterable(item.values() if isinstance(item, dict) else item for item in level))
    raise too_deep(param)
