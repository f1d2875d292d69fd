"""Bytes of a server-sent event stream -> the data of its events, cut wherever the network cut them."""

from __future__ import annotations


class EventSplitter:
    """Each ``data:`` line is an event, as OpenAI servers send them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
