"""What a node says about a request: tokens, its one terminal message, and the proof of what was done."""

from __future__ import annotations

from typing import Literal

from pdserve_protocol.codec import Message, Record

FinishReason = Literal["stop", "length"]
ErrorCode = Literal[
    "stale_boot",  # the request names a boot id that is not this process
    "draining",  # the node takes no new requests
    "overloaded",  # the node has no room to queue it
    "does_not_fit",  # prompt and output exceed the KV cache or the context
    "bad_request",  # the node cannot do what the request asks
    "handoff",  # the KV hand-off failed
    "deadline",  # timeout_s is over
    "internal",  # a fault of the node
]


class TokenLogprobs(Record, frozen=True):
    """Log probabilities at one output position, of the model's distribution before temperature and filters.

    ``top`` is (token id, log probability), most probable first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class PromptLogprobs(Record, frozen=True):
    """Log probabilities of the prompt's tokens at ``position`` and on, of which the first that has any is 1."""

    position: int
    tokens: list[TokenLogprobs]


class Finished(Record, frozen=True, tag=True):
    """The output is complete."""

    reason: FinishReason
    stop_token_id: int | None = None


class HandedOver(Record, frozen=True, tag=True):
    """The other node has the KV and goes on; this half is over."""


class Aborted(Record, frozen=True, tag=True):
    """Ended because the router asked, or because the router was silent too long."""


class Failed(Record, frozen=True, tag=True):
    code: ErrorCode
    message: str


End = Finished | HandedOver | Aborted | Failed


class PrefillProof(Record, frozen=True):
    """What a node did to compute the first token. Seconds by the node's own clock.

    Attributes:
        queue_s: arrival to first scheduled.
        prefill_s: first scheduled to first token.
        cached_tokens: prompt tokens whose KV was in the prefix cache.
        computed_tokens: prompt tokens computed.
    """

    queue_s: float
    prefill_s: float
    cached_tokens: int
    computed_tokens: int


class TransferProof(Record, frozen=True):
    """What a node did to take KV over. Seconds by the receiving node's own clock.

    Attributes:
        transport: connector name.
        exact: both nodes have the same numerics fingerprint.
        blocks, bytes: landed and copied into the KV cache.
        cached_tokens: prompt tokens the receiver already had.
        recomputed_tokens: prompt tokens it had to compute itself.
        grant_s: offer received to grant sent.
        transfer_s: grant sent to last Sent received.
        landing_s: digest and copy after the last Sent.
        admission_s: landed to first scheduled.
        resent_blocks: blocks that were asked for again, each time counted.
        mismatches: landed blocks whose digest did not match.
    """

    transport: str
    exact: bool
    blocks: int
    bytes: int
    cached_tokens: int
    recomputed_tokens: int
    grant_s: float
    transfer_s: float
    landing_s: float
    admission_s: float
    resent_blocks: int = 0
    mismatches: int = 0


class RequestOutput(Record, frozen=True):
    """Tokens at output positions ``position`` and on; the last of a request has ``end``.

    ``prefill`` comes with the first token that this node computed, ``transfer`` with the first output after a transfer.
    ``prompt_logprobs`` come from the node that computes the prompt, in order, as it is computed; the last of them come
    with the first token.
    """

    id: str
    position: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    end: End | None = None
    prefill: PrefillProof | None = None
    transfer: TransferProof | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Outputs(Message, frozen=True):
    """All outputs of one step for one router."""

    outputs: list[RequestOutput]
