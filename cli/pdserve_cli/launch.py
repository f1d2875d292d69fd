"""The first moments of a child process: it ties itself to its parent's life, then becomes the program asked for.

Run as a script, without this package: ``launch.py PARENT_PID CORES PROGRAM [ARGUMENT ...]``, where CORES is a
comma-separated list or "-". The kernel kills a process tied in this way when its parent ends, even by SIGKILL
(PR_SET_PDEATHSIG, Linux); doing it here rather than between fork and exec keeps Python code out of that window.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, cores, *command = argv
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        # The parent ended before the line above: nobody wants this process any more.
        sys.exit(1)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
