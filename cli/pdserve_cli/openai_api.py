"""Streams an answer of the router, as any client would, and measures it with the client's own clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from pdserve_cli.errors import ApiError
from pdserve_cli.proof_view import Proof  # noqa: TC001  (msgspec reads the annotation)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TOTAL_S = 120.0
_SILENCE_S = 60.0


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    pdserve: Proof | None = None
    error: _Error | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_chunk = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A streamed answer. Times are seconds by the client's clock.

    Attributes:
        ttft_s: request sent to first text.
        itl_s: mean time between tokens after the first; None for a single token.
    """

    text: str
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float
    itl_s: float | None
    proof: Proof


async def model_names(url: str) -> list[str]:
    """What the router serves.

    Raises:
        ApiError: it does not say.
    """
    path = "/v1/models"
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}{path}") as response:
            return [model.id for model in msgspec.json.decode(await response.read(), type=_Models).data]
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        raise ApiError(f"GET {path}", f"{type(error).__name__}: {error}") from error


async def stream(url: str, path: str, body: Mapping[str, Any], on_text: Callable[[str], None]) -> Answer:
    """Asks for a stream and reads it to its end.

    Args:
        on_text: called with each piece of text as it comes.

    Raises:
        ApiError: another answer than a complete stream with usage and proof.
    """
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    timeout = aiohttp.ClientTimeout(total=_TOTAL_S, sock_read=_SILENCE_S)
    sent = time.monotonic()
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}{path}", json=request) as response,
        ):
            if response.status != 200:
                raise ApiError(f"POST {path} was answered {response.status}", _message(await response.read()))
            return await _read(response.content, path, sent, on_text)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ApiError(f"POST {path}", f"{type(error).__name__}: {error}") from error


async def _read(lines: aiohttp.StreamReader, path: str, sent: float, on_text: Callable[[str], None]) -> Answer:
    pieces: list[str] = []
    first = last = None
    usage: _Usage | None = None
    proof: Proof | None = None
    async for line in lines:
        data = line.strip().removeprefix(b"data: ")
        if not data or data == b"[DONE]":
            continue
        chunk = _decode(data, path)
        if chunk.error is not None:
            raise ApiError(f"the stream of {path} broke off", chunk.error.message)
        usage, proof = chunk.usage or usage, chunk.pdserve or proof
        for choice in chunk.choices:
            text = choice.text or (choice.delta.content if choice.delta else None)
            if text:
                last = time.monotonic()
                first = first or last
                pieces.append(text)
                on_text(text)
    if usage is None or proof is None or first is None or last is None:
        raise ApiError(f"the stream of {path} ended", "without text, usage or proof")
    gaps = usage.completion_tokens - 1
    return Answer(
        text="".join(pieces),
        num_prompt_tokens=usage.prompt_tokens,
        num_output_tokens=usage.completion_tokens,
        ttft_s=first - sent,
        itl_s=(last - first) / gaps if gaps > 0 else None,
        proof=proof,
    )


def _decode(data: bytes, path: str) -> _Chunk:
    try:
        return _chunk.decode(data)
    except msgspec.DecodeError as error:
        raise ApiError(f"the stream of {path} holds something else", str(error)) from error


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        return body[:500].decode("utf-8", "replace")
