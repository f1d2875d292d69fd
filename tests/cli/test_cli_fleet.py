"""serve and demo over stand-in processes: they start, show, fail when they must, and leave nothing behind."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pdserve_cli.args import DEMO_MODEL
from pdserve_cli.commands import DECODE, PREFILL, ROUTER, FleetConfig
from pdserve_cli.demo import demo
from pdserve_cli.errors import ApiError, ArgumentError, ChildFailed, CliError, DemoFailed
from pdserve_cli.main import main
from pdserve_cli.serve import curl_example, serve
from pdserve_protocol.errors import PortTaken
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

pytestmark = pytest.mark.slow

_FAKE = [sys.executable, "-I", "-S", str(Path(__file__).parent.parent / "support" / "fake_processes.py")]


def _config(scenario: str = "good", *, num_prefill: int = 1, decode: str = "decode") -> FleetConfig:
    return FleetConfig(
        num_prefill=num_prefill,
        drain_timeout_s=1,
        programs={PREFILL: [*_FAKE, "prefill"], DECODE: [*_FAKE, decode], ROUTER: [*_FAKE, "router", scenario]},
    )


def _bounded(work: Coroutine[Any, Any, int]) -> int:
    return asyncio.run(asyncio.wait_for(work, 30))


@pytest.fixture
def terminal() -> Iterator[tuple[Console, io.StringIO]]:
    """A console; afterwards no child of this process is left."""
    out = io.StringIO()
    yield Console(file=out, width=120), out
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def _demo(scenario: str, terminal: tuple[Console, io.StringIO], model: str = DEMO_MODEL) -> str:
    console, out = terminal
    try:
        assert _bounded(demo(_config(scenario), model=model, console=console, log=console)) == 0
    finally:
        print(out.getvalue())
    return out.getvalue()


def test_demo_passes(terminal: tuple[Console, io.StringIO]) -> None:
    out = _demo("good", terminal)
    assert "The capital of Japan is Tokyo." in out
    assert "so it goes" in out
    assert out.count("3 blocks, 12.0 KiB") == 2
    assert out.count("0 tokens recomputed") == 2
    assert "TTFT" in out
    assert "prefill-node | prefill is warming up" in out
    assert "passed" in out


@pytest.mark.parametrize(
    ("scenario", "error", "message"),
    [
        ("wrong answer", DemoFailed, "Kyoto"),
        ("nothing moved", DemoFailed, "no byte of KV was moved"),
        ("recomputed", DemoFailed, "recomputed 16 tokens"),
        ("aggregated", DemoFailed, "served aggregated, not disaggregated"),
        ("error", ApiError, "/v1/chat/completions was answered 503: no room"),
        ("broken stream", ApiError, "broke off: the decode node is gone"),
        ("dies", CliError, "router ended with exit code 3 before it could serve"),
    ],
)
def test_demo_fails(scenario: str, error: type[Exception], message: str, terminal: tuple[Console, io.StringIO]) -> None:
    with pytest.raises(error, match=re.escape(message)):
        _demo(scenario, terminal)
    assert "passed" not in terminal[1].getvalue()


def test_a_pair_is_waited_for(terminal: tuple[Console, io.StringIO]) -> None:
    assert "passed" in _demo("prefill node comes later", terminal)


def test_another_model_may_answer_as_it_likes(terminal: tuple[Console, io.StringIO]) -> None:
    assert "Kyoto" in _demo("wrong answer", terminal, model="another")


def test_a_node_that_does_not_start_ends_all(terminal: tuple[Console, io.StringIO]) -> None:
    console, _ = terminal
    with pytest.raises(ChildFailed, match="decode-node ended with exit code 1 before it was ready"):
        _bounded(serve(_config(decode="broken"), console=console, log=console))


class _SignalsWhen(io.StringIO):
    """A terminal that presses Ctrl-C when it shows a text."""

    def __init__(self, text: str, number: signal.Signals) -> None:
        super().__init__()
        self._text, self._number = text, number

    def write(self, text: str) -> int:
        if self._text in text:
            self._text = "\0"
            os.kill(os.getpid(), self._number)
        return super().write(text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["curl", "warming up"])
def test_serve_until_a_signal(number: signal.Signals, when: str, terminal: tuple[Console, io.StringIO]) -> None:
    out = _SignalsWhen(when, number)
    console = Console(file=out, width=120)
    assert _bounded(serve(_config(num_prefill=2), console=console, log=console)) == 0
    text = out.getvalue()
    if when == "curl":
        assert re.search(r"prefill-node 2 +[│|] 127.0.0.1:7123 +[│|] \d+", text)
        assert re.search(r"router +[│|] http://127.0.0.1:\d+ +[│|]", text)
        assert "model fake, 64 KV blocks" in text
        assert text.count("| stopping") == 4
    assert "all processes have stopped" in text


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_serve_starts_nothing_where_the_port_is_taken(
    host: str, terminal: tuple[Console, io.StringIO], capsys: pytest.CaptureFixture[str]
) -> None:
    console, out = terminal
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match="--port 0 picks one"):
            _bounded(serve(replace(_config(), host=host, port=port), console=console, log=console))
        assert out.getvalue() == ""
        with pytest.raises(SystemExit) as exit:
            main(["serve", "--model", "smollm2", "--host", host, "--port", str(port)])
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith(f"pdserve: port {port} on {host} is taken; ")


@pytest.mark.parametrize("host", ["192.0.2.1", "not a host"])
def test_serve_where_nobody_can_listen(host: str, terminal: tuple[Console, io.StringIO]) -> None:
    console, _ = terminal
    with pytest.raises(ArgumentError, match=f"--host {host} --port 0: "):
        _bounded(serve(replace(_config(), host=host), console=console, log=console))


def test_serve_ends_with_the_first_process_that_ends(terminal: tuple[Console, io.StringIO]) -> None:
    class Killer(io.StringIO):
        def write(self, text: str) -> int:
            if match := re.search(r"decode-node +[│|] \S+ +[│|] (\d+)", text):
                os.kill(int(match[1]), signal.SIGKILL)
            return super().write(text)

    console = Console(file=Killer(), width=120)
    with pytest.raises(ChildFailed, match="decode-node was killed by signal 9 while it was serving"):
        _bounded(serve(_config(), console=console, log=console))


def test_curl_example_is_safe_to_paste() -> None:
    text = curl_example("http://0.0.0.0:8000", "it's")
    assert "http://127.0.0.1:8000/v1/chat/completions" in text
    assert "it'\\''s" in text
