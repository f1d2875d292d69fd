"""What happened to one request and when; log lines and metrics are derived from it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve_router.metrics import RouterMetrics
    from pdserve_router.proof import Proof

log = logging.getLogger("pdserve_router.requests")


class RequestTrace:
    """Times are seconds of the monotonic clock. ``end`` is the finish reason, or why there was none.

    Attributes:
        status: of the HTTP answer; 499 where the client had gone.
        proofs: of each attempt, with the number of its prompt's tokens.
    """

    def __init__(self, endpoint: str, request_id: str, metrics: RouterMetrics) -> None:
        self.endpoint = endpoint
        self.request_id = request_id
        self._metrics = metrics
        self.arrived = time.monotonic()
        self._first_token: float | None = None
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.status = 500
        self.end = "internal"
        self.proofs: list[tuple[Proof, int]] = []

    def on_tokens(self, count: int, last: float | None) -> float:
        """``count`` tokens of a choice came from the nodes. ``last``: what this returned for those before."""
        now = time.monotonic()
        self.num_output_tokens += count
        if last is None:
            if self._first_token is None:
                self._first_token = now
                self._metrics.ttft.observe(now - self.arrived)
            # There is no time before a choice's first token.
            last = now
            count -= 1
        if count > 0:
            self._metrics.itl.observe((now - last) / count, count)
        return now

    def on_end(self) -> None:
        """The request is over: count it and say so."""
        now = time.monotonic()
        metrics = self._metrics
        metrics.e2e.observe(now - self.arrived)
        metrics.generated_tokens.inc(self.num_output_tokens)
        metrics.requests.labels(self.endpoint, self.end, str(self.status)).inc()
        for proof, num_prompt_tokens in self.proofs:
            metrics.observe_proof(proof, num_prompt_tokens)
        first = self.proofs[0][0] if self.proofs else None
        log.info(
            "request %s: %s %d %s, prompt %d, output %d, ttft %s, total %.1f ms%s",
            self.request_id,
            self.endpoint,
            self.status,
            self.end,
            self.num_prompt_tokens,
            self.num_output_tokens,
            "-" if self._first_token is None else f"{(self._first_token - self.arrived) * 1000:.1f} ms",
            (now - self.arrived) * 1000,
            "" if first is None else f", {first.mode}, prefill {first.prefill_node}, decode {first.decode_node}",
        )
