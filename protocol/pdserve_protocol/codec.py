"""Encoding of messages: tagged msgspec Structs as msgpack arrays, never an executable format.

Fields are append-only: a new field goes to the end and has a default, so that an older reader still understands.

Protocol versions
    1   first: requests, outputs, node status, hand-off by Offer, Grant, Sent, Done and State
    2   Offer says whether the prompt is finished; tries in Sent and Resend; Stopping; Meet and Retarget; blocks of
        unlike layouts, on lossy and sealed wires; log probabilities of prompts; no more HandoffFailed
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve_protocol.errors import BadMessage

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 64 << 20


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything that travels. Immutable; on the wire an array that begins with the class name."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A value inside a message; on the wire an array without a tag."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Bytes of one message."""
    return _encoder.encode(message)


class Decoder:
    """Decodes the messages that one door accepts: ``Decoder(A | B | C)``."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes | memoryview) -> Any:
        """One message of the union.

        Raises:
            BadMessage: the bytes are not msgpack, not of the union, or a field has a wrong type.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadMessage(str(error)) from error
