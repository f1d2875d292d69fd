"""What the mover tells the engine loop, as values. ``peer`` is the key that the command named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_protocol.handoff import Region


@dataclass(frozen=True, slots=True)
class RegionOpened:
    peer: str
    region: Region


@dataclass(frozen=True, slots=True)
class RegionFailed:
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Connected:
    peer: str


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Written:
    """These writes have ended; position -> digest of the block."""

    peer: str
    id: str
    digests: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """These writes are given up."""

    peer: str
    id: str
    positions: frozenset[int]
    reason: str


@dataclass(frozen=True, slots=True)
class Landed:
    """One landing pass is over: ``ok`` positions are verified and in the cache, ``bad`` ones are not.

    ``num_bytes`` of verified blocks, as they came; ``seconds``: how long the pass took.
    """

    peer: str
    id: str
    ok: frozenset[int]
    bad: frozenset[int]
    num_bytes: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class MoverDied:
    """A fault of ours; nothing moves any more."""

    error: BaseException


MoverEvent = RegionOpened | RegionFailed | Connected | ConnectFailed | Written | WriteFailed | Landed | MoverDied
