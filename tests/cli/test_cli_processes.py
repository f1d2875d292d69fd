"""Child processes, with real ones: ready lines, logs, ends, and that none is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
from pdserve_cli.errors import ChildFailed, ChildNotReady
from pdserve_cli.processes import Child, Command, start_child

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

READY = re.compile(r"^ready on (?P<where>\S+)$")
WAIT_S = 10.0


def _run(program: str, check: Callable[[Child, list[tuple[str, str]]], Awaitable[None]], **command: object) -> None:
    """Starts a Python program as a child and lets ``check`` look at it; it is gone afterwards whatever happens."""

    async def run() -> None:
        lines: list[tuple[str, str]] = []
        argv = [sys.executable, "-I", "-S", "-c", textwrap.dedent(program)]
        child = await start_child(
            Command(name="kid", argv=argv, **command),  # type: ignore[arg-type]
            lambda name, line: lines.append((name, line)),
        )
        try:
            async with asyncio.timeout(WAIT_S):
                await check(child, lines)
        finally:
            await child.stop(0)
        assert not _alive(child.pid)

    asyncio.run(run())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ready_line_log_and_clean_stop() -> None:
    program = """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: (print("bye", file=sys.stderr), sys.exit(0)))
        print("warming up", file=sys.stderr, flush=True)
        print("something else", flush=True)
        print("ready on here:1", flush=True)
        signal.pause()
    """

    async def check(child: Child, lines: list[tuple[str, str]]) -> None:
        match = await child.ready(READY, WAIT_S)
        assert match["where"] == "here:1"
        assert child.exit_code is None
        assert await child.stop(WAIT_S) == 0
        assert sorted(lines) == [("kid", "bye"), ("kid", "something else"), ("kid", "warming up")]
        assert await child.stop(WAIT_S) == 0  # idempotent

    _run(program, check)


def test_an_end_before_it_was_ready_is_reported_with_its_last_words() -> None:
    async def check(child: Child, lines: list[tuple[str, str]]) -> None:
        with pytest.raises(ChildFailed, match="kid ended with exit code 2 before it was ready") as failed:
            await child.ready(READY, WAIT_S)
        assert failed.value.exit_code == 2
        assert lines == [("kid", "port 7001 is taken")]

    _run("import sys; print('port 7001 is taken', file=sys.stderr); sys.exit(2)", check)


def test_a_crash_before_it_was_ready() -> None:
    async def check(child: Child, lines: list[tuple[str, str]]) -> None:
        with pytest.raises(ChildFailed, match="kid was killed by signal 9") as failed:
            await child.ready(READY, WAIT_S)
        assert failed.value.exit_code == 1

    _run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", check)


def test_waiting_for_ready_has_a_deadline() -> None:
    async def check(child: Child, lines: list[tuple[str, str]]) -> None:
        with pytest.raises(ChildNotReady, match=r"kid was not ready within 0\.05 s"):
            await child.ready(READY, 0.05)

    _run("import signal; signal.pause()", check)


def test_who_ignores_sigterm_is_killed() -> None:
    program = """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready on x", flush=True)
        while True: signal.pause()
    """

    async def check(child: Child, lines: list[tuple[str, str]]) -> None:
        await child.ready(READY, WAIT_S)
        assert await child.stop(0.05) == -signal.SIGKILL
        assert any("was killed" in line for _, line in lines)

    _run(program, check)


def test_a_long_line_and_bytes_that_are_no_text_do_not_end_the_log() -> None:
    program = """
        import os
        os.write(2, b"x" * (3 << 20) + b"\\n" + b"caf\\xe9\\n" + b"end without newline")
        print("ready on x", flush=True)
    """

    async def check(child: Child, lines: list[tuple[str, str]]) -> None:
        await child.ready(READY, WAIT_S)
        assert await child.ended() == 0
        texts = [line for _, line in lines]
        assert texts[-2:] == ["caf�", "end without newline"]
        assert "is not shown" in texts[0]

    _run(program, check)


def test_cores_environment_and_session() -> None:
    core = min(os.sched_getaffinity(0))
    program = """
        import os
        cores, own_session = sorted(os.sched_getaffinity(0)), os.getsid(0) == os.getpid()
        print("ready on", f"{cores}/{os.environ['COLOUR']}/{own_session}", flush=True)
    """

    async def check(child: Child, lines: list[tuple[str, str]]) -> None:
        match = await child.ready(re.compile("ready on (.*)"), WAIT_S)
        assert match[1] == f"[{core}]/blue/True"

    _run(program, check, cores=[core], env={"COLOUR": "blue"})


def test_a_program_that_does_not_exist_is_a_failed_child() -> None:
    async def run() -> None:
        lines: list[str] = []
        child = await start_child(Command(name="kid", argv=["/nowhere/at-all"]), lambda _, line: lines.append(line))
        with pytest.raises(ChildFailed):
            await child.ready(READY, WAIT_S)
        await child.stop(WAIT_S)
        assert "No such file" in lines[-1]

    asyncio.run(run())


@pytest.mark.slow
def test_no_child_survives_a_parent_that_was_killed() -> None:
    parent_program = """
        import asyncio, re, sys
        from pdserve_cli.processes import Command, start_child

        async def main():
            program = "import signal; print('up', flush=True); signal.pause()"
            command = Command(name="kid", argv=[sys.executable, "-I", "-S", "-c", program])
            child = await start_child(command, lambda *_: None)
            await child.ready(re.compile("up"), 10)
            print(child.pid, flush=True)
            await child.ended()

        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent_program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            watch = os.pidfd_open(int(parent.stdout.readline()))
        finally:
            parent.kill()
    try:
        ended, _, _ = select.select([watch], [], [], WAIT_S)
        assert ended, "the child outlived its parent"
    finally:
        os.close(watch)
