"""An OpenAI server that computes nothing: it streams a given number of chunks at once, and fails as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class FakeOpenAI:
    """What it was asked, and how it answers.

    Attributes:
        bodies: of all requests, in order of arrival.
        most_under_way: requests at the same time, at most.
        failures: by the number of a request, from 0: an HTTP status, "cut" (no [DONE]) or "error" (an error event).
        model: fields of the model in /v1/models.
    """

    failures: dict[int, int | str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: {"id": "fake", "max_model_len": 100, "vocab_size": 50})
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_under_way: int = 0
    url: str = ""
    _under_way: int = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self.model]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        try:
            return await self._answer(request)
        finally:
            self._under_way -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        failure = self.failures.get(len(self.bodies))
        body = await request.json()
        self.bodies.append(body)
        # Others come in meanwhile.
        await asyncio.sleep(0.002)
        if isinstance(failure, int):
            return web.json_response({"error": {"message": "no"}}, status=failure)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        num_tokens = body["max_tokens"]
        if chat:
            await self._event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(num_tokens):
            choice = {"delta": {"content": "a"}} if chat else {"text": "" if index == 1 else "a"}
            await self._event(response, {"choices": [choice | {"finish_reason": None}]})
            if failure == "cut":
                return response
        if failure == "error":
            await self._event(response, {"error": {"message": "broken", "code": "node_failed"}})
            return response
        last = {"delta": {}} if chat else {"text": ""}
        await self._event(response, {"choices": [last | {"finish_reason": "length"}]})
        num_prompt_tokens = 7 if chat else len(body["prompt"])
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextmanager
def serving(fake: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """Serves in a thread of its own."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.add_routes(
        [
            web.get("/v1/models", fake.models),
            web.post("/v1/completions", fake.completions),
            web.post("/v1/chat/completions", fake.completions),
        ]
    )
    runner = web.AppRunner(app)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port: int = runner.addresses[0][1]
        return port

    fake.url = f"http://127.0.0.1:{loop.run_until_complete(start())}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(runner.cleanup())
        loop.close()
