"""The answer of /v1/responses, whole or as its stream of events, in the order that the API documents.

created, in_progress, then for each output item: added, its parts and deltas, done; then completed (or incomplete)
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict
from pdserve_text.pieces import CallArguments, CallStart, Content, Reasoning

from pdserve_router.openai_answers import (
    Response,
    ResponseError,
    ResponseIncomplete,
    ResponseUsage,
    ResponseUsageInput,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_text.pieces import Piece

    from pdserve_router.errors import RouterError
    from pdserve_router.openai_answers import AnswerReason
    from pdserve_router.openai_types import ResponsesBody
    from pdserve_router.outcome import Outcome
    from pdserve_router.output_processor import TokenEntry
    from pdserve_router.proof import Proof
    from pdserve_router.responses import Usage

_encode = msgspec.json.encode


class ResponsesAnswer:
    """One answer; it has one choice. ``unique`` makes its ids."""

    def __init__(self, body: ResponsesBody, model: str, unique: str) -> None:
        self._body = body
        self._unique = unique
        self._number = 0
        self._chunks = _Events(self)
        text = {} if body.text is None else _given(body.text)
        form = {"type": "text"} if body.text is None or body.text.format is None else _given(body.text.format)
        self._fixed: dict[str, Any] = {
            "id": f"resp_{unique}",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": text | {"format": form},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [asdict(tool) for tool in body.tools or []],
            "user": body.user,
        }

    def plain(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        """Body of an answer that is not streamed."""
        outcome = outcomes[0]
        # The same events as in a stream, of which only the items that they end with are wanted.
        self._chunks.pieces(outcome.pieces, (), b"")
        self._chunks.close(outcome.reason)
        return _encode(self._response(self._chunks.items, outcome.reason, usage, outcome.proof))

    def chunks(self, index: int) -> _Events:
        """The events of the one choice."""
        return self._chunks

    def end(self, usage: Usage) -> bytes:
        """What ends a stream."""
        events = self._chunks
        reason = events.reason or "stop"
        kind = "response.incomplete" if reason == "length" else "response.completed"
        return self.event(kind, response=self._response(events.items, reason, usage, events.proof))

    def failed(self, error: RouterError) -> bytes:
        """What ends a stream that cannot go on."""
        response = Response(
            status="failed",
            output=self._chunks.items,
            error=ResponseError(code=error.code or "server_error", message=str(error)),
            **self._fixed,
        )
        return self.event("response.failed", response=response)

    def started(self) -> bytes:
        response = Response(status="in_progress", output=[], **self._fixed)
        return self.event("response.created", response=response) + self.event("response.in_progress", response=response)

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event with the next number."""
        data = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def new_id(self, kind: str) -> str:
        return f"{kind}_{self._unique}{len(self._chunks.items):02d}"

    def _response(
        self, items: list[dict[str, Any]], reason: AnswerReason, usage: Usage, proof: Proof | None
    ) -> Response:
        cut_off = reason == "length"
        return Response(
            status="incomplete" if cut_off else "completed",
            incomplete_details=ResponseIncomplete() if cut_off else None,
            output=items,
            usage=ResponseUsage(
                input_tokens=usage.num_prompt_tokens,
                input_tokens_details=ResponseUsageInput(cached_tokens=usage.num_cached_tokens),
                output_tokens=usage.num_output_tokens,
                total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
            ),
            pdserve=proof or UNSET,
            **self._fixed,
        )


class _Events:
    """Events of the output items, one open at a time.

    Attributes:
        items: those that are done.
        reason, proof: set at the end.
    """

    def __init__(self, answer: ResponsesAnswer) -> None:
        self._answer = answer
        self.items: list[dict[str, Any]] = []
        self.reason: AnswerReason | None = None
        self.proof: Proof | None = None
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []

    def first(self, usage: bytes) -> bytes:
        return self._answer.started()

    def text(self, text: str, entries: Sequence[TokenEntry], usage: bytes) -> bytes:
        return self.pieces([Content(text)], entries, usage) if text else b""

    def pieces(self, pieces: Sequence[Piece], entries: Sequence[TokenEntry], usage: bytes) -> bytes:
        return b"".join([self._piece(piece) for piece in pieces])

    def last(self, reason: AnswerReason, usage: bytes, proof: Proof) -> bytes:
        self.proof = proof
        return self.close(reason)

    def close(self, reason: AnswerReason) -> bytes:
        """The end of the last item; an answer without text has an empty one."""
        self.reason = reason
        events = b"" if self._open is not None or self.items else self._message("message")
        return events + self._done("incomplete" if reason == "length" else "completed")

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Content(text):
                return self._message("message") + self._delta("response.output_text.delta", text)
            case Reasoning(text):
                return self._message("reasoning") + self._delta("response.reasoning_text.delta", text)
            case CallStart(_, call_id, name):
                return self._done("completed") + self._call(call_id, name)
            case CallArguments(_, text):
                return self._delta("response.function_call_arguments.delta", text)

    def _message(self, kind: str) -> bytes:
        """Opens an item of ``kind`` unless it is the open one."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        done = self._done("completed")
        if kind == "message":
            item: dict[str, Any] = {"id": self._answer.new_id("msg"), "type": kind, "role": "assistant"}
        else:
            item = {"id": self._answer.new_id("rs"), "type": kind, "summary": []}
        self._open = item = item | {"status": "in_progress"}
        part = {"part": self._part(""), "content_index": 0}
        return done + self._added(item | {"content": []}) + self._event("response.content_part.added", **part)

    def _call(self, call_id: str, name: str) -> bytes:
        self._open = {
            "id": self._answer.new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id,
            "name": name,
        }
        return self._added(self._open | {"arguments": ""})

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._answer.event("response.output_item.added", output_index=len(self.items), item=item)

    def _delta(self, kind: str, text: str) -> bytes:
        self._texts.append(text)
        more: dict[str, Any] = {"delta": text}
        if kind != "response.function_call_arguments.delta":
            more["content_index"] = 0
        if kind == "response.output_text.delta":
            more["logprobs"] = []
        return self._event(kind, **more)

    def _done(self, status: str) -> bytes:
        """The end of the open item."""
        item = self._open
        if item is None:
            return b""
        text = "".join(self._texts)
        self._texts.clear()
        if item["type"] == "function_call":
            full: dict[str, Any] = {"arguments": text}
            events = self._event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = self._part(text)
            full = {"content": [part]}
            if item["type"] == "message":
                events = self._event("response.output_text.done", content_index=0, text=text, logprobs=[])
            else:
                events = self._event("response.reasoning_text.done", content_index=0, text=text)
            events += self._event("response.content_part.done", content_index=0, part=part)
        done = item | {"status": status} | full
        events += self._answer.event("response.output_item.done", output_index=len(self.items), item=done)
        self.items.append(done)
        self._open = None
        return events

    def _part(self, text: str) -> dict[str, Any]:
        if self._open is not None and self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **fields: Any) -> bytes:
        item_id = None if self._open is None else self._open["id"]
        return self._answer.event(kind, item_id=item_id, output_index=len(self.items), **fields)


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    """The fields of a part of the request that it gave."""
    return {name: value for name, value in msgspec.to_builtins(struct).items() if value is not None}
