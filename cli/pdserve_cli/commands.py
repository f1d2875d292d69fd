"""What to run for a prefill node, a decode node and a router on this machine, and how each says that it is ready.

Knows their command lines. Knows nothing of running processes.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve_cli.cores import split_cores
from pdserve_cli.processes import Command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PREFILL, DECODE, ROUTER = "prefill-node", "decode-node", "router"
NODE_READY = re.compile(r"-node ready on (?P<address>\S+) \((?P<what>.*)\)")
ROUTER_READY = re.compile(r"(?P<url>http://\S+:\d+)")

PROGRAMS: Mapping[str, Sequence[str]] = {
    PREFILL: (sys.executable, "-m", "pdserve_prefill_node.main"),
    DECODE: (sys.executable, "-m", "pdserve_decode_node.main"),
    ROUTER: (sys.executable, "-m", "pdserve_router.main"),
}


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """How many of what, and the flags that each gets.

    Attributes:
        host, port: of the router; nodes listen on loopback, on ports that are free.
        node_flags, router_flags: passed on as they are.
        cores: split between the nodes; the router, which hardly computes, may run on all of them.
        drain_timeout_s: how long the processes may take to finish their requests when they are stopped.
        env: added to their environment.
        programs: what is run for each.
    """

    num_prefill: int = 1
    num_decode: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    node_flags: Sequence[str] = ()
    router_flags: Sequence[str] = ()
    cores: Sequence[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    drain_timeout_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, Sequence[str]] = field(default_factory=lambda: PROGRAMS)


def node_commands(config: FleetConfig) -> list[Command]:
    """Command of each node, prefill nodes first."""
    kinds = [PREFILL] * config.num_prefill + [DECODE] * config.num_decode
    return [
        Command(
            name=name,
            argv=[*config.programs[kind], "--port", "0", "--threads", str(len(cores)), *config.node_flags],
            cores=cores,
            env=config.env,
        )
        for kind, name, cores in zip(kinds, _names(kinds), split_cores(config.cores, len(kinds)), strict=True)
    ]


def router_command(config: FleetConfig, *, prefill: Sequence[str], decode: Sequence[str]) -> Command:
    """Command of the router in front of the nodes at these addresses."""
    sides = [*(["--prefill", *prefill] if prefill else []), "--decode", *decode]
    door = ["--host", config.host, "--port", str(config.port)]
    return Command(name=ROUTER, argv=[*config.programs[ROUTER], *sides, *door, *config.router_flags], env=config.env)


def kind_of(name: str) -> str:
    """The program behind a command's name."""
    return name.partition(" ")[0]


def _names(kinds: Sequence[str]) -> Iterator[str]:
    """``prefill-node``, or ``prefill-node 1``, ``prefill-node 2`` where there are several."""
    for index, kind in enumerate(kinds):
        number = kinds[: index + 1].count(kind)
        yield kind if kinds.count(kind) == 1 else f"{kind} {number}"
