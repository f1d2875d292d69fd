"""The network interfaces of this machine and their addresses."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from pdserve_kv_transfer.errors import NoSuchInterface

_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s24s")
_IFCONF = struct.Struct("iP")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def interface_of(host: str) -> str | None:
    """Name of the interface with this address or host name; None for the address that means all.

    Raises:
        NoSuchInterface: no interface has it.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NoSuchInterface(host) from error
    addresses = interfaces()
    for _, _, _, _, sockaddr in found:
        address = ipaddress.ip_address(str(sockaddr[0]).split("%")[0])
        if address.is_unspecified:
            return None
        if address.is_loopback:
            return "lo"
        if address in addresses:
            return addresses[address]
    raise NoSuchInterface(host)


def interfaces() -> dict[IPAddress, str]:
    """Name of the interface by address, IPv4 first."""
    return _ipv4_interfaces() | _ipv6_interfaces()


def _ipv4_interfaces() -> dict[IPAddress, str]:
    """Every IPv4 address of this machine, by what the kernel's SIOCGIFCONF tells."""
    buffer = array.array("B", bytes(256 * _IFREQ.size))
    request = _IFCONF.pack(len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        used, _ = _IFCONF.unpack(fcntl.ioctl(probe, _SIOCGIFCONF, request))
    found: dict[IPAddress, str] = {}
    for name, address in _IFREQ.iter_unpack(buffer.tobytes()[:used]):
        label = name.split(b"\0")[0].decode().split(":")[0]
        found[ipaddress.IPv4Address(address[4:8])] = label
    return found


def _ipv6_interfaces() -> dict[IPAddress, str]:
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return {}
    rows = [line.split() for line in table.read_text().splitlines()]
    return {ipaddress.IPv6Address(bytes.fromhex(row[0])): row[5] for row in rows}
