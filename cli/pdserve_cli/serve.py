"""``pdserve serve``: one of each (or more) on this machine, serving until Ctrl-C."""

from __future__ import annotations

import errno
import json
import socket
from typing import TYPE_CHECKING

from pdserve_protocol.errors import PortTaken
from rich.table import Table

from pdserve_cli.errors import ArgumentError
from pdserve_cli.fleet import Fleet, reachable
from pdserve_cli.openai_api import model_names
from pdserve_cli.supervise import Interrupted, supervise
from pdserve_cli.terminal import LogLines

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve_cli.commands import FleetConfig
    from pdserve_cli.fleet import Member


async def serve(config: FleetConfig, *, console: Console, log: Console) -> int:
    """Serves until SIGINT or SIGTERM; 0 then.

    Raises:
        PortTaken, ArgumentError: the router could not listen; nothing has been started.
        CliError: a process did not start, or ended by itself.
    """
    check_port(config.host, config.port)
    lines = LogLines(log)
    status = console.status("starting nodes: reading weights, making room for KV")

    def on_ready(member: Member) -> None:
        console.print(f"[green]ready[/] {member.name} on {member.where}", highlight=False, soft_wrap=True)

    fleet = Fleet(config, on_line=lines.show, on_ready=on_ready)

    async def work(fleet: Fleet) -> int:
        names = await model_names(fleet.url)
        status.stop()
        console.print(summary(fleet.members))
        console.print(f"Try it (Ctrl-C here stops all {len(fleet.members)} processes):\n")
        console.out(curl_example(fleet.url, names[0]) + "\n", highlight=False)
        raise await fleet.first_end()

    def on_stopping() -> None:
        status.update("stopping: running requests finish first; Ctrl-C again ends at once")
        status.start()

    status.start()
    try:
        return await supervise(fleet, work, on_stopping=on_stopping)
    except Interrupted:
        status.stop()
        console.print("all processes have stopped")
        return 0
    finally:
        status.stop()


def check_port(host: str, port: int) -> None:
    """That the port is free is learnt before models are loaded.

    Raises:
        PortTaken: it is not.
        ArgumentError: it cannot be listened on.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server((where[0], port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(host, port) from error
        raise ArgumentError(f"--host {host} --port {port}: {error}") from error


def summary(members: list[Member]) -> Table:
    """Who runs where."""
    table = Table()
    for heading in ("process", "address", "pid", "cores", "serves"):
        table.add_column(heading, no_wrap=heading != "serves")
    for member in members:
        cores = ", ".join(map(str, member.cores)) or "shared"
        table.add_row(member.name, member.where, str(member.pid), cores, member.what)
    return table


def curl_example(url: str, model: str) -> str:
    """A command to paste into a shell."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    quoted = body.replace("'", "'\\''")
    return (
        f"curl -N http://{reachable(url)}/v1/chat/completions \\\n"
        f"  -H 'Content-Type: application/json' \\\n  -d '{quoted}'"
    )
