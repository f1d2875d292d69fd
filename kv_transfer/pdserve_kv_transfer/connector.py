"""The contract of a connector: how bytes get from a KV cache into a landing region of another process.

A connector has two halves, made apart and used from one thread. Blocks are rows of the source's cache, slots are rows
of the target's region; both have the same number of bytes. Neither half knows ids, positions or digests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt
    from pdserve_protocol.handoff import Region

MAX_SLOTS = 1 << 20
"""Of a region."""


class SourceConnector(Protocol):
    """The writing half. Its memory, the whole KV cache, is readable by this process alone."""

    def connect(self, peer: str, region: Region) -> Future[None] | None:
        """Makes ``region`` writable under the name ``peer``, which is fresh for each connection.

        Where the owner has to be waited for it returns a future, which ends when the region is writable, or with one
        of these errors.

        Raises:
            RegionUnusable: the metadata is not of this connector.
            RegionUnreachable: the region's owner does not answer.
        """
        ...

    def write(self, peer: str, pieces: Sequence[tuple[int, int]]) -> int:
        """Starts writing blocks into slots, (block, slot) each, at least one, and returns a handle for ``poll``.

        The blocks must not change until the handle has ended. Runs of neighbours travel as one piece.

        Raises:
            RegionUnreachable: the peer is gone.
            WriteFault: the write cannot be started.
        """
        ...

    def poll(self, handle: int) -> bool:
        """Whether all bytes of the handle are at the target. A handle that has ended is forgotten.

        Raises:
            RegionUnreachable, WriteFault: the write ended badly; the handle is forgotten.
        """
        ...

    def abandon(self, handle: int) -> None:
        """Forgets a write under way. Its bytes may still arrive: only a fence at the target keeps them out."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forgets the peer; its handles have been polled to their end or abandoned. An unknown peer is no error."""
        ...

    def close(self) -> None:
        """Releases everything. Idempotent."""
        ...


class TargetConnector(Protocol):
    """The half that is written to. Each region is reachable by those alone who have its metadata."""

    def open_region(self, name: str, memory_SB: npt.NDArray[np.uint8]) -> bytes:
        """Makes ``memory_SB`` [num_slots, slot_bytes] writable from outside; returns metadata for ``connect``.

        ``name`` is fresh and differs from that of any region of any process. Nothing has to be called for bytes to
        arrive.

        Raises:
            RegionUnusable: the memory cannot be registered.
        """
        ...

    def fence(self, name: str) -> None:
        """Ends the region: soon every write to it fails at its source.

        Until its source has noticed, a write may still reach ``memory_SB`` (over shared memory it needs nobody's help
        here). The caller keeps those addresses reserved for good, so that nothing else can be hit.
        """
        ...

    def close(self) -> None:
        """Fences all regions. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Connector:
    """How to make the two halves of one kind. ``source`` takes the KV cache, uint8 [num_blocks, block_bytes]."""

    source: Callable[[npt.NDArray[np.uint8]], SourceConnector]
    target: Callable[[], TargetConnector]


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What a node tells a connector of its surroundings.

    Attributes:
        host: address to listen on; one that means all interfaces is possible.
        advertise_host: where peers reach this node, if the operator said so.
        cluster_key: secret of all nodes; None on loopback or where the operator wants no authentication.
    """

    host: str = "127.0.0.1"
    advertise_host: str | None = None
    cluster_key: str | None = field(default=None, repr=False)


MakeConnector = Callable[[Network], Connector]
"""What a connector is known by, here and to an entry point of another distribution."""
