"""Doors: addresses, the keys that a cluster key gives, and ZMQ sockets that use them.

With a cluster key every connection is encrypted and authenticated with CURVE (RFC 26/CurveZMQ): one key pair, derived
from the cluster key, belongs to every process of the cluster, and a ZAP handler (RFC 27) admits that key alone. Without
one the sockets are plain, which is right on loopback only.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from pdserve_protocol.codec import MAX_MESSAGE_BYTES
from pdserve_protocol.errors import AddressError, NoSocketLeft, PortTaken, UnsafeDoor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

PREFILL_PORT = 7001
DECODE_PORT = 7002
ROUTER_PORT = 8000

CLUSTER_KEY_VARIABLE = "PDSERVE_CLUSTER_KEY"

_ZAP_DOMAIN = "pdserve"
_MAX_UNREAD = 64
"""Messages of one visitor of a door that ZMQ keeps."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a door is."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int) -> Address:
    """``HOST``, ``HOST:PORT`` or ``[HOST]:PORT``.

    Raises:
        AddressError: it is none of these, or the port is not in 1..65535.
    """
    host, port = text, str(default_port)
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise AddressError(text)
        port = rest[1:] or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise AddressError(text)
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name counts by the addresses it has."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except socket.gaierror as error:
        raise AddressError(host) from error
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def cluster_key(given: str | None, environ: Mapping[str, str]) -> str | None:
    """The cluster's secret: what the command line says, else the environment; an empty one is none."""
    return given or environ.get(CLUSTER_KEY_VARIABLE) or None


def check_door(host: str, cluster_key: str | None, insecure: bool) -> None:
    """Refuses a door that others could enter by accident.

    Raises:
        UnsafeDoor: ``host`` is not loopback, there is no cluster key, and the operator did not say ``--insecure``.
    """
    if not cluster_key and not insecure and not is_loopback(host):
        raise UnsafeDoor(host)


def _key_pair(cluster_key: str) -> tuple[bytes, bytes]:
    """(public, secret) CURVE keys, z85, of everyone who knows the cluster key."""
    secret = z85.encode(hashlib.blake2b(cluster_key.encode(), digest_size=32, person=b"pdserve-curve").digest())
    return zmq.curve_public(secret), secret


class _OneKey:
    """ZAP credentials: the public key of the cluster and no other."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Door:
    """A bound ROUTER socket. ``close`` is idempotent."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, cluster_key: str | None) -> None:
        """Binds.

        Args:
            port: 0 picks a free one; see ``self.port``.

        Raises:
            PortTaken: something else listens there.
            AddressError: ``host`` is not an address of this machine.
        """
        self._authenticator: ThreadAuthenticator | None = None
        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            raise AddressError(host) from error
        self.socket = _new_socket(context, zmq.ROUTER, ipv6=family == socket.AF_INET6)
        self.socket.router_mandatory = True
        # Nothing is lost of who says more than is read: it waits at its sender.
        self.socket.rcvhwm = _MAX_UNREAD
        if cluster_key is not None:
            public, secret = _key_pair(cluster_key)
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain=_ZAP_DOMAIN, credentials_provider=_OneKey(public))
            self.socket.zap_domain = _ZAP_DOMAIN.encode()
            self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
            self.socket.curve_server = True
        try:
            self.socket.bind(f"tcp://{Address(str(where[0]), port) if port else _any_port(str(where[0]))}")
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise PortTaken(host, port) from error
            raise AddressError(f"{host}:{port}") from error
        self.port = int(self.socket.last_endpoint.rpartition(b":")[2])

    def close(self) -> None:
        self.socket.close(linger=500)
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


def connect_door(context: Any, address: Address, cluster_key: str | None, *, monitor: int = 0) -> Any:
    """A DEALER socket of ``context`` (plain or asyncio) to a node's door.

    It keeps messages while there is no connection, and what it has received when one ends.

    Args:
        monitor: events that the socket's ``get_monitor_socket()`` will tell, from the first connection on.

    Raises:
        AddressError: the address cannot be one, wherever it leads.
        NoSocketLeft: the process has as many sockets as it may.
    """
    try:
        dealer = _new_socket(context, zmq.DEALER, ipv6=":" in address.host)
    except zmq.ZMQError as error:
        raise NoSocketLeft(str(address), str(error)) from error
    dealer.reconnect_ivl, dealer.reconnect_ivl_max = 50, 1000
    if cluster_key is not None:
        public, secret = _key_pair(cluster_key)
        dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = public, secret, public
    if monitor:
        dealer.get_monitor_socket(monitor)
    try:
        dealer.connect(f"tcp://{address}")
    except zmq.ZMQError as error:
        dealer.close(linger=0)
        raise AddressError(str(address)) from error
    return dealer


def _any_port(host: str) -> str:
    return f"[{host}]:*" if ":" in host else f"{host}:*"


def _new_socket(context: Any, kind: int, *, ipv6: bool) -> Any:
    new = context.socket(kind)
    new.ipv6 = ipv6
    new.maxmsgsize = MAX_MESSAGE_BYTES
    # A full queue would drop messages without a word; who does not read for three seconds is cut off instead.
    new.sndhwm = new.rcvhwm = 0
    return new
