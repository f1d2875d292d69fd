"""JSON bodies and stream chunks of /v1/completions and /v1/chat/completions.

A stream's chunks differ in little but the text, so that what they share is encoded once per choice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from pdserve_text.pieces import CallStart, Content, Reasoning

from pdserve_router.http_errors import error_body
from pdserve_router.openai_answers import (
    CalledFunctionAnswer,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessageAnswer,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptTokensDetails,
    TokenLogprob,
    ToolCallAnswer,
    TopLogprob,
    UsageAnswer,
)
from pdserve_router.prompt_scores import LOWEST_LOGPROB, prompt_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import UnsetType
    from pdserve_text.pieces import Piece
    from pdserve_text.tokenizer import Tokenizer

    from pdserve_router.errors import RouterError
    from pdserve_router.openai_answers import AnswerReason, PromptLogprob
    from pdserve_router.outcome import Outcome
    from pdserve_router.output_processor import TokenEntry
    from pdserve_router.proof import Proof

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


@dataclass(frozen=True, kw_only=True)
class Usage:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    def answer(self) -> UsageAnswer:
        return UsageAnswer(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self.num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.num_cached_tokens),
        )


class ChatFormat:
    """Shapes of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    text_start = b'"delta":{"content":'
    text_end = b'},"logprobs":'

    def plain(self, head: dict[str, Any], outcomes: Sequence[tuple[Outcome, Any, Any]], **rest: Any) -> ChatCompletion:
        several = len(outcomes) > 1
        choices = [
            ChatChoice(
                index=o.index,
                message=_message(o),
                logprobs=logprobs,
                finish_reason=o.reason,
                pdserve=o.proof if several and o.proof else UNSET,
            )
            for o, logprobs, _ in outcomes
        ]
        head = head | {"object": "chat.completion"}
        return ChatCompletion(**head, choices=choices, prompt_logprobs=outcomes[0][2], **rest)

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens a choice."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def last_choice(self, index: int, reason: AnswerReason) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def logprobs(self, entries: Sequence[TokenEntry], tokenizer: Tokenizer, num_top: int) -> ChatLogprobs:
        def text(piece: bytes) -> str:
            return piece.decode("utf-8", "replace")

        content = []
        for item in entries:
            tops = []
            for token_id, logprob in item.logprobs.top[:num_top]:
                piece = tokenizer.token_bytes(token_id)
                tops.append(TopLogprob(token=text(piece), logprob=max(logprob, LOWEST_LOGPROB), bytes=list(piece)))
            piece = tokenizer.token_bytes(item.logprobs.token_id)
            content.append(
                TokenLogprob(
                    token=text(piece),
                    logprob=max(item.logprobs.logprob, LOWEST_LOGPROB),
                    bytes=list(piece),
                    top_logprobs=tops,
                )
            )
        return ChatLogprobs(content=content)


class CompletionFormat:
    """Shapes of /v1/completions."""

    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    text_start = b'"text":'
    text_end = b',"logprobs":'

    def plain(self, head: dict[str, Any], outcomes: Sequence[tuple[Outcome, Any, Any]], **rest: Any) -> Completion:
        several = len(outcomes) > 1
        choices = [
            CompletionChoice(
                index=o.index,
                text=o.content,
                logprobs=logprobs,
                finish_reason=o.reason,
                prompt_logprobs=of_prompt,
                pdserve=o.proof if several and o.proof else UNSET,
            )
            for o, logprobs, of_prompt in outcomes
        ]
        return Completion(**head, choices=choices, **rest)

    def first_choice(self, index: int) -> dict[str, Any] | None:
        return None

    def last_choice(self, index: int, reason: AnswerReason) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def logprobs(self, entries: Sequence[TokenEntry], tokenizer: Tokenizer, num_top: int) -> CompletionLogprobs:
        top_logprobs: list[dict[str, float] | None] = []
        for item in entries:
            if item.is_first_of_prompt:
                top_logprobs.append(None)
                continue
            chosen = item.logprobs
            tops = [*chosen.top[:num_top], (chosen.token_id, chosen.logprob)]
            top_logprobs.append({_token(tokenizer, i): max(logprob, LOWEST_LOGPROB) for i, logprob in tops})
        return CompletionLogprobs(
            text_offset=[item.text_offset for item in entries],
            token_logprobs=[
                None if item.is_first_of_prompt else max(item.logprobs.logprob, LOWEST_LOGPROB) for item in entries
            ],
            tokens=[_token(tokenizer, item.logprobs.token_id) for item in entries],
            top_logprobs=top_logprobs,
        )


