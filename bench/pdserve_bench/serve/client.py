"""One streamed request, and when its tokens came.

While an answer streams, bytes are only stamped and kept; what they say is read when the answer is over, so that the
client takes as little of the processor as it can from the server that it measures.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from pdserve_bench.serve.records import RequestRecord
from pdserve_bench.serve.sse import EventSplitter

if TYPE_CHECKING:
    from collections.abc import Sequence

_JSON = {"Content-Type": "application/json"}


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_token(self) -> bool:
        """Whether the chunk stands for a token. One without text does (a part of a character), unless it opens or
        ends the stream.
        """
        if self.delta is not None:
            if self.delta.content or self.delta.reasoning_content:
                return True
            return self.delta.role is None and self.finish_reason is None and self.delta.content is not None
        return bool(self.text) or (self.text is not None and self.finish_reason is None)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    pdserve: dict[str, Any] | None = None


_chunk = msgspec.json.Decoder(_Chunk)


class Client:
    """Sends requests to one address. Close it at the end."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._address = address
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        )

    async def close(self) -> None:
        await self._session.close()

    async def request(self, body: bytes, due: float | None = None) -> RequestRecord:
        """Sends ``body`` now and reads the answer to its end. What goes wrong is in the record."""
        sent = time.monotonic()
        record = RequestRecord(due=sent if due is None else due, sent=sent)
        stamped: list[tuple[float, bytes]] = []
        try:
            async with self._session.post(self._address, data=body, headers=_JSON) as response:
                if response.status == 200:
                    async for data in response.content.iter_any():
                        stamped.append((time.monotonic(), data))
                else:
                    await response.read()
                    record.error = f"HTTP {response.status}"
        except TimeoutError:
            record.error = "timeout"
        except aiohttp.ClientError as error:
            record.error = f"connection ({type(error).__name__})"
        record.ended = time.monotonic()
        read_answer(record, stamped)
        return record


def read_answer(record: RequestRecord, stamped: Sequence[tuple[float, bytes]]) -> None:
    """Fills ``record`` with what the bytes of an answer say, and notes an answer that is not complete."""
    splitter = EventSplitter()
    done = False
    for now, data in stamped:
        for event in splitter.feed(data):
            if event == b"[DONE]":
                done = True
                continue
            try:
                chunk = _chunk.decode(event)
            except msgspec.DecodeError:
                record.error = record.error or "not a chunk"
                return
            if chunk.error is not None:
                record.error = record.error or f"error in the stream ({_code(chunk.error)})"
            if chunk.usage is not None:
                record.num_prompt_tokens = chunk.usage.prompt_tokens
                record.num_output_tokens = chunk.usage.completion_tokens
            record.proof = chunk.pdserve or record.proof
            record.token_times += [now for choice in chunk.choices if choice.has_token()]
    # A server that does not count has sent at least a token a chunk.
    record.num_output_tokens = max(record.num_output_tokens, len(record.token_times))
    if record.error is None and not done:
        record.error = "broken off"
    elif record.error is None and not record.token_times:
        record.error = "no token"


def _code(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "unknown")
    return "unknown"
