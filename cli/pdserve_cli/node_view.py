"""A node's status as it looks in a terminal and as JSON. Knows the wire types and nothing of sockets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pdserve_cli.proof_view import size

if TYPE_CHECKING:
    from pdserve_protocol.door import Address
    from pdserve_protocol.node import NodeLoad, NodeStatus


def status_view(address: Address, status: NodeStatus) -> Group:
    """Everything that a node tells of itself."""
    layout = status.info.identity.layout
    return Group(
        _title(address, status),
        Text(f"\nKV blocks, each of {layout.block_size} tokens and {size(layout.block_bytes)}"),
        _blocks(status.load),
        Text("\nRequests"),
        _requests(status.load),
        Text("\nSince the start"),
        _counters(status),
        Text("\nPeers" if status.peers else "\nNo peers"),
        *([_peers(status)] if status.peers else []),
    )


def status_json(address: Address, status: NodeStatus) -> str:
    """The same as one line of JSON."""
    info, load = status.info, status.load
    return json.dumps(
        {
            "address": str(address),
            "role": info.identity.role,
            "model": info.served_model_name,
            "uptime_s": round(status.uptime_s, 3),
            "load": {name: getattr(load, name) for name in load.__struct_fields__},
            "limits": {"max_model_len": info.max_model_len, "kv_capacity_tokens": info.kv_capacity_tokens},
            "identity": msgspec.structs.asdict(info.identity)
            | {"layout": msgspec.structs.asdict(info.identity.layout)},
            "counters": status.counters,
            "peers": status.peers,
            "peer_counters": status.peer_counters,
            "gauges": status.gauges,
            "histograms": {name: msgspec.structs.asdict(times) for name, times in status.histograms.items()},
            "software": info.software,
        }
    )


def _title(address: Address, status: NodeStatus) -> Text:
    info = status.info
    text = Text.assemble(
        (f"{info.identity.role} node {address}", "bold cyan"),
        f"  {info.served_model_name}, up {_span(status.uptime_s)}",
    )
    if status.load.draining:
        text.append("  draining", "bold yellow")
    text.append(
        f"\nboot {info.identity.boot_id}, context {info.max_model_len} tokens, cache {info.kv_capacity_tokens} tokens"
        f"\nconnectors {', '.join(info.identity.connectors)}; numerics {info.identity.numerics}; {info.software}",
        "dim",
    )
    return text


def _blocks(load: NodeLoad) -> Table:
    parts = {
        "free": load.blocks_free,
        "cached": load.blocks_cached,
        "held": load.blocks_held,
        "in use": load.blocks_in_use,
    }
    table = Table()
    table.add_column("state")
    for heading in ("blocks", "share"):
        table.add_column(heading, justify="right")
    for name, count in parts.items():
        table.add_row(name, str(count), f"{100 * count / max(1, load.blocks_total):.1f} %")
    if (total := sum(parts.values())) == load.blocks_total:
        table.add_row("total", str(total), "", style="bold")
    else:
        table.add_row("total", f"{load.blocks_total}, but the parts are {total}", "", style="bold red")
    return table


def _requests(load: NodeLoad) -> Table:
    table = Table()
    for heading in ("running", "waiting", "hand-offs"):
        table.add_column(heading, justify="right")
    table.add_row(str(load.running), str(load.waiting), str(load.handoffs))
    return table


def _counters(status: NodeStatus) -> Table:
    table = Table()
    table.add_column("counter")
    table.add_column("value", justify="right")
    for name, value in (status.counters | status.gauges).items():
        table.add_row(name.replace("_", " "), f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}")
    return table


def _peers(status: NodeStatus) -> Table:
    table = Table()
    table.add_column("node")
    table.add_column("link")
    table.add_column("since the start")
    for peer in sorted(status.peers | status.peer_counters):
        counts = (
            f"{name.replace('_', ' ')} {value:,.0f}" for name, value in status.peer_counters.get(peer, {}).items()
        )
        table.add_row(peer, status.peers.get(peer, ""), ", ".join(counts))
    return table


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
