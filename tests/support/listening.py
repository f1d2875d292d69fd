"""What a process listens on, by what the kernel tells."""

from __future__ import annotations

import re
import socket
from pathlib import Path


def listening_addresses(pid: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket on which a process listens, in its own network namespace."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if link.is_symlink() and (match := re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))):
            inodes.add(match[1])
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                # Words of four bytes, each in the byte order of the machine.
                words = bytes.fromhex(host)
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found
