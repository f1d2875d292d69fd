"""Streams that are written to from callbacks: framing by HTTP version, and faults that stay one request's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvloop
from pdserve_protocol.outputs import Finished
from pdserve_router.lifecycle import AttemptLife
from support.router_cluster import DEADLINE_S, pair, parse_events, router_cluster

if TYPE_CHECKING:
    import pytest
    from pdserve_protocol.outputs import RequestOutput
    from pdserve_router.lifecycle import Half, Progress

BODY = b'{"prompt": "x", "max_tokens": 9, "stream": true}'


async def raw_answer(url: str, version: str) -> tuple[bytes, bytes]:
    """Head and body as they come."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions {version}\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(BODY)}\r\n\r\n"
    writer.write(head.encode() + BODY)
    answer = await reader.read()
    writer.close()
    head_bytes, _, body = answer.partition(b"\r\n\r\n")
    return head_bytes.lower(), body


def unchunked(body: bytes) -> bytes:
    data = b""
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        if length == 0:
            assert rest == b"\r\n", "something follows the end"
            return data
        data, body = data + rest[:length], rest[length + 2 :]


def test_framing_by_version() -> None:
    async def main() -> None:
        async with router_cluster(pair(tokens=[70, 71, 72])) as c, asyncio.timeout(DEADLINE_S):
            head, body = await raw_answer(c.url, "HTTP/1.1")
            assert b"transfer-encoding: chunked" in head
            events = parse_events(unchunked(body))
            head, body = await raw_answer(c.url, "HTTP/1.0")
            assert b"transfer-encoding" not in head
            old_events = parse_events(body)
            texts = [[event["choices"][0]["text"] for event in e[:-1]] for e in (events, old_events)]
            assert texts[0] == texts[1]
            assert len(texts[0]) == 9 + 1
            assert events[-1] == old_events[-1] == "[DONE]"

    uvloop.run(main())


def test_a_fault_while_tokens_are_taken_is_one_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    on_output = AttemptLife.on_output

    def faulty(life: AttemptLife, half: Half, output: RequestOutput) -> Progress:
        if output.token_ids == [99]:
            raise ZeroDivisionError
        return on_output(life, half, output)

    async def main() -> None:
        async with router_cluster(pair(manual=True)) as c, asyncio.timeout(DEADLINE_S):
            node = c.decode[0]
            streams = [asyncio.create_task(raw_answer(c.url, "HTTP/1.1")) for _ in range(2)]
            first, second = [await node.requests.get() for _ in range(2)]
            node.say_all([node.output(first, 0, [70]), node.output(second, 0, [70])], first.id)
            await c.until("/metrics", lambda text: "time_to_first_token_seconds_count 2.0" in text)
            monkeypatch.setattr(AttemptLife, "on_output", faulty)
            node.say_all([node.output(first, 1, [99]), node.output(second, 1, [71])], first.id)
            assert await node.aborted.get() == first.id
            node.say(second, 2, [72], end=Finished(reason="length"))
            bodies = [(await stream)[1] for stream in streams]
            assert sorted(body.endswith(b"0\r\n\r\n") for body in bodies) == [False, True]

    uvloop.run(main())
