"""Errors of the models.

ModelError
├── UnknownArchitecture     no model of that name
├── UnsupportedConfig       config.json asks for something that is not built
├── BadConfig               config.json lacks a field, or has a wrong one
└── WeightsMismatch         tensors that are missing, or have another shape than config.json says
"""

from __future__ import annotations


class ModelError(Exception):
    """Base of all errors of this package."""


class UnknownArchitecture(ModelError):
    def __init__(self, names: list[str], known: list[str]) -> None:
        super().__init__(f"architecture {', '.join(names) or '(none)'} is not known; known: {', '.join(known)}")


class UnsupportedConfig(ModelError):
    def __init__(self, field: str, value: object, supported: str) -> None:
        super().__init__(f"config.json: {field} = {value!r} is not supported; supported: {supported}")


class BadConfig(ModelError):
    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"config.json: {field} {problem}")


class WeightsMismatch(ModelError):
    def __init__(self, name: str, expected: tuple[int, ...], found: tuple[int, ...] | None) -> None:
        what = "is missing" if found is None else f"has shape {found}"
        super().__init__(f"tensor {name} {what}; config.json implies shape {expected}")
