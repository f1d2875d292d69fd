"""Real nodes and a real router as processes of their own, on loopback, for end-to-end tests."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pdserve_protocol.client import EngineCoreClient
from pdserve_protocol.door import Address
from pdserve_protocol.node import GetStatus, NodeStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

START_S = 60.0
STOP_S = 20.0
SLOW_NODE = Path(__file__).with_name("slow_prefill_node.py")


class Process:
    """A child whose first line on stdout says that it is ready. What it logs lies in ``log``."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.log = folder / f"{name}-{time.monotonic_ns()}.log"
        with self.log.open("wb") as stderr:
            self.popen = subprocess.Popen(
                [*prefix, sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                text=True,
            )
        self.ready_line = ""

    def wait_ready(self, timeout_s: float = START_S) -> str:
        """The ready line."""
        assert self.popen.stdout is not None
        timer = threading.Timer(timeout_s, self.popen.kill)
        timer.start()
        try:
            self.ready_line = self.popen.stdout.readline().strip()
        finally:
            timer.cancel()
        assert self.ready_line, f"{self.name} did not start:\n{self.log.read_text()}"
        return self.ready_line

    @property
    def pid(self) -> int:
        return self.popen.pid

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.popen.kill()
        self.popen.wait(STOP_S)

    def terminate(self, timeout_s: float = STOP_S) -> int:
        """SIGTERM; the exit status."""
        self.popen.terminate()
        return self.popen.wait(timeout_s)

    def close(self) -> None:
        """Ends it whatever its state."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(5.0)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.popen.stdout is not None:
            self.popen.stdout.close()

    def cpu_s(self) -> float:
        """Processor time used so far, all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def sleeps(self) -> int:
        """How often its threads have gone to sleep, those that have ended left out."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(
            int(line.split()[1])
            for task in tasks
            for line in (task / "status").read_text().splitlines()
            if line.startswith("voluntary_ctxt_switches:")
        )

    def rss_bytes(self) -> int:
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())[1]) * 1024  # type: ignore[index]


@dataclass(kw_only=True)
class Cluster:
    """Prefill nodes, decode nodes and a router over one model. Use as a context manager."""

    model: str
    folder: Path
    num_prefill: int = 1
    num_decode: int = 1
    node_args: Sequence[str] = ()
    prefill_args: Sequence[str] = ()
    decode_args: Sequence[str] = ()
    router_args: Sequence[str] = ()
    local_prefill: str = "never"
    """What prompts go where does not hang on how busy the machine is, unless a test is about that."""

    env: dict[str, str] = field(default_factory=dict)
    gate: Path | None = None
    """With a gate, prefill nodes hold their writes back until this file exists."""

    prefill: list[Process] = field(default_factory=list)
    decode: list[Process] = field(default_factory=list)
    router: Process = field(init=False)
    port: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.prefill = [stack.enter_context(closing(self.start_prefill(0))) for _ in range(self.num_prefill)]
            self.decode = [stack.enter_context(closing(self.start_decode(0))) for _ in range(self.num_decode)]
            nodes = [node.wait_ready() for node in [*self.prefill, *self.decode]]
            ports = [port_of(line) for line in nodes]
            self.router = stack.enter_context(closing(self.start_router(ports, 0)))
            self.port = port_of(self.router.wait_ready())
            self.wait_until_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.prefill, *self.decode, self.router]:
            process.close()
        self._stack.close()

    # Processes.

    def start_prefill(self, port: int) -> Process:
        program = ["-m", "pdserve_prefill_node.main"] if self.gate is None else ["-P", str(SLOW_NODE), str(self.gate)]
        args = ["--model", self.model, "--port", str(port), "--threads", "1", *self.node_args, *self.prefill_args]
        return Process("prefill", [*program, *args], self.folder, self.env)

    def start_decode(self, port: int) -> Process:
        args = ["--model", self.model, "--port", str(port), "--threads", "1", *self.node_args, *self.decode_args]
        return Process("decode", ["-m", "pdserve_decode_node.main", *args], self.folder, self.env)

    def start_router(self, node_ports: Sequence[int], port: int) -> Process:
        addresses = [f"127.0.0.1:{node_port}" for node_port in node_ports]
        args: list[str] = []
        if self.num_prefill:
            args += ["--prefill", *addresses[: self.num_prefill]]
        args += ["--decode", *addresses[self.num_prefill :], "--port", str(port)]
        args += ["--local-prefill", self.local_prefill, *self.router_args]
        return Process("router", ["-m", "pdserve_router.main", *args], self.folder, self.env)

    def restart(self, old: Process) -> Process:
        """A new process at the address of one that has ended."""
        old.close()
        starting = self.start_prefill if old in self.prefill else self.start_decode
        processes = self.prefill if old in self.prefill else self.decode
        new = starting(port_of(old.ready_line))
        processes[processes.index(old)] = new
        new.wait_ready()
        return new

    def restart_router(self) -> Process:
        """A new router at the address of one that has ended."""
        self.router.close()
        ports = [port_of(node.ready_line) for node in [*self.prefill, *self.decode]]
        self.router = self.start_router(ports, self.port)
        self.router.wait_ready()
        self.wait_until_ready()
        return self.router

    def wait_until_ready(self, timeout_s: float = 15.0) -> None:
        """Until the router serves requests as it is configured: on both nodes, where there are both."""

        def ready() -> bool:
            status, body = self.get("/ready")
            return status == 200 and not json.loads(body)["degraded"]

        wait_for(ready, timeout_s, "the router is ready")

    # HTTP.

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a plain request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def complete(self, prompt: str | list[int], **parameters: Any) -> dict[str, Any]:
        """The answer to a completion, which must succeed."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 16, **parameters}
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    def stream(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> Iterator[dict[str, Any]]:
        """The events of a streaming request, without [DONE]."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])
        finally:
            connection.close()

    # Nodes.

    def statuses(self) -> list[NodeStatus]:
        """Of all nodes that run."""
        running = [node for node in [*self.prefill, *self.decode] if node.popen.poll() is None]
        return [node_status(Address("127.0.0.1", port_of(node.ready_line))) for node in running]

    def is_idle(self) -> bool:
        """Whether no node has a request left and every block is free or cached."""
        return all(
            status.load.running == status.load.waiting == status.load.handoffs == 0
            and status.load.blocks_free + status.load.blocks_cached == status.load.blocks_total
            for status in self.statuses()
        )

    def wait_until_idle(self, timeout_s: float = 5.0) -> None:
        wait_for(self.is_idle, timeout_s, "the nodes are idle", lambda: str([s.load for s in self.statuses()]))


def port_of(ready_line: str) -> int:
    """The port in a ready line."""
    match = re.search(r":(\d+)(?:\s|$|/)", ready_line)
    assert match is not None, ready_line
    return int(match[1])


def node_status(address: Address, cluster_key: str | None = None) -> NodeStatus:
    async def ask() -> NodeStatus:
        client = EngineCoreClient(address, cluster_key=cluster_key)
        await client.start()
        try:
            status: NodeStatus = await client.ask(GetStatus())
            return status
        finally:
            await client.close()

    return asyncio.run(ask())


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str, tell: Callable[[], str] = str) -> None:
    """Until ``condition`` holds; fails where it takes longer than ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what} {tell()}"
        time.sleep(0.02)
