"""EngineCounters: what an engine has done since its start."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Outcome = Literal["stop", "length", "handed_over", "not_needed", "aborted", "failed"]


@dataclass(slots=True)
class EngineCounters:
    """Each prompt token is counted once, by where its KV came from, however often it is computed.

    Attributes:
        prompt_tokens_cached: found in this node's prefix cache.
        prompt_tokens_computed: computed here.
        prompt_tokens_transferred: taken over from another node.
        recomputed_tokens: computed although this or another node had computed them before.
        generated_tokens: sampled here.
        requests_*: by their end.
    """

    prompt_tokens_cached: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_transferred: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    requests_stop: int = 0
    requests_length: int = 0
    requests_handed_over: int = 0
    requests_not_needed: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0

    def count_end(self, outcome: Outcome) -> None:
        """One more request has ended this way."""
        name = f"requests_{outcome}"
        setattr(self, name, getattr(self, name) + 1)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
