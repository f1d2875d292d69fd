"""Connectors by name: ours, those of other distributions, and how an operator asks for one.

Another distribution adds one by an entry point of the group ``pdserve.kv_connectors``, which names a MakeConnector.
"""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_kv_transfer.connector import Network
from pdserve_kv_transfer.errors import BadConnectorSpec, ConnectorMissing
from pdserve_kv_transfer.faults import parse_faults
from pdserve_kv_transfer.faulty import faulty
from pdserve_kv_transfer.loopback import LOOPBACK
from pdserve_kv_transfer.nixl import nixl_connector, nixl_is_installed
from pdserve_kv_transfer.tcp import tcp_connector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_kv_transfer.connector import Connector, MakeConnector
    from pdserve_kv_transfer.faults import Faults

log = logging.getLogger(__name__)

ENTRY_POINTS = "pdserve.kv_connectors"

_OURS: Mapping[str, MakeConnector] = {
    "nixl": nixl_connector,
    "tcp": tcp_connector,
    "loopback": lambda network: LOOPBACK,
}

CONNECTORS: Mapping[str, Connector] = {name: make(Network()) for name, make in _OURS.items()}
"""Ours, for this machine alone."""


@dataclass(frozen=True, slots=True)
class ConnectorSpec:
    """A connector as an operator asks for it: ``NAME``, or ``faulty:NAME?FAULTS`` for a drill.

    ``name`` is what the two nodes of a link agree on; faults are this node's own.
    """

    name: str
    faults: Faults | None = None


def default_connectors() -> str:
    """What a node uses where nobody says it, best first."""
    return "nixl,tcp" if nixl_is_installed() else "tcp"


def parse_connectors(text: str) -> list[ConnectorSpec]:
    """Reads ``SPEC,SPEC...``, best first.

    Raises:
        BadConnectorSpec: it is no such list.
    """
    specs = [_parse(part.strip()) for part in text.split(",")]
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise BadConnectorSpec(text, "a connector is named twice")
    return specs


def _parse(text: str) -> ConnectorSpec:
    kind, colon, rest = text.partition(":")
    name, _, faults = rest.partition("?") if colon else (kind, "", "")
    if not name or (colon and kind != "faulty"):
        raise BadConnectorSpec(text, "NAME or faulty:NAME?FAULT=VALUE&... is expected")
    return ConnectorSpec(name, parse_faults(faults) if colon else None)


def make_connector(spec: ConnectorSpec, network: Network) -> Connector:
    """Ours of that name, or another distribution's.

    Raises:
        ConnectorMissing: there is none, or it cannot be imported.
    """
    connector = _maker(spec.name)(network)
    if spec.faults is None:
        return connector
    log.warning("KV connector %s goes wrong on purpose: %s", spec.name, spec.faults)
    return faulty(connector, spec.faults)


def _maker(name: str) -> MakeConnector:
    ours = _OURS.get(name)
    if ours is not None:
        return ours
    found = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise ConnectorMissing(name, f"there are {', '.join(sorted({*_OURS, *found}))}")
    try:
        make: MakeConnector = found[name].load()
    except (ImportError, AttributeError) as error:
        raise ConnectorMissing(name, f"{found[name].value}: {error}") from error
    return make
