"""What a client reads out of the bytes of a stream, however they are cut, and what it makes of requests together."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from pdserve_bench.errors import BadOption, NothingMeasured
from pdserve_bench.serve.client import read_answer
from pdserve_bench.serve.records import RequestRecord
from pdserve_bench.serve.slo import parse_slo
from pdserve_bench.serve.sse import EventSplitter
from pdserve_bench.serve.summary import summarize
from pdserve_bench.serve.usage import process_usage

# As our router ends a stream: finish reason, usage and proof apart from the tokens.
OURS = [
    b'data: {"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"b","logprobs":null,"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"pdserve":{}}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
]
# As others do: the finish reason with the last token; comments; lines that end in CR LF.
OTHERS = [
    b": ping\r\n\r\n",
    b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\r\n\r\n',
    b'data: {"choices":[{"delta":{"content":""},"finish_reason":null}]}\r\n\r\n',
    b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\r\n\r\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\r\n\r\n',
    b"data: [DONE]\r\n\r\n",
]


def _record() -> RequestRecord:
    return RequestRecord(due=0.0, sent=0.0)


@pytest.mark.parametrize(("events", "times"), [(OURS, [0.0, 1.0]), (OTHERS, [2.0, 3.0])], ids=["ours", "others"])
def test_tokens_are_told_from_other_chunks(events: list[bytes], times: list[float]) -> None:
    record = _record()
    read_answer(record, [(float(index), event) for index, event in enumerate(events)])
    assert record.error is None
    assert record.token_times == times
    assert (record.num_prompt_tokens, record.num_output_tokens) == (5, 2)


@given(st.sampled_from([OURS, OTHERS]), st.lists(st.integers(0, 600), max_size=8))
def test_events_do_not_depend_on_how_the_network_cuts(events: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(events)
    edges = sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
    splitter = EventSplitter()
    found = [event for a, b in pairwise(edges) for event in splitter.feed(whole[a:b])]
    assert found == EventSplitter().feed(whole)
    assert found[-1] == b"[DONE]"


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"".join(OURS[:4]), "broken off"),
        (b"", "broken off"),
        (b"data: [DONE]\n\n", "no token"),
        (OURS[0] + b'data: {"error":{"code":"node_failed","message":"m"}}\n\n', "error in the stream (node_failed)"),
        (OURS[0] + b"data: {\n\n" + b"data: [DONE]\n\n", "not a chunk"),
    ],
)
def test_answers_that_are_not_complete(stream: bytes, error: str) -> None:
    record = _record()
    read_answer(record, [(1.0, stream)])
    assert record.error == error


def _answered(due: float, *token_times: float, ended: float) -> RequestRecord:
    return RequestRecord(
        due=due,
        sent=due + 0.1,
        token_times=list(token_times),
        ended=ended,
        num_prompt_tokens=10,
        num_output_tokens=len(token_times),
    )


def test_a_summary() -> None:
    records = [
        _answered(0.0, 1.0, 1.2, 1.4, ended=1.5),
        _answered(1.0, 4.0, 4.2, ended=5.0),
        RequestRecord(due=1.0, sent=1.0, ended=2.0, error="HTTP 503"),
    ]
    pid = os.getpid()
    usage = process_usage(pid)
    summary = summarize(records, parse_slo("ttft:2s"), watched=[(usage, usage)])
    assert (summary.num_requests, summary.num_answered, summary.failures) == (3, 2, {"HTTP 503": 1})
    assert summary.duration_s == 5.0
    assert summary.output_tokens_per_s == 1.0
    assert summary.total_tokens_per_s == 5.0
    assert (summary.goodput_per_s, summary.goodput_share) == (0.2, pytest.approx(1 / 3))
    ttft, itl, second = summary.latencies["ttft"], summary.latencies["itl"], summary.latencies["second"]
    assert ttft is not None
    assert itl is not None
    assert second is not None
    assert (ttft.count, ttft.p50, ttft.max) == (2, 2.0, 3.0)
    assert (itl.count, itl.p50) == (3, pytest.approx(0.2))
    assert second.max == pytest.approx(3.2)
    assert summary.tokens_per_chunk == 1.0
    assert summary.processes[0].pid == pid
    assert summary.processes[0].cpu_s == 0
    assert summary.processes[0].rss_bytes > 1 << 20


def test_gaps_while_all_decode() -> None:
    long = _answered(0.0, 1.0, 2.0, 3.0, 4.5, 6.0, 9.0, ended=9.0)
    short = _answered(0.0, 2.5, 3.0, 4.0, 6.5, ended=7.0)
    failed = RequestRecord(due=0.0, sent=0.0, token_times=[3.0, 4.0], error="timeout")
    summary = summarize([long, failed, short])
    assert summary.most_streams == 2
    assert summary.full_itl is not None
    # From 2.5 to 6.5 both decode: the gaps within it are 1.5 and 1.5 of one, and 0.5, 1 and 2.5 of the other.
    assert (summary.full_itl.count, summary.full_itl.p50, summary.full_itl.max) == (5, 1.5, 2.5)
    alone = summarize([_answered(0.0, 1.0, ended=1.0)])
    assert (alone.most_streams, alone.full_itl) == (0, None)


def test_several_tokens_in_a_chunk_show() -> None:
    record = _answered(0.0, 1.0, 2.0, ended=2.0)
    record.num_output_tokens = 8
    assert summarize([record]).tokens_per_chunk == 4.0
    assert record.latency("tpot") == pytest.approx(1 / 7)


def test_nothing_but_failures_is_no_measure() -> None:
    with pytest.raises(NothingMeasured, match="1 x timeout"):
        summarize([RequestRecord(due=0.0, sent=0.0, error="timeout")])


def test_a_process_that_is_not_there() -> None:
    with pytest.raises(BadOption, match="--watch-pid 0"):
        process_usage(0)
