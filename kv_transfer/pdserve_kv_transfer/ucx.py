"""Where UCX, the transport under NIXL, may listen, and how much it logs. Environment, read when NIXL is first used."""

from __future__ import annotations

import os

from pdserve_kv_transfer.interfaces import interface_of


def configure_ucx(host: str) -> None:
    """Binds UCX to the interface that has the address ``host``; call before the first NIXL agent exists.

    An address that means all interfaces restricts nothing. What the operator has set in the environment stays.

    Raises:
        NoSuchInterface: no interface has the address.
    """
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    interface = interface_of(host)
    if interface is not None:
        os.environ.setdefault("UCX_NET_DEVICES", interface)
