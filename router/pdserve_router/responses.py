"""JSON bodies and stream chunks of the OpenAI API.

A stream's chunks differ in little but the text, so that what they share is encoded once per request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_protocol.outputs import FinishReason
    from pdserve_text.tokenizer import Tokenizer

    from pdserve_router.output_processor import TokenEntry
    from pdserve_router.proof import Proof

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0
_encode = msgspec.json.encode


@dataclass(frozen=True, kw_only=True)
class Usage:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class ChatFormat:
    """Shapes of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    plain_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    text_start = b'"delta":{"content":'
    text_end = b'},"logprobs":'

    def plain_choice(self, text: str, logprobs: Any, reason: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def first_choice(self) -> dict[str, Any] | None:
        """The chunk that opens a stream."""
        delta = {"role": "assistant", "content": ""}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}

    def last_choice(self, reason: FinishReason) -> dict[str, Any]:
        return {"index": 0, "delta": {}, "logprobs": None, "finish_reason": reason}

    def logprobs(self, entries: Sequence[TokenEntry], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
        """One entry per token; its text as far as it is text, and its exact bytes."""

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            piece = tokenizer.token_bytes(token_id)
            text = piece.decode("utf-8", "replace")
            return {"token": text, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": list(piece)}

        content = []
        for item in entries:
            chosen = entry(item.logprobs.token_id, item.logprobs.logprob)
            chosen["top_logprobs"] = [entry(*top) for top in item.logprobs.top[:num_top]]
            content.append(chosen)
        return {"content": content, "refusal": None}


class CompletionFormat:
    """Shapes of /v1/completions."""

    id_prefix = "cmpl-"
    plain_object = "text_completion"
    chunk_object = "text_completion"
    text_start = b'"text":'
    text_end = b',"logprobs":'

    def plain_choice(self, text: str, logprobs: Any, reason: FinishReason) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def first_choice(self) -> dict[str, Any] | None:
        return None

    def last_choice(self, reason: FinishReason) -> dict[str, Any]:
        return {"index": 0, "text": "", "logprobs": None, "finish_reason": reason}

    def logprobs(self, entries: Sequence[TokenEntry], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
        """Four lists with one item per token. Offsets are characters of the choice's text; the chosen token is always
        among its ``top_logprobs``; a token that is a part of a character is written as "bytes:" and its bytes.
        """
        top_logprobs = []
        for item in entries:
            chosen = item.logprobs
            tops = [*chosen.top[:num_top], (chosen.token_id, chosen.logprob)]
            top_logprobs.append({_token(tokenizer, i): max(logprob, _LOWEST_LOGPROB) for i, logprob in tops})
        return {
            "text_offset": [item.text_offset for item in entries],
            "token_logprobs": [max(item.logprobs.logprob, _LOWEST_LOGPROB) for item in entries],
            "tokens": [_token(tokenizer, item.logprobs.token_id) for item in entries],
            "top_logprobs": top_logprobs,
        }


class Answer:
    """Everything that one request's answer is built from.

    Args:
        num_top: most probable tokens to report per token; None reports no log probabilities.
    """

    def __init__(
        self, form: ChatFormat | CompletionFormat, model: str, unique: str, tokenizer: Tokenizer, num_top: int | None
    ) -> None:
        self.id = form.id_prefix + unique
        self._form = form
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._head: dict[str, Any] = {
            "id": self.id,
            "object": form.chunk_object,
            "created": int(time.time()),
            "model": model,
        }
        head = _encode(self._head)[:-1]
        self._prefix = b"data: " + head + b',"choices":[{"index":0,' + form.text_start
        self._suffix = form.text_end + b'null,"finish_reason":null}]'

    def plain(
        self, text: str, entries: Sequence[TokenEntry], reason: FinishReason, usage: Usage, proof: Proof
    ) -> bytes:
        """Body of an answer that is not streamed."""
        choice = self._form.plain_choice(text, self._logprobs(entries), reason)
        head = self._head | {"object": self._form.plain_object}
        return _encode(head | {"choices": [choice], "usage": usage.as_json(), "pdserve": proof})

    def first(self, usage: bytes) -> bytes:
        """The chunk that opens a stream; empty where the endpoint has none."""
        choice = self._form.first_choice()
        return b"" if choice is None else self._chunk([choice], usage)

    def token(self, text: str, entries: Sequence[TokenEntry], usage: bytes) -> bytes:
        """A chunk of text. ``usage`` is what ``usage_field`` returned, or empty."""
        if self._num_top is None:
            return self._prefix + _encode(text) + self._suffix + usage + b"}\n\n"
        logprobs = _encode(self._logprobs(entries))
        return b"".join(
            (
                self._prefix,
                _encode(text),
                self._form.text_end,
                logprobs,
                b',"finish_reason":null}]',
                usage,
                b"}\n\n",
            )
        )

    def last(self, reason: FinishReason, usage: bytes, proof: Proof) -> bytes:
        """The chunk with the finish reason and the proof."""
        return self._chunk([self._form.last_choice(reason)], usage, pdserve=proof)

    def usage(self, usage: Usage) -> bytes:
        """The chunk after the last, for clients that asked for it."""
        return self._chunk([], usage_field(usage))

    def _chunk(self, choices: list[Any], usage: bytes, **more: Any) -> bytes:
        return b"data: " + _encode(self._head | {"choices": choices} | more)[:-1] + usage + b"}\n\n"

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        return self._form.logprobs(entries, self._tokenizer, self._num_top)


def usage_field(usage: Usage | None) -> bytes:
    """The member of a chunk that states usage, null until it is known."""
    return b',"usage":' + _encode(None if usage is None else usage.as_json())


def _token(tokenizer: Tokenizer, token_id: int) -> str:
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
