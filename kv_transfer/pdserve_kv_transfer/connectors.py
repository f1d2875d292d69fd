"""The connectors that exist, by the name that a node's identity lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_kv_transfer.loopback import LOOPBACK
from pdserve_kv_transfer.nixl import NIXL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_kv_transfer.connector import Connector

CONNECTORS: Mapping[str, Connector] = {"nixl": NIXL, "loopback": LOOPBACK}
