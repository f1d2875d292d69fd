"""Staging: memory from which a connector writes what is not in the KV cache as it travels.

Rows are taken to pack a block and given back when its write has ended. Knows neither blocks nor peers.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pdserve_kv_transfer.pages import map_large

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    import numpy.typing as npt

    from pdserve_kv_transfer.connector import SourceConnector

STAGING_BYTES = 16 << 20
MIN_ROWS = 4


class Staging:
    """Rows of one size, and the source half of a connector over them.

    Raises:
        TransferError: the source cannot be made, or there is no memory.
    """

    def __init__(self, row_bytes: int, source: Callable[[npt.NDArray[np.uint8]], SourceConnector]) -> None:
        num_rows = max(STAGING_BYTES // row_bytes, MIN_ROWS)
        _, memory_B = map_large(num_rows * row_bytes)
        self.memory_SB: npt.NDArray[np.uint8] = memory_B.reshape(num_rows, row_bytes)
        self.source = source(self.memory_SB)
        self._free = deque(range(num_rows))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free row; there must be one."""
        return self._free.popleft()

    def give_back(self, rows: Iterable[int]) -> None:
        self._free.extend(rows)
