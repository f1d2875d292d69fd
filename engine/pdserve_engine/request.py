"""Request: what the engine knows of one request, its status and the events of its life.

Owned and changed by the scheduler alone. Knows nothing of blocks, steps or messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING

from pdserve_protocol.outputs import PrefillProof

if TYPE_CHECKING:
    from pdserve_protocol.sampling import SamplingParams
    from pdserve_text.grammar import GrammarMatcher


class RequestStatus(Enum):
    """Where a request is. Only RUNNING ones are part of steps."""

    WAITING = auto()
    WAITING_FOR_KV = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    HELD = auto()
    FINISHED = auto()


class RequestEvent(IntEnum):
    """What happens once in the life of a request; the first time counts."""

    ARRIVED = auto()
    KV_ARRIVED = auto()
    SCHEDULED = auto()
    FIRST_TOKEN = auto()
    HELD = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request. All counts are tokens; positions count from the start of the prompt.

    Attributes:
        output_token_ids: begins with the forced prefix, the tokens that the client has already seen.
        choice: index of the choice, part of the counter of the random numbers.
        cache_salt: prefix cache hits are shared only between requests with the same salt.
        priority: lower ones start earlier, and are preempted later.
        kv_origin: what computed and carried the request's KV, where it is not what would have been computed here; only
            requests of the same origin share prefix cache hits.
        hands_over: after each own token it is HELD: it keeps its blocks and is not scheduled, or only to decode on.
        receiver: to whom it hands over.
        granted: the receiver has room for it; its blocks are promised.
        refills: its blocks were given up after it was HELD; all known tokens but the last are computed again, and
            nothing is sampled.
        pinned: never preempted; true where it hands over.
        waits_for_grammar: its grammar is being compiled; it starts after that.
        grammar: compiled; who keeps it need not compile it again.
        spec_token_ids: draft tokens to verify (part of the contract; empty).
        num_computed_tokens: tokens whose KV is in the request's blocks, by retired steps.
        num_tokens_in_flight: tokens that steps in flight compute, beginning with the first that is not computed.
        num_output_placeholders: output tokens that steps in flight sample: known to be coming, and not yet seen.
        num_cached_tokens: of these, taken from the prefix cache when first admitted.
        num_known_before: highest num_computed_tokens ever, here or on the node that handed over; computing what lies
            below it is recomputation.
        num_prompt_logprobs: prompt tokens whose log probabilities were reported.
        num_counted_prompt_tokens: prompt tokens already counted by source.
        num_recomputed: tokens computed although this or another node had computed them before.
        block_hashes: of the full blocks so far, extended by BlockHasher.
        events: event -> time of the engine's clock, in seconds.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    choice: int = 0
    cache_salt: str = ""
    priority: int = 0
    kv_origin: str = ""
    hands_over: bool = False
    receiver: str = ""
    granted: bool = False
    refills: bool = False
    pinned: bool = False
    waits_for_grammar: bool = False
    grammar: GrammarMatcher | None = None
    status: RequestStatus = RequestStatus.WAITING
    spec_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_tokens_in_flight: int = 0
    num_output_placeholders: int = 0
    num_cached_tokens: int = 0
    num_known_before: int = 0
    num_prompt_logprobs: int = 0
    num_counted_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    events: dict[RequestEvent, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pinned = self.pinned or self.hands_over

    def set_kv_origin(self, origin: str) -> None:
        """Before the request has blocks."""
        if self.kv_origin != origin:
            self.kv_origin = origin
            self.block_hashes.clear()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether all of the prompt must be computed because log probabilities of it are missing."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def num_logits_rows(self, num_tokens: int) -> int:
        """Rows of logits that computing its next ``num_tokens`` tokens yields at most."""
        if self.sampling.prompt_logprobs is None or not self.wants_prompt_logprobs:
            return 1
        return max(1, min(num_tokens, self.num_prompt_tokens - self.num_scheduled_tokens))

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """Tokens that are known, or will be when the steps in flight have retired."""
        return (
            len(self.prompt_token_ids)
            + len(self.output_token_ids)
            + self.num_output_placeholders
            + len(self.spec_token_ids)
        )

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that are computed, or will be when the steps in flight have retired."""
        return self.num_computed_tokens + self.num_tokens_in_flight

    @property
    def num_remaining(self) -> int:
        """Tokens to schedule until the next one can be sampled."""
        return self.num_tokens_with_spec - self.num_computed_tokens - self.num_tokens_in_flight - self.refills

    def token_ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Copy of the known tokens at positions ``start`` to ``stop``."""
        stop = self.num_tokens if stop is None else stop
        num_prompt = len(self.prompt_token_ids)
        return (
            self.prompt_token_ids[start:stop]
            + self.output_token_ids[max(0, start - num_prompt) : max(0, stop - num_prompt)]
        )

    def stamp(self, event: RequestEvent, now: float) -> None:
        """Notes the time of an event, unless it has happened before."""
        self.events.setdefault(event, now)

    def seconds(self, start: RequestEvent, end: RequestEvent) -> float:
        """Time between two events; 0 where one of them has not happened."""
        if start not in self.events or end not in self.events:
            return 0.0
        return self.events[end] - self.events[start]

    def is_older_than(self, other: Request) -> bool:
        """Whether it arrived before ``other``; both are the scheduler's."""
        return self.events[RequestEvent.ARRIVED] < other.events[RequestEvent.ARRIVED]

    @property
    def queue_s(self) -> float:
        return self.seconds(RequestEvent.ARRIVED, RequestEvent.SCHEDULED)

    @property
    def prefill_s(self) -> float:
        return self.seconds(RequestEvent.SCHEDULED, RequestEvent.FIRST_TOKEN)

    @property
    def admission_s(self) -> float:
        """From verified KV to the first step."""
        return self.seconds(RequestEvent.KV_ARRIVED, RequestEvent.SCHEDULED)

    def prefill_proof(self) -> PrefillProof:
        """What this node did until the first token it computed."""
        cached = min(self.num_cached_tokens, self.num_prompt_tokens)
        return PrefillProof(
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            cached_tokens=cached,
            computed_tokens=self.num_prompt_tokens - cached,
        )
