"""What one choice came to: its pieces put together. Knows nothing of JSON, nodes or tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve_text.pieces import CallArguments, CallStart, Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_protocol.outputs import TokenLogprobs
    from pdserve_text.pieces import Piece

    from pdserve_router.openai_answers import AnswerReason
    from pdserve_router.output_processor import TokenEntry
    from pdserve_router.proof import Proof


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Outcome:
    """One choice of an answer that is not streamed. What has a default is set at its end."""

    index: int
    pieces: list[Piece] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    reason: AnswerReason = "stop"
    proof: Proof | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    @property
    def content(self) -> str:
        return "".join([piece.text for piece in self.pieces if isinstance(piece, Content)])

    @property
    def reasoning(self) -> str:
        return "".join([piece.text for piece in self.pieces if isinstance(piece, Reasoning)])

    @property
    def calls(self) -> list[Call]:
        calls: list[Call] = []
        for piece in self.pieces:
            if isinstance(piece, CallStart):
                calls.append(Call(piece.id, piece.name, ""))
            elif isinstance(piece, CallArguments):
                calls[-1].arguments += piece.text
        return calls
