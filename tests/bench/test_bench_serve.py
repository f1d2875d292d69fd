"""``pdserve bench serve`` from its command line to its files, against a server that computes nothing."""

from __future__ import annotations

import json
import os
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from pdserve_cli.main import main
from support.fake_openai import FakeOpenAI, serving

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"


def _bench(fake: FakeOpenAI, *argv: str) -> int:
    with serving(fake), pytest.raises(SystemExit) as exit:
        main(["bench", "serve", "--url", fake.url, *argv])
    code = exit.value.code
    assert isinstance(code, int)
    return code


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _png_size(data: bytes) -> tuple[int, int]:
    assert data.startswith(PNG)
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.slow  # matplotlib is imported.
def test_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake, result, page = FakeOpenAI(), tmp_path / "r.json", tmp_path / "r.html"
    code = _bench(
        fake,
        *("--concurrency", "3", "--num-prompts", "12", "--warmup", "2", "--input-len", "uniform:5-9"),
        *("--output-len", "4", "--slo", "ttft:60s,itl:60s", "--watch-pid", str(os.getpid())),
        *("--json", str(result), "--plot", str(page), "--label", "a <label>"),
    )
    assert code == 0
    assert len(fake.bodies) == 14
    assert fake.most_under_way == 3
    for body in fake.bodies:
        assert 5 <= len(body["prompt"]) <= 9
        assert all(0 <= token_id < 50 for token_id in body["prompt"])
        assert body["max_tokens"] == 4
        assert body["ignore_eos"] is True
        assert body["model"] == "fake"
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 14
    summary = _json(result)["summary"]
    assert summary["num_answered"] == 12
    assert summary["num_output_tokens"] == 48
    assert summary["num_prompt_tokens"] == sum(len(body["prompt"]) for body in fake.bodies[2:])
    assert summary["goodput_share"] == 1.0
    assert summary["processes"][0]["pid"] == os.getpid()
    # Text-less chunks are tokens too: all four of each answer are counted.
    assert summary["tokens_per_chunk"] == 1.0
    assert summary["latencies"]["itl"]["count"] == 36
    out = capsys.readouterr().out
    assert "TTFT" in out
    assert "12 of 12" in out
    text = page.read_text()
    assert "a &lt;label&gt;" in text
    assert "data:image/png;base64," in text
    assert "output tokens per second" in text


def test_others_meanwhile_are_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake, result = FakeOpenAI(), tmp_path / "r.json"
    code = _bench(
        fake,
        *("--num-prompts", "6", "--warmup", "0", "--input-len", "3", "--output-len", "4"),
        *("--beside", "2,9,2", "--json", str(result)),
    )
    assert code == 0
    measured = [body for body in fake.bodies if len(body["prompt"]) == 3]
    others = [body for body in fake.bodies if len(body["prompt"]) == 9]
    assert len(measured) == 6
    assert all(body["max_tokens"] == 2 for body in others)
    summary = _json(result)["summary"]
    assert summary["num_requests"] == 6
    assert 0 < summary["num_beside"] <= len(others)
    assert "other requests meanwhile" in capsys.readouterr().out


@pytest.mark.slow
def test_open_loop_and_a_picture(tmp_path: Path) -> None:
    fake, result, picture = FakeOpenAI(), tmp_path / "r.json", tmp_path / "r.png"
    code = _bench(
        fake,
        *("--request-rate", "100", "--arrivals", "constant", "--num-prompts", "10", "--endpoint", "chat"),
        *("--extra-body", '{"min_tokens": 1, "temperature": 0.5}'),
        *("--output-len", "1", "--input-len", "6", "--json", str(result), "--plot", str(picture)),
    )
    assert code == 0
    assert all(len(body["messages"][0]["content"].split()) == 6 for body in fake.bodies)
    assert all(body["min_tokens"] == 1 and body["temperature"] == 0.5 for body in fake.bodies)
    found = _json(result)
    assert found["config"]["load"] == {"rate": 100.0, "process": "constant", "burstiness": 1.0}
    assert found["summary"]["duration_s"] >= 0.09
    assert found["summary"]["latencies"]["itl"] is None
    width, height = _png_size(picture.read_bytes())
    assert width > 1000
    assert height > 700


def test_failures_are_counted_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeOpenAI(failures={0: 503, 1: "cut", 2: "error", 3: 503})
    code = _bench(fake, "--num-prompts", "6", "--warmup", "0", "--output-len", "2", "--json", str(tmp_path / "r.json"))
    assert code == 0
    summary = _json(tmp_path / "r.json")["summary"]
    assert summary["num_answered"] == 2
    assert summary["failures"] == {"HTTP 503": 2, "broken off": 1, "error in the stream (node_failed)": 1}
    assert "HTTP 503" in capsys.readouterr().out


def test_prompts_of_a_file_and_a_seed(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": [1, 2], "max_tokens": 3}\n')
    fake = FakeOpenAI()
    assert _bench(fake, "--prompts", str(file), "--num-prompts", "4", "--warmup", "0", "--output-len", "2") == 0
    assert [body["prompt"] for body in fake.bodies] == ["one", [1, 2], "one", [1, 2]]
    assert [body["max_tokens"] for body in fake.bodies] == [2, 3, 2, 3]
    fakes = [FakeOpenAI(), FakeOpenAI()]
    for other in fakes:
        assert _bench(other, "--seed", "7", "--num-prompts", "3", "--output-len", "uniform:1-9") == 0
    assert fakes[0].bodies == fakes[1].bodies
    assert all(a != b for a, b in pairwise(body["prompt"] for body in fakes[0].bodies))


def test_prompts_are_cut_to_the_context() -> None:
    fake = FakeOpenAI()
    assert _bench(fake, "--input-len", "512", "--output-len", "10", "--num-prompts", "1", "--warmup", "0") == 0
    assert len(fake.bodies[0]["prompt"]) == 90


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--num-prompts", "0"], 2, "--num-prompts 0"),
        (["--request-rate", "0"], 2, "--request-rate 0"),
        (["--request-rate", "nan"], 2, "--request-rate nan"),
        (["--input-len", "x"], 2, "--input-len x"),
        (["--slo", "ttft"], 2, "--slo ttft"),
        (["--extra-body", "[1]"], 2, "--extra-body [1]"),
        (["--beside", "1,0,2"], 2, "--beside 1,0,2"),
        (["--plot", "run.gif"], 2, ".png or .html"),
        (["--prompts", "no-such-file"], 2, "no-such-file"),
        (["--output-len", "100"], 2, "the context is 100 tokens"),
        (["--watch-pid", "0", "--output-len", "1"], 2, "no such process"),
        (["--model", "other"], 1, "it serves fake, not other"),
    ],
)
def test_refusals(argv: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench(FakeOpenAI(), *argv) == code
    assert words in capsys.readouterr().err


def test_a_server_that_does_not_say_its_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeOpenAI(model={"id": "fake"})
    assert _bench(fake, "--num-prompts", "1") == 1
    assert "--tokenizer-vocab" in capsys.readouterr().err
    assert _bench(fake, "--num-prompts", "1", "--tokenizer-vocab", "9", "--output-len", "1") == 0


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["bench", "serve", "--url", "http://127.0.0.1:1"])
    assert exit.value.code == 1
    assert "GET /v1/models" in capsys.readouterr().err