class Answer:
    """Everything that one request's answer is built from.

    Args:
        num_top: most probable tokens to report per token; None reports no log probabilities.
        num_prompt_top: the same for the tokens of the prompt.
        include_usage: the last chunk of the stream states usage.
    """

    def __init__(
        self,
        form: ChatFormat | CompletionFormat,
        model: str,
        unique: str,
        tokenizer: Tokenizer,
        num_top: int | None,
        *,
        num_prompt_top: int | None = None,
        include_usage: bool = False,
    ) -> None:
        self.form = form
        self._num_prompt_top = num_prompt_top
        self._tokenizer = tokenizer
        self._num_top = num_top
        self.with_logprobs = num_top is not None
        self._include_usage = include_usage
        self.head: dict[str, Any] = {
            "id": form.id_prefix + unique,
            "object": form.chunk_object,
            "created": int(time.time()),
            "model": model,
        }

    def plain(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        """Body of an answer that is not streamed."""
        with_logprobs = [(o, self.logprobs(o.entries), self._prompt_logprobs(o)) for o in outcomes]
        proof = outcomes[0].proof if len(outcomes) == 1 else None
        return _encode(self.form.plain(self.head, with_logprobs, usage=usage.answer(), pdserve=proof or UNSET))

    def chunks(self, index: int) -> Chunks:
        """The chunks of one choice of a stream."""
        return Chunks(self, index)

    def end(self, usage: Usage) -> bytes:
        """What ends a stream."""
        return (self.chunk([], usage_field(usage)) if self._include_usage else b"") + DONE

    def failed(self, error: RouterError) -> bytes:
        """What ends a stream that cannot go on."""
        return b"data: " + error_body(error) + b"\n\n"

    def chunk(self, choices: list[Any], usage: bytes, **more: Any) -> bytes:
        return b"data: " + _encode(self.head | {"choices": choices} | more)[:-1] + usage + b"}\n\n"

    def _prompt_logprobs(self, outcome: Outcome) -> list[dict[str, PromptLogprob] | None] | UnsetType:
        if self._num_prompt_top is None:
            return UNSET
        return prompt_logprobs(outcome.prompt_logprobs, self._num_prompt_top, self._tokenizer)

    def logprobs(self, entries: Sequence[TokenEntry]) -> ChatLogprobs | CompletionLogprobs | None:
        if self._num_top is None:
            return None
        return self.form.logprobs(entries, self._tokenizer, self._num_top)


class Chunks:
    """The chunks of one choice. ``usage`` is what ``usage_field`` returned, or empty."""

    def __init__(self, answer: Answer, index: int) -> None:
        self._answer = answer
        self._index = index
        head = _encode(answer.head)[:-1]
        self._head = b"data: " + head + b',"choices":[{"index":%d,' % index
        self._prefix = self._head + answer.form.text_start
        self._suffix = answer.form.text_end + b'null,"finish_reason":null}]'

    def first(self, usage: bytes) -> bytes:
        """The chunk that opens the choice; empty where the endpoint has none."""
        choice = self._answer.form.first_choice(self._index)
        return b"" if choice is None else self._answer.chunk([choice], usage)

    def text(self, text: str, entries: Sequence[TokenEntry], usage: bytes) -> bytes:
        """A chunk of text."""
        end = self._suffix
        if self._answer.with_logprobs:
            end = self._answer.form.text_end + _encode(self._answer.logprobs(entries)) + b',"finish_reason":null}]'
        return b"".join((self._prefix, _encode(text), end, usage, b"}\n\n"))

    def pieces(self, pieces: Sequence[Piece], entries: Sequence[TokenEntry], usage: bytes) -> bytes:
        """Chunks of an answer that is taken apart, one a piece. Log probabilities come with the first."""
        deltas = [_delta(piece) for piece in pieces]
        if not deltas and entries:
            deltas = [{}]
        chunks = []
        for i, delta in enumerate(deltas):
            logprobs = self._answer.logprobs(entries) if i == 0 else None
            choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            chunks.append(self._answer.chunk([choice], usage))
        return b"".join(chunks)

    def last(self, reason: AnswerReason, usage: bytes, proof: Proof) -> bytes:
        """The chunk with the finish reason and the proof."""
        return self._answer.chunk([self._answer.form.last_choice(self._index, reason)], usage, pdserve=proof)


def usage_field(usage: Usage | None) -> bytes:
    """The member of a chunk that states usage, null until it is known."""
    return b',"usage":' + _encode(None if usage is None else usage.answer())


def _message(outcome: Outcome) -> ChatMessageAnswer:
    content, reasoning = outcome.content, outcome.reasoning
    calls = [
        ToolCallAnswer(id=call.id, function=CalledFunctionAnswer(name=call.name, arguments=call.arguments))
        for call in outcome.calls
    ]
    return ChatMessageAnswer(
        content=content if content or not calls else None,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case _:
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _token(tokenizer: Tokenizer, token_id: int) -> str:
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
