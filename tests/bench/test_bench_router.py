"""`pdserve bench router`: what its client counts, what a phase costs, and one real run."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING

import pytest
from pdserve_bench.errors import BadOption, NothingMeasured
from pdserve_bench.router.config import Phase, RouterBench, phases
from pdserve_bench.router.load import Counted, closed_loop
from pdserve_bench.router.options import router_options
from pdserve_bench.router.summary import Moment, cost
from pdserve_bench.router.view import table
from pdserve_cli.args import build_parser
from pdserve_cli.main import main
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STREAM = Phase(name="s", step_ms=0.0, prompt_tokens=1, output_len=3, stream=True)
PLAIN = Phase(name="p", step_ms=0.0, prompt_tokens=1, output_len=3, stream=False)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def serve(answers: Sequence[bytes]) -> int:
    """A server that answers one connection's requests, each read of it with a part of an answer; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listener.accept()
        with listener, connection:
            for answer in answers:
                connection.recv(100)
                for part in answer.split(b"|"):
                    connection.sendall(part)
                    threading.Event().wait(0.01)

    threading.Thread(target=run, daemon=True).start()
    return int(listener.getsockname()[1])


def test_chunks_are_counted_however_they_are_cut() -> None:
    windows: list[Counted] = []
    stream = HEAD + b"8\r\ndata: a\n\r\n|9\r\ndat|a: b\n|\n\r\n8\r\ndata: c\n\r\n|5\r\ndata:| \r\n0|\r\n\r\n"
    port = serve([stream, stream])
    closed_loop(port, b"GET", 1, 0.001, lambda c: windows.append(Counted(requests=c.requests, chunks=c.chunks)))
    assert windows == [Counted(requests=1, chunks=4), Counted(requests=1, chunks=4)]


def test_plain_answers_are_read_to_their_end() -> None:
    windows: list[int] = []
    port = serve([b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\ndat|a: x"] * 2)
    closed_loop(port, b"GET", 1, 0.001, lambda counted: windows.append(counted.requests))
    assert windows == [1, 1]


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"nonsense", b""])
def test_what_is_no_answer_ends_the_run(answer: bytes) -> None:
    with pytest.raises(NothingMeasured):
        closed_loop(serve([answer]), b"GET", 1, 0.1, lambda _: None)


def test_cost() -> None:
    before = Moment(at=10.0, router_cpu_s=1.0, requests=4, chunks=100)
    after = Moment(at=12.0, router_cpu_s=2.0, requests=14, chunks=1120)
    streamed = cost(STREAM, before, after)
    assert streamed.chunks_per_s == 500
    assert streamed.cpu_ms_per_1000_chunks == 1000
    assert streamed.cpu_ms_per_request == 100
    assert streamed.router_busy == 0.5
    assert cost(PLAIN, before, after).cpu_ms_per_1000_chunks is None
    assert cost(PLAIN, before, after).requests_per_s == 5


def options(*flags: str) -> RouterBench:
    return router_options(build_parser().parse_args(["bench", "router", *flags]))


def test_options_and_table() -> None:
    bench = options("--concurrency", "3", "--step-ms", "7")
    assert [phase.step_ms for phase in phases(bench)] == [0.0, 7.0, 0.0, 0.0]
    nothing = Moment(at=0.0, router_cpu_s=0.0, requests=0, chunks=0)
    something = Moment(at=1.0, router_cpu_s=0.5, requests=2, chunks=20)
    shown = table(bench, [cost(phase, nothing, something) for phase in phases(bench)], 0)
    assert len(shown.rows) == 4
    assert {len(row) for row in shown.rows} == {len(shown.columns)}


@pytest.mark.parametrize(
    "flags", [("--concurrency", "0"), ("--output-len", "2"), ("--seconds", "0"), ("--router-core", "-1")]
)
def test_values_that_make_no_sense(flags: tuple[str, str]) -> None:
    with pytest.raises(BadOption):
        options(*flags)


@pytest.mark.slow
def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve_bench.router.run.phases", lambda bench: phases(bench)[:1])
    model, result = tiny_model(tmp_path / "tiny"), tmp_path / "router.json"
    flags = [
        "--model",
        str(model),
        "--concurrency",
        "2",
        "--output-len",
        "8",
        "--seconds",
        "0.3",
        "--json",
        str(result),
    ]
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "router", *flags])
    [cost] = json.loads(result.read_text())["result"]
    # Some of the tiny tokenizer's tokens are parts of characters.
    assert cost["chunks_per_s"] > 2 * cost["requests_per_s"] > 0
    assert 0 < cost["router_busy"] <= 1.5
