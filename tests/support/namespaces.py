"""Hosts on this machine: network namespaces on one bridge, each with an address of its own, within reach from here."""

from __future__ import annotations

import os
import secrets
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


class NamespacesForbidden(Exception):
    """This kernel or this user may not make network namespaces."""


@dataclass(kw_only=True)
class Hosts:
    """Use as a context manager; everything made is removed at the end, whatever happens between.

    Attributes:
        names: of the hosts, as they are asked for here; the namespaces get names that no other run has.
    """

    names: tuple[str, ...]
    subnet: str = field(default_factory=lambda: f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}")
    _tag: str = field(default_factory=lambda: f"pd{secrets.token_hex(3)}")

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, name: str) -> str:
        """IPv4 address of a host."""
        return f"{self.subnet}.{10 + self.names.index(name)}"

    def prefix(self, name: str) -> list[str]:
        """What runs a command on a host."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def bytes_sent(self, name: str) -> int:
        """That have left a host through its one interface."""
        return self._counter(name, "tx_bytes")

    def bytes_received(self, name: str) -> int:
        """That have come to a host through its one interface."""
        return self._counter(name, "rx_bytes")

    def unplug(self, name: str) -> None:
        """From now on nothing reaches a host or leaves it, and nobody is told."""
        self._run("link", "set", self._outer(name), "down")

    def plug(self, name: str) -> None:
        """Ends ``unplug``."""
        self._run("link", "set", self._outer(name), "up")

    def close(self) -> None:
        """Removes everything. Idempotent."""
        existing = _ip("netns", "list").stdout.split()
        for name in self.names:
            if self._namespace(name) in existing:
                _ip("netns", "delete", self._namespace(name))
            if Path(f"/sys/class/net/{self._outer(name)}").exists():
                _ip("link", "delete", self._outer(name))
        if Path(f"/sys/class/net/{self._bridge}").exists():
            _ip("link", "delete", self._bridge)

    # Inside. Interface names have 15 characters at most.

    @property
    def _bridge(self) -> str:
        return f"{self._tag}br"

    def _namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _outer(self, name: str) -> str:
        return f"{self._tag}v{self.names.index(name)}"

    def _make(self) -> None:
        for name in self.names:
            made = _ip("netns", "add", self._namespace(name))
            if made.returncode:
                raise NamespacesForbidden(made.stderr.strip())
        self._run("link", "add", self._bridge, "type", "bridge")
        self._run("address", "add", f"{self.subnet}.1/24", "dev", self._bridge)
        self._run("link", "set", self._bridge, "up")
        for name in self.names:
            outer, inner, namespace = self._outer(name), "eth0", self._namespace(name)
            self._run("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
            self._run("link", "set", outer, "master", self._bridge, "up")
            self._run("-n", namespace, "address", "add", f"{self.address(name)}/24", "dev", inner)
            self._run("-n", namespace, "link", "set", inner, "up")
            self._run("-n", namespace, "link", "set", "lo", "up")

    def _run(self, *words: str) -> None:
        done = _ip(*words)
        if done.returncode:
            raise NamespacesForbidden(f"ip {' '.join(words)}: {done.stderr.strip()}")

    def _counter(self, name: str, counter: str) -> int:
        command = [*self.prefix(name), "cat", f"/sys/class/net/eth0/statistics/{counter}"]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ip", *words], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
