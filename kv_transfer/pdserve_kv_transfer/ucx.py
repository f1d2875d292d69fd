"""Where UCX, the transport under NIXL, may listen, and how much it logs. Environment, read when NIXL is first used."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from pdserve_kv_transfer.errors import NoSuchInterface

_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s24s")
_IFCONF = struct.Struct("iP")


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


def interface_of(host: str) -> str | None:
    """Name of the interface with this address or host name; None for the address that means all.

    Raises:
        NoSuchInterface: no interface has it.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NoSuchInterface(host) from error
    interfaces = _ipv4_interfaces() | _ipv6_interfaces()
    for _, _, _, _, sockaddr in found:
        address = ipaddress.ip_address(str(sockaddr[0]).split("%")[0])
        if address.is_unspecified:
            return None
        if address.is_loopback:
            return "lo"
        if address in interfaces:
            return interfaces[address]
    raise NoSuchInterface(host)


def _ipv4_interfaces() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    """Every IPv4 address of this machine, by what the kernel's SIOCGIFCONF tells."""
    import array

    buffer = array.array("B", bytes(256 * _IFREQ.size))
    request = _IFCONF.pack(len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        used, _ = _IFCONF.unpack(fcntl.ioctl(probe, _SIOCGIFCONF, request))
    interfaces: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    for name, address in _IFREQ.iter_unpack(buffer.tobytes()[:used]):
        label = name.split(b"\0")[0].decode().split(":")[0]
        interfaces[ipaddress.IPv4Address(address[4:8])] = label
    return interfaces


def _ipv6_interfaces() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return {}
    rows = [line.split() for line in table.read_text().splitlines()]
    return {ipaddress.IPv6Address(bytes.fromhex(row[0])): row[5] for row in rows}
