"""Clients for the end-to-end tests of faults: streams in threads of their own that can be dropped at any moment."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

VOCAB_SIZE = 512
"""Of the tiny models; token ids from 3 up are ordinary tokens."""


def prompt_of(seed: int, length: int) -> list[int]:
    """``length`` ordinary token ids that depend on ``seed`` alone."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def greedy(prompt: str | list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a completion of exactly ``max_tokens`` tokens at temperature 0."""
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


class Stream:
    """A request under way. Everything that comes is kept; what breaks is kept too, and nothing is raised.

    Attributes:
        status: of the response; 0 until there is one.
        events: data of the events, without [DONE].
        arrivals: when each of them came, by time.monotonic().
        done: [DONE] has come.
        ended_at: when the connection ended; None while it is open.
    """

    def __init__(
        self,
        port: int,
        body: Mapping[str, Any],
        *,
        path: str = "/v1/completions",
        host: str = "127.0.0.1",
        headers: Mapping[str, str] | None = None,
        stream: bool = True,
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        self.arrivals: list[float] = []
        self.done = False
        self.broken: Exception | None = None
        self.ended_at: float | None = None
        self._body = json.dumps({**body, "stream": stream})
        self._path = path
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._stream = stream
        self._changed = threading.Condition()
        self._closed = False
        self._connection = http.client.HTTPConnection(host, port, timeout=120)
        self._connection.connect()
        self._socket = self._connection.sock
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_tokens(self, count: int, timeout_s: float = 30.0) -> Self:
        """Until that many events with text have come."""
        with self._changed:
            came = self._changed.wait_for(lambda: self.num_texts >= count or self.ended_at is not None, timeout_s)
        assert came, f"{self.num_texts} of {count} events within {timeout_s:g} s"
        assert self.num_texts >= count, f"ended after {self.num_texts} of {count} events: {self}"
        return self

    def wait_begun(self, timeout_s: float = 30.0) -> Self:
        """Until the first token is in, which may be a part of a character and no text yet."""
        with self._changed:
            self._changed.wait_for(lambda: self.status or self.ended_at is not None, timeout_s)
        assert self.status == 200, f"not begun within {timeout_s:g} s: {self}"
        return self

    def wait_end(self, timeout_s: float = 60.0) -> Self:
        """Until the response is over, well or not."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"not over within {timeout_s:g} s: {self}"
        return self

    def close(self) -> None:
        """Drops the connection, as a client does that goes away. Idempotent."""
        if not self._closed:
            self._closed = True
            # It may have ended by itself.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self.wait_end()

    @property
    def num_texts(self) -> int:
        return sum(bool(event.get("choices") and _text(event)) for event in self.events)

    @property
    def text(self) -> str:
        return "".join(_text(event) for event in self.events if event.get("choices"))

    @property
    def finish_reason(self) -> str | None:
        reasons = [event["choices"][0]["finish_reason"] for event in self.events if event.get("choices")]
        return next((reason for reason in reasons if reason), None)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error event or the error body."""
        return next((event["error"] for event in self.events if "error" in event), None)

    @property
    def proof(self) -> dict[str, Any]:
        """The ``pdserve`` object."""
        proof: dict[str, Any] = next(event["pdserve"] for event in self.events if "pdserve" in event)
        return proof

    @property
    def is_whole(self) -> bool:
        """The answer is complete."""
        return self.status == 200 and self.finish_reason is not None and (self.done or not self._stream)

    def __repr__(self) -> str:
        return (
            f"<Stream status {self.status}, {len(self.events)} events, finish {self.finish_reason}, "
            f"error {self.error}, broken {self.broken!r}>"
        )

    def _run(self) -> None:
        try:
            self._connection.request("POST", self._path, self._body, self._headers)
            response = self._connection.getresponse()
            self.headers = {name.lower(): value for name, value in response.getheaders()}
            with self._changed:
                self.status = response.status
                self._changed.notify_all()
            if self._stream and response.status == 200:
                for line in response:
                    self._take(line)
            else:
                self._add(json.loads(response.read()))
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.broken = error
        finally:
            self._connection.close()
            with self._changed:
                self.ended_at = time.monotonic()
                self._changed.notify_all()

    def _take(self, line: bytes) -> None:
        if line.strip() == b"data: [DONE]":
            self.done = True
        elif line.startswith(b"data: "):
            self._add(json.loads(line[6:]))

    def _add(self, event: dict[str, Any]) -> None:
        with self._changed:
            self.events.append(event)
            self.arrivals.append(time.monotonic())
            self._changed.notify_all()


def _text(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    message = choice.get("delta", choice.get("message", {}))
    return str(choice.get("text") or message.get("content") or "")
