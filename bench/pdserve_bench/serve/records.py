"""What is known of one request, and the latencies in it. Times are seconds of one monotonic clock."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from pdserve_bench.stats import distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

Latency = Literal["ttft", "second", "tpot", "itl", "e2e"]
LATENCIES: tuple[Latency, ...] = ("ttft", "second", "tpot", "itl", "e2e")


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request.

    Attributes:
        due: when it was to be sent. Latencies count from here, so that a client that is late does not hide a server
            that is slow.
        sent: when it was.
        token_times: when each chunk with a new token was read. A server may put several tokens into one chunk.
        ended: when the answer was complete, or had failed.
        num_prompt_tokens, num_output_tokens: as the server counts them.
        proof: what a server of ours says that its nodes did.
        error: what went wrong, as a kind that many requests can share; None for a complete answer.
    """

    due: float
    sent: float
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None
    proof: dict[str, Any] | None = None

    @property
    def gaps(self) -> list[float]:
        """Between one chunk and the next."""
        return [after - before for before, after in pairwise(self.token_times)]

    def latency(self, what: Latency) -> float | None:
        """Seconds; None where the request has none of this kind.

        ``ttft``: to the first token; ``second``: to the second one; ``tpot``: mean time per token after the first;
        ``itl``: 99th percentile of the gaps; ``e2e``: to the end.
        """
        times = self.token_times
        match what:
            case "ttft":
                return times[0] - self.due if times else None
            case "second":
                return times[1] - self.due if len(times) > 1 else None
            case "tpot":
                more = self.num_output_tokens - 1
                return (times[-1] - times[0]) / more if more > 0 and len(times) > 1 else None
            case "itl":
                gaps = distribution(self.gaps)
                return gaps.p99 if gaps is not None else None
            case "e2e":
                return self.ended - self.due


def gaps_at_most_streams(records: Sequence[RequestRecord]) -> tuple[int, list[float]]:
    """How many answers were between their first and last token at once, at most; and the gaps of just those times."""
    spans = [record.token_times for record in records if len(record.token_times) > 1]
    changes = sorted([(times[0], 1) for times in spans] + [(times[-1], -1) for times in spans])
    levels = list(accumulate(change for _, change in changes))
    most = max(levels, default=0)
    full = [
        (begin, end)
        for level, (begin, _), (end, _) in zip(levels, changes, changes[1:], strict=False)
        if level == most and begin < end
    ]
    begins = [begin for begin, _ in full]

    def is_in_one(before: float, after: float) -> bool:
        index = bisect_right(begins, before) - 1
        return index >= 0 and after <= full[index][1]

    return most, [after - before for times in spans for before, after in pairwise(times) if is_in_one(before, after)]
