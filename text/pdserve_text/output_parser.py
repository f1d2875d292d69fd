"""An answer's text taken apart: reasoning first, function calls in the rest. One parser per choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_text.pieces import CallArguments, CallStart, Content

if TYPE_CHECKING:
    from pdserve_text.pieces import Piece
    from pdserve_text.reasoning import ReasoningParser
    from pdserve_text.tool_parsers import ToolParser


class OutputParser:
    """Args:
        parallel: more than one call is reported; the others are left out.

    Attributes:
        called: a function was called.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, parallel: bool = True) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self.called = False

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """Pieces that are decided now; with ``last``, all that there are."""
        pieces: list[Piece] = [Content(text)] if text else []
        if self._reasoning is not None:
            pieces = self._reasoning.push(text)
            if last:
                pieces += self._reasoning.finish()
        if self._tools is not None:
            parsed: list[Piece] = []
            for piece in pieces:
                parsed += self._tools.push(piece.text) if isinstance(piece, Content) else [piece]
            if last:
                parsed += self._tools.finish()
            pieces = parsed
        if not self._parallel:
            pieces = [p for p in pieces if not (isinstance(p, CallStart | CallArguments) and p.index > 0)]
        self.called = self.called or any(isinstance(piece, CallStart) for piece in pieces)
        return pieces
