"""A response of server-sent events that is written to without a task of its own being woken for each event.

Owns the bytes between us and a client: what is held until it is flushed, and whether the client is behind. Knows
nothing of what events say.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """``put`` and ``flush`` never wait. Headers leave with the first events, in ``catch_up``.

    Attributes:
        response: once its headers are on their way, else None.
    """

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self._transport = http.transport
        # Beyond this the transport has aiohttp pause, and that is what ``catch_up`` waits for the end of.
        self._most_behind = 0 if http.transport is None else http.transport.get_write_buffer_limits()[1]
        self._is_chunked = http.version >= HttpVersion11
        self._writer: AbstractStreamWriter | None = None
        self._opening = asyncio.Lock()
        self._held: list[bytes] = []
        self.response: web.StreamResponse | None = None

    def put(self, events: bytes) -> None:
        """To be sent with the next ``flush``."""
        self._held.append(events)

    def flush(self) -> None:
        """Send what is held, if the headers have been; to a client that has gone it is lost."""
        held, transport = self._held, self._transport
        if not held or self._writer is None or transport is None:
            return
        data = held[0] if len(held) == 1 else b"".join(held)
        held.clear()
        # The framing of RFC 9112, section 7.1, where a chunk of no bytes would be the end.
        if data and not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def needs_task(self) -> bool:
        """``catch_up`` is what there is to do: there are no headers yet, or the client does not read fast enough."""
        if self._writer is None:
            return bool(self._held)
        return self._transport is not None and self._transport.get_write_buffer_size() > self._most_behind

    async def catch_up(self) -> None:
        """Send what is held, headers first, and wait while the client is behind. Leaves others their turn.

        Raises:
            ConnectionResetError: the client has gone.
        """
        async with self._opening:
            if self._writer is None:
                await self._open()
        self.flush()
        await self._drain()
        await asyncio.sleep(0)

    async def end(self) -> web.StreamResponse:
        """Send what is held and end the response. Raises ConnectionResetError as well."""
        await self.catch_up()
        assert self.response is not None
        await self.response.write_eof()
        return self.response

    async def _open(self) -> None:
        response = web.StreamResponse(headers=_HEADERS)
        if self._is_chunked:
            response.enable_chunked_encoding()
        writer = await response.prepare(self._http)
        if writer is None:
            raise ConnectionResetError
        data = b"".join(self._held)
        self._held.clear()
        self.response = response
        await response.write(data)
        self._writer = writer

    async def _drain(self) -> None:
        if self._writer is not None:
            await self._writer.drain()
