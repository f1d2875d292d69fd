"""Nodes for drills, each an ordinary one but for one thing:

drill_node.py prefill FOLDER [arguments]        its KV writes wait until FOLDER/gate exists, and one may be wrong: see
                                                CorruptSource
drill_node.py decode REGION_BYTES [arguments]   its landing regions have that size
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve_decode_node.policy import GrantWhenRoom
from pdserve_engine.args import parse_node_args
from pdserve_engine.node import NodeParts, run_node
from pdserve_kv_transfer.connector import Connector
from pdserve_kv_transfer.slow import slow
from pdserve_prefill_node.policy import RecentSpeed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt
    from pdserve_kv_transfer.connector import SourceConnector
    from pdserve_protocol.handoff import Region


class CorruptSource:
    """Writes one block wrong: that with the number in FOLDER/corrupt, counted from when the file was made.

    FOLDER/written has one byte for each block that was asked to be written meanwhile.
    """

    def __init__(self, inner: SourceConnector, cache_NB: npt.NDArray[np.uint8], folder: Path) -> None:
        self._inner = inner
        self._num_blocks = len(cache_NB)
        self._order = folder / "corrupt"
        self._written = folder / "written"

    def connect(self, peer: str, region: Region) -> Future[None] | None:
        return self._inner.connect(peer, region)

    def write(self, peer: str, pieces: Sequence[tuple[int, int]]) -> int:
        if self._order.exists():
            index = int(self._order.read_text()) - self._written.stat().st_size
            if 0 <= index < len(pieces):
                block, slot = pieces[index]
                pieces = [*pieces[:index], ((block + 1) % self._num_blocks, slot), *pieces[index + 1 :]]
            with self._written.open("ab") as written:
                written.write(bytes(len(pieces)))
        return self._inner.write(peer, pieces)

    def poll(self, handle: int) -> bool:
        return self._inner.poll(handle)

    def abandon(self, handle: int) -> None:
        self._inner.abandon(handle)

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)

    def close(self) -> None:
        self._inner.close()


def corrupt(connector: Connector, folder: Path) -> Connector:
    """``connector`` with a CorruptSource around its source."""

    def source(cache_NB: npt.NDArray[np.uint8]) -> SourceConnector:
        return CorruptSource(connector.source(cache_NB), cache_NB, folder)

    return Connector(source=source, target=connector.target)


def main(role: str, setting: str, argv: Sequence[str]) -> int:
    args = parse_node_args(f"{role}-node", "drill", default_port=7001, max_num_batched_tokens=512, argv=argv)
    if role == "decode":
        return run_node("decode", args, NodeParts(receive_policy=GrantWhenRoom(), region_bytes=int(setting)))
    folder = Path(setting)

    def drilled(connector: Connector) -> Connector:
        return corrupt(slow(connector, gate=(folder / "gate").exists), folder)

    return run_node("prefill", args, NodeParts(send_policy=RecentSpeed(), wrap_connector=drilled))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
