"""``pdserve node``: asks a running node how it is, or to forget its prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve_protocol.client import EngineCoreClient
from pdserve_protocol.node import GetStatus, NodeStatus, PrefixCacheReset, ResetPrefixCache

from pdserve_cli.node_view import status_json, status_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_protocol.codec import Message
    from pdserve_protocol.door import Address
    from rich.console import Console


async def show_status(
    addresses: Sequence[Address], *, cluster_key: str | None, timeout: float, as_json: bool, console: Console
) -> int:
    """Prints the status of each node, as tables or as a line of JSON.

    Raises:
        NodeUnreachable: one of them does not answer.
    """
    for address in addresses:
        status: NodeStatus = await _ask(address, GetStatus(), cluster_key, timeout)
        if as_json:
            print(status_json(address, status), flush=True)
        else:
            console.print(status_view(address, status))
    return 0


async def reset_cache(
    addresses: Sequence[Address], *, cluster_key: str | None, timeout: float, console: Console
) -> int:
    """Empties the prefix cache of each node; 1 if a block of one could not be forgotten because it is in use.

    Raises:
        NodeUnreachable: one of them does not answer.
    """
    code = 0
    for address in addresses:
        reset: PrefixCacheReset = await _ask(address, ResetPrefixCache(), cluster_key, timeout)
        console.print(f"{address}: {reset.blocks_forgotten} blocks forgotten", highlight=False)
        if reset.blocks_left:
            console.print(f"[red]{address}: {reset.blocks_left} blocks left, because they are in use", highlight=False)
            code = 1
    return code


async def _ask(address: Address, message: Message, cluster_key: str | None, timeout: float) -> Any:
    client = EngineCoreClient(address, cluster_key=cluster_key)
    await client.start()
    try:
        return await client.ask(message, timeout)
    finally:
        await client.close()
