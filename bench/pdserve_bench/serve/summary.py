"""Records of requests -> distributions, rates, goodput and failures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_bench.errors import NothingMeasured
from pdserve_bench.serve.records import gaps_at_most_streams
from pdserve_bench.serve.slo import keeps
from pdserve_bench.stats import Distribution, distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_bench.serve.records import Latency, RequestRecord
    from pdserve_bench.serve.slo import Objective
    from pdserve_bench.serve.usage import ProcessUsage

_PER_REQUEST: tuple[Latency, ...] = ("ttft", "second", "tpot", "e2e")


@dataclass(frozen=True, kw_only=True)
class WatchedProcess:
    """What a process used between first and last request."""

    pid: int
    name: str
    cpu_s: float
    cpu_s_per_1000_tokens: float
    cpu_s_per_request: float
    rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run showed. Times in seconds; all but ``failures`` is of the requests that were answered.

    Attributes:
        duration_s: first request due to last answer.
        latencies: by kind; ``itl`` is of all gaps between chunks of all requests.
        most_streams: how many answers were between their first and last token at once.
        full_itl: gaps while it was as many as that.
        tokens_per_chunk: above 1, gaps are not gaps between tokens.
        goodput_per_s: requests per second that kept every objective; None without objectives.
        goodput_share: the share of all requests, failed ones included, that did.
        lateness_s: how late the client itself sent.
        client_cpu_s: processor time of the client.
        num_beside: answered requests that are not measured.
    """

    duration_s: float
    num_requests: int
    num_answered: int
    failures: dict[str, int]
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    latencies: dict[Latency, Distribution | None]
    most_streams: int
    full_itl: Distribution | None
    tokens_per_chunk: float
    goodput_per_s: float | None
    goodput_share: float | None
    lateness_s: Distribution | None
    client_cpu_s: float
    num_beside: int
    processes: list[WatchedProcess]


def summarize(
    records: Sequence[RequestRecord],
    objectives: tuple[Objective, ...] = (),
    *,
    client_cpu_s: float = 0.0,
    num_beside: int = 0,
    watched: Sequence[tuple[ProcessUsage, ProcessUsage]] = (),
) -> Summary:
    """The summary of a run.

    Args:
        watched: each process before and after.

    Raises:
        NothingMeasured: no request was answered.
    """
    answered = [record for record in records if record.error is None]
    failures = dict(Counter(record.error for record in records if record.error is not None).most_common())
    if not answered:
        raise NothingMeasured(failures)
    duration_s = max(record.ended for record in records) - min(record.due for record in records)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in answered)
    num_output_tokens = sum(record.num_output_tokens for record in answered)
    num_chunks = sum(len(record.token_times) for record in answered)
    latencies = {
        what: distribution([value for record in answered if (value := record.latency(what)) is not None])
        for what in _PER_REQUEST
    }
    latencies["itl"] = distribution([gap for record in answered for gap in record.gaps])
    most_streams, full_gaps = gaps_at_most_streams(answered)
    num_kept = sum(keeps(record, objectives) for record in records)
    return Summary(
        duration_s=duration_s,
        num_requests=len(records),
        num_answered=len(answered),
        failures=failures,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        requests_per_s=len(answered) / duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration_s,
        latencies=latencies,
        most_streams=most_streams,
        full_itl=distribution(full_gaps),
        tokens_per_chunk=num_output_tokens / num_chunks,
        goodput_per_s=num_kept / duration_s if objectives else None,
        goodput_share=num_kept / len(records) if objectives else None,
        lateness_s=distribution([record.sent - record.due for record in records]),
        client_cpu_s=client_cpu_s,
        num_beside=num_beside,
        processes=[_watched(before, after, num_output_tokens, len(answered)) for before, after in watched],
    )


def _watched(before: ProcessUsage, after: ProcessUsage, num_tokens: int, num_requests: int) -> WatchedProcess:
    cpu_s = after.cpu_s - before.cpu_s
    return WatchedProcess(
        pid=after.pid,
        name=after.name,
        cpu_s=cpu_s,
        cpu_s_per_1000_tokens=cpu_s / num_tokens * 1000,
        cpu_s_per_request=cpu_s / num_requests,
        rss_bytes=after.rss_bytes,
    )
