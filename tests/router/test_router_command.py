"""The `router` command as a process: flags, ports, signals, and what it does not load."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest
from pdserve_protocol.door import Address
from pdserve_protocol.outputs import Finished
from pdserve_router.args import build_parser, parse_args
from pdserve_router.errors import ArgumentError
from support.fake_node import FakeNode
from support.router_cluster import DEADLINE_S, FILES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

COMMAND = (sys.executable, "-m", "pdserve_router.main")


def test_flags() -> None:
    # A new flag is a decision.
    flags = {flag for action in build_parser()._actions for flag in action.option_strings if flag.startswith("--")}
    assert flags == {
        "--help",
        "--version",
        "--prefill",
        "--decode",
        "--host",
        "--port",
        "--local-prefill",
        "--tokenizer",
        "--tool-call-parser",
        "--reasoning-parser",
        "--cluster-key",
        "--request-timeout",
        "--drain-timeout",
        "--log-level",
    }


def test_arguments() -> None:
    config = parse_args(["--prefill", "a", "b:7", "--decode", "c", "--decode", "[::1]:9"], {"PDSERVE_CLUSTER_KEY": "k"})
    assert config.prefill == (Address("a", 7001), Address("b", 7))
    assert config.decode == (Address("c", 7002), Address("::1", 9))
    assert (config.host, config.port, config.cluster_key) == ("127.0.0.1", 8000, "k")
    assert parse_args(["--decode", "c", "--cluster-key", "x"], {"PDSERVE_CLUSTER_KEY": "k"}).cluster_key == "x"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "--decode"),
        (["--prefill", "a"], "--decode"),
        (["--decode", "a:b"], "'a:b' is not an address"),
        (["--decode", "a", "a:7002"], "more than once"),
        (["--decode", "a", "--port", "70000"], "--port"),
        (["--decode", "a", "--request-timeout", "0"], "--request-timeout"),
        (["--decode", "a", "--drain-timeout", "nan"], "--drain-timeout"),
    ],
)
def test_bad_arguments(argv: list[str], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        parse_args(argv, {})


def router(*argv: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.slow
def test_help_and_errors() -> None:
    done = router("--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("--prefill", "examples:", "7001", "7002", "8000"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = router("--decode", "127.0.0.1:1", "--port", str(taken.getsockname()[1]))
    assert (done.returncode, done.stdout) == (2, "")
    assert "is taken" in done.stderr
    assert "Traceback" not in done.stderr
    done = router("--decode", "127.0.0.1", "--tokenizer", "/nowhere")
    assert done.returncode == 2
    assert "tokenizer.json" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_router_needs_no_torch() -> None:
    code = (
        "import sys, pdserve_router.main; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


@contextlib.asynccontextmanager
async def running_router(*argv: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *argv, "--port", "0", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)).decode()
        found = re.fullmatch(r"router ready-to-listen on (http://127\.0\.0\.1:\d+)\n", line)
        assert found is not None, line
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_signals(signals: int) -> None:
    async def main() -> None:
        node = FakeNode("decode", FILES, manual=True)
        try:
            async with (
                asyncio.timeout(20),
                running_router("--decode", node.address) as (process, url),
                aiohttp.ClientSession() as session,
            ):
                request = asyncio.create_task(first_answer(session, url))
                half = await node.requests.get()
                process.send_signal(signal.SIGTERM)
                assert process.stderr is not None
                await process.stderr.readuntil(b"draining")
                async with session.post(url + "/v1/completions", json={"prompt": "x"}) as refused:
                    assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
                if signals == 2:
                    process.send_signal(signal.SIGTERM)
                    async with asyncio.timeout(2):
                        assert await process.wait() == 128 + signal.SIGTERM
                    assert await node.aborted.get() == half.id
                    with pytest.raises((aiohttp.ClientError, AssertionError)):
                        await request
                    return
                node.say(half, 0, [70], end=Finished(reason="length"))
                assert (await request)["choices"][0]["finish_reason"] == "length"
                assert await process.wait() == 0
        finally:
            await node.close()

    async def first_answer(session: aiohttp.ClientSession, url: str) -> dict[str, object]:
        """The answer to the first request that the router, whose nodes it has yet to find, does not refuse."""
        while True:
            async with session.post(url + "/v1/completions", json={"prompt": "x"}) as answer:
                body = await answer.json()
                if body.get("error", {}).get("code") != "not_ready":
                    assert answer.status == 200, body
                    return dict(body)
            await asyncio.sleep(0.01)

    asyncio.run(main())
