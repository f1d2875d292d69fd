"""Prefill nodes, decode nodes and a router on this machine, as one thing that starts and stops.

Knows nothing of what is then asked of them.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from pdserve_protocol.door import Address, parse_address

from pdserve_cli.commands import (
    DECODE,
    NODE_READY,
    PREFILL,
    ROUTER,
    ROUTER_READY,
    FleetConfig,
    kind_of,
    node_commands,
    router_command,
)
from pdserve_cli.errors import ChildFailed, ChildNotReady
from pdserve_cli.processes import Child, Command, start_child

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

NODE_START_S = 300.0
"""The first start of a model unpacks and converts its weights."""
ROUTER_START_S = 30.0
STOP_GRACE_S = 10.0
"""Beyond what a process may take to drain."""

_READY_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process that is ready.

    Attributes:
        where: its address; of the router, its URL.
        what: what a node says that it serves.
        cores: those it computes on.
    """

    name: str
    pid: int
    where: str
    what: str = ""
    cores: tuple[int, ...] = ()


class Fleet:
    """After ``start`` all serve; after ``stop``, which is due whatever ``start`` did, none is left.

    Attributes:
        members: the processes that are ready.
        url: of the router; empty before it is ready.
    """

    def __init__(
        self,
        config: FleetConfig,
        *,
        on_line: Callable[[str, str], None],
        on_ready: Callable[[Member], None] = lambda member: None,
    ) -> None:
        """Args:
        on_line: called with (name, line) for each log line.
        on_ready: called when a process has become ready.
        """
        self.members: list[Member] = []
        self.url = ""
        self._config = config
        self._on_line = on_line
        self._on_ready = on_ready
        self._children: list[Child] = []

    async def start(self) -> None:
        """Starts the nodes at the same time, then the router; returns when the router can serve.

        Raises:
            ChildFailed, ChildNotReady: one of them did not come up.
        """
        commands = node_commands(self._config)
        children = [await self._start(command) for command in commands]
        waits = [self._node_ready(child, command) for child, command in zip(children, commands, strict=True)]
        await _together(waits, until=asyncio.FIRST_EXCEPTION)
        order = [command.name for command in commands]
        self.members.sort(key=lambda member: order.index(member.name))
        command = router_command(self._config, prefill=self._addresses(PREFILL), decode=self._addresses(DECODE))
        router = await self._start(command)
        self.url = (await router.ready(ROUTER_READY, ROUTER_START_S))["url"]
        await _together([self._serves(), self._fails_early(router)], until=asyncio.FIRST_COMPLETED)
        self._add(Member(name=ROUTER, pid=router.pid, where=self.url))

    async def first_end(self) -> ChildFailed:
        """Waits until one of the processes has ended, and says which."""
        tasks = {asyncio.create_task(child.ended()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        task = next(iter(done))
        return ChildFailed(tasks[task].name, task.result(), "while it was serving")

    async def stop(self) -> dict[str, int]:
        """Stops the router, which lets its requests finish, then the nodes; returns exit codes by name. Idempotent."""
        codes: dict[str, int] = {}
        timeout = self._config.drain_timeout_s + STOP_GRACE_S
        routers = [child for child in self._children if child.name == ROUTER]
        nodes = [child for child in self._children if child.name != ROUTER]
        try:
            for group in (routers, nodes):
                ended = await asyncio.gather(*(child.stop(timeout) for child in group))
                codes |= {child.name: code for child, code in zip(group, ended, strict=True)}
        finally:
            self.kill()
        return codes

    def kill(self) -> None:
        """SIGKILL to all that still run."""
        for child in self._children:
            if child.exit_code is None:
                child.kill()

    def _addresses(self, kind: str) -> list[str]:
        return [member.where for member in self.members if kind_of(member.name) == kind]

    async def _start(self, command: Command) -> Child:
        child = await start_child(command, self._on_line)
        self._children.append(child)
        return child

    async def _node_ready(self, child: Child, command: Command) -> None:
        match = await child.ready(NODE_READY, NODE_START_S)
        where, cores = match["address"], tuple(command.cores or ())
        self._add(Member(name=child.name, pid=child.pid, where=where, what=match["what"], cores=cores))

    def _add(self, member: Member) -> None:
        self.members.append(member)
        self._on_ready(member)

    async def _fails_early(self, router: Child) -> None:
        raise ChildFailed(router.name, await router.ended(), "before it could serve")

    async def _serves(self) -> None:
        """Until the router has a pair of nodes. HTTP has nothing to wait on, so it is asked again and again."""
        deadline = time.monotonic() + ROUTER_START_S
        url = f"http://{reachable(self.url)}/ready"
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline:
                try:
                    async with session.get(url) as response:
                        if response.status == 200 and not json.loads(await response.read()).get("degraded"):
                            return
                except aiohttp.ClientConnectionError:
                    # It is ending, which says more than this error does: see _fails_early.
                    pass
                await asyncio.sleep(_READY_POLL_S)
        raise ChildNotReady(ROUTER, ROUTER_START_S)


def reachable(url: str) -> Address:
    """Host and port of an ``http://HOST:PORT`` URL, for a client on this machine."""
    address = parse_address(url.removeprefix("http://"), 0)
    return Address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host), address.port)


async def _together(work: Sequence[Coroutine[Any, Any, None]], *, until: str) -> None:
    """Runs all at once until the first error, or with FIRST_COMPLETED the first end; raises it and cancels the rest."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=until)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()
