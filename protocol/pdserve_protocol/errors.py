"""Errors of the protocol.

ProtocolError
├── BadMessage          bytes that do not decode to a message of this protocol
├── VersionMismatch     the other process speaks another protocol version
├── AddressError        an address that is not HOST[:PORT]
├── NoSocketLeft        the process has as many sockets as it may
├── PortTaken           the port to bind is in use
├── NodeUnreachable     no answer from a node in time
└── UnsafeDoor          a door off loopback without a cluster key
"""

from __future__ import annotations


class ProtocolError(Exception):
    """Base of all errors of this package."""


class BadMessage(ProtocolError):
    def __init__(self, detail: str) -> None:
        super().__init__(f"not a message of this protocol: {detail}")


class VersionMismatch(ProtocolError):
    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(f"protocol version {theirs} on the other side, {ours} here; run the same pdserve on both")


class AddressError(ProtocolError):
    def __init__(self, text: str) -> None:
        super().__init__(f"{text!r} is not an address: use HOST or HOST:PORT, [HOST]:PORT for IPv6")


class NoSocketLeft(ProtocolError):
    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"no socket is left for {address}: {reason}; raise the limit of open files (ulimit -n)")


class PortTaken(ProtocolError):
    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"port {port} on {host} is taken; stop what uses it, or choose another: --port 0 picks one")


class NodeUnreachable(ProtocolError):
    def __init__(self, address: str, seconds: float) -> None:
        super().__init__(
            f"no answer from {address} within {seconds:g} s; is a node running there, and is --cluster-key the same?"
        )


class UnsafeDoor(ProtocolError):
    def __init__(self, host: str) -> None:
        super().__init__(
            f"--host {host} is reachable from other machines: give --cluster-key (or PDSERVE_CLUSTER_KEY), "
            "or --insecure to accept anyone"
        )
