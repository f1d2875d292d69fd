"""A prefill node and a decode node on cores of their own, and a router, as processes; asked how they are."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from pdserve_protocol.client import EngineCoreClient
from pdserve_protocol.door import Address
from pdserve_protocol.node import GetStatus

from pdserve_bench.errors import ServerNotUsable
from pdserve_bench.router.process import Child, wait_until_ready
from pdserve_bench.serve.client import Client

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_protocol.node import NodeStatus

_TIMEOUT_S = 300.0


class Processes:
    """A context manager: they end with the block.

    Attributes:
        ports: on this machine, of ``prefill``, ``decode`` and ``router``.
    """

    ports: dict[str, int]

    def __init__(self, model: str, flags: Sequence[str], decode_flags: Sequence[str] = ()) -> None:
        """``flags``: of both nodes."""
        self._flags = {"prefill": [*flags], "decode": [*flags, *decode_flags]}
        self._model = model
        self._running = ExitStack()

    def __enter__(self) -> Self:
        """Raises:
        ServerNotUsable: one of them does not start.
        """
        with ExitStack() as unless_all_run:
            cores = sorted(os.sched_getaffinity(0))
            ports = {}
            for role, core in (("prefill", cores[0]), ("decode", cores[1 % len(cores)])):
                arguments = ["--model", self._model, "--port", "0", "--threads", "1", "--log-level", "error"]
                module = f"pdserve_{role}_node.main"
                node = Child(module, [*arguments, *self._flags[role]], {core})
                unless_all_run.enter_context(node)
                ports[role] = _port(node, module)
            addresses = [part for role, port in ports.items() for part in (f"--{role}", f"127.0.0.1:{port}")]
            router = Child(
                "pdserve_router.main",
                [*addresses, "--port", "0", "--local-prefill", "never", "--log-level", "error"],
                set(cores),
            )
            unless_all_run.enter_context(router)
            ports["router"] = _port(router, "pdserve_router.main")
            wait_until_ready(ports["router"])
            self._running = unless_all_run.pop_all()
        self.ports = ports
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()


class Fleet:
    """An async context manager: connections to processes that run.

    Attributes:
        client: of the router's completions.
    """

    client: Client

    def __init__(self, processes: Processes) -> None:
        self._ports = processes.ports
        self._nodes: dict[str, EngineCoreClient] = {}

    async def __aenter__(self) -> Self:
        for role in ("prefill", "decode"):
            self._nodes[role] = EngineCoreClient(Address("127.0.0.1", self._ports[role]))
            await self._nodes[role].start()
        self.client = Client(f"http://127.0.0.1:{self._ports['router']}/v1/completions", timeout_s=_TIMEOUT_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for client in self._nodes.values():
            await client.close()

    async def status(self, role: str) -> NodeStatus:
        """What the prefill or decode node says of itself."""
        status: NodeStatus = await self._nodes[role].ask(GetStatus())
        return status


def _port(child: Child, module: str) -> int:
    match = re.search(r":(\d+)(?: |$)", child.ready_line)
    if match is None:
        raise ServerNotUsable(module, f"it says {child.ready_line!r}")
    return int(match[1])
