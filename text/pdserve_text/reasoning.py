"""Thinking between <think> and </think> is told apart from the answer, in a stream. Knows no tokens and no tools."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from pdserve_text.pieces import MOST_SPACE, Content, Reasoning, partial_marker

if TYPE_CHECKING:
    from pdserve_text.pieces import Piece

OPEN, CLOSE = "<think>", "</think>"

# By name: whether an answer that does not begin with <think> is thinking all the same, until </think>.
REASONING_PARSERS = {"deepseek_r1": True, "qwen3": False}


def default_reasoning_parser(chat_template: str) -> str | None:
    """The parser that is safe for every answer of a model with this template: it splits only where both tags are its
    own words, and the answer, or the prompt's end, has them.
    """
    return "qwen3" if OPEN in chat_template and CLOSE in chat_template else None


def prompt_thinking(name: str, prompt_end: str) -> bool | None:
    """Whether an answer begins inside of thinking that the prompt opened; None where the prompt has also closed it."""
    tail = prompt_end.rstrip()
    if tail.endswith(CLOSE):
        return None
    return tail.endswith(OPEN) or REASONING_PARSERS[name]


class _State(Enum):
    START = "start"
    INSIDE = "inside"
    AFTER = "after"
    OUTSIDE = "outside"


class ReasoningParser:
    """Parser of one answer. What it returns, joined, depends on the text alone, not on how it was cut into pushes.

    Newlines next to the tags belong to neither side.

    Args:
        name: one of ``REASONING_PARSERS``.
        prompt_end: the last words of the prompt, which may have opened the thinking, or opened and closed it.
    """

    def __init__(self, name: str, prompt_end: str = "") -> None:
        self._inside = bool(prompt_thinking(name, prompt_end))
        self._state = _State.START
        self._begun = False
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """Pieces that are decided now."""
        if self._state is _State.OUTSIDE:
            return [Content(text)] if text else []
        self._held += text
        pieces: list[Piece] = []
        if self._state is _State.START:
            self._start()
        if self._state is _State.INSIDE:
            self._think(pieces)
        if self._state is _State.AFTER:
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = _State.OUTSIDE
        if self._state is _State.OUTSIDE and self._held:
            pieces.append(Content(self._held))
            self._held = ""
        return pieces

    def finish(self) -> list[Piece]:
        """The answer is over: what was held back."""
        held, self._held = self._held, ""
        if not held or self._state is _State.AFTER:
            return []
        thinking = self._state is _State.INSIDE or (self._state is _State.START and self._inside)
        return [Reasoning(held) if thinking else Content(held)]

    def _start(self) -> None:
        text = self._held.lstrip()
        much_space = len(self._held) - len(text) > MOST_SPACE
        if len(text) < len(OPEN) and OPEN.startswith(text) and not much_space:
            return
        if text.startswith(OPEN) and not much_space:
            self._held = text[len(OPEN) :]
            self._state = _State.INSIDE
        else:
            self._state = _State.INSIDE if self._inside else _State.OUTSIDE

    def _think(self, pieces: list[Piece]) -> None:
        if not self._begun:
            self._held = self._held.lstrip("\n")
            self._begun = bool(self._held)
        end = self._held.find(CLOSE)
        closed = end >= 0
        cut = end if closed else len(self._held) - partial_marker(self._held, CLOSE)
        thought = self._held[: max(len(self._held[:cut].rstrip("\n")), cut - MOST_SPACE)]
        if thought:
            pieces.append(Reasoning(thought))
        if closed:
            self._held = self._held[end + len(CLOSE) :]
            self._state = _State.AFTER
        else:
            self._held = self._held[len(thought) :]
