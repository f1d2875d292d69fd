"""What the text of an answer consists of, piece by piece as it streams. Pieces of one kind that follow each other are
one text, however it was cut.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Words meant for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a function. ``index`` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call ``index``: JSON, as the model wrote it."""

    index: int
    text: str


# Of a run of space that may belong to a mark, no more is held back.
MOST_SPACE = 256

Piece = Content | Reasoning | CallStart | CallArguments


def partial_marker(text: str, marker: str) -> int:
    """Length of the longest ending of ``text`` that is the beginning of ``marker`` and not all of it."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
