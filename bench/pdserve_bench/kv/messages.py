"""What sender, receiver and the other host say to each other, over doors as nodes have; and the sender to the run."""

from __future__ import annotations

import msgspec
from pdserve_protocol.codec import Decoder, Message
from pdserve_protocol.handoff import Region

from pdserve_bench.kv.config import Point, Way


class StartReceiver(Message, frozen=True):
    """To the other host: a receiver for this way, please; answered by Started."""

    way: Way


class Started(Message, frozen=True):
    port: int


class OpenRegion(Message, frozen=True):
    """To a receiver; answered by RegionOpen."""

    connector: str
    num_slots: int
    slot_bytes: int


class RegionOpen(Message, frozen=True):
    region: Region


class OpenSocket(Message, frozen=True):
    """To a receiver: a plain stream, on which so many bytes at a time are answered by one; answered by SocketOpen."""

    num_bytes: int


class SocketOpen(Message, frozen=True):
    port: int


class OpenNixl(Message, frozen=True):
    """To a receiver: a NIXL agent of its own with one buffer of so many bytes; answered by NixlOpen."""

    num_bytes: int


class NixlOpen(Message, frozen=True):
    agent: bytes
    address: int


class Refused(Message, frozen=True):
    """Instead of an answer."""

    reason: str


RECEIVER_HEARS = Decoder(StartReceiver | OpenRegion | OpenSocket | OpenNixl)
SENDER_HEARS = Decoder(Started | RegionOpen | SocketOpen | NixlOpen | Refused)


class SenderTask(msgspec.Struct, frozen=True):
    """What a sender is started for, as JSON on its stdin."""

    way: Way
    host: str
    port: int
    points: list[Point]
    wire_dtypes: list[str]
    repetitions: int


class Sample(msgspec.Struct, frozen=True):
    """One measurement, as a line of JSON on a sender's stdout.

    Attributes:
        what: "memcpy", "socket", "nixl" for one buffer of the point's bytes; "connector" for its writes alone; "mover"
            and a wire dtype for packing, digests and writes on the mover's thread.
    """

    what: str
    point: Point
    seconds: float
