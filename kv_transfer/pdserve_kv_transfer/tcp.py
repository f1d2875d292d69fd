"""The tcp connector: plain sockets, nothing to install.

A source has one connection to each region, on which a thread of its own sends runs of blocks straight from the cache;
system calls of whole runs leave the interpreter to others. A target has one port, and a thread for each connection that
receives straight into the slots and acknowledges what lies there. A connection is authenticated (see tcp_wire.py) and
bound to one region, whose bounds the target checks; it is not encrypted. What is no handshake ends its connection.

After a fence no later write lands: the connections of the region are shut, and their threads have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_kv_transfer.connector import Connector
from pdserve_kv_transfer.tcp_source import TcpSource
from pdserve_kv_transfer.tcp_target import TcpTarget

if TYPE_CHECKING:
    from pdserve_kv_transfer.connector import Network


def tcp_connector(network: Network) -> Connector:
    return Connector(source=lambda cache_NB: TcpSource(cache_NB, network), target=lambda: TcpTarget(network))
