"""What happened to one request: which nodes, what moved, where the time went. For the answer and for the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from pdserve_router.lifecycle import Half

if TYPE_CHECKING:
    from pdserve_router.lifecycle import AttemptLife

Mode = Literal["disaggregated", "aggregated", "prefill_only", "forked"]
Reason = Literal["prefill_busy", "no_prefill_node", "avoided", "mismatch"]


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens found in the prefix cache of each side; None where there is no such side, or it has not said."""

    prefill: int | None = None
    decode: int | None = None


class TimeSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds, each by the clock of the node that measured it; None where it did not happen.

    Queue and prefill make up the time to the first token; grant, transfer, landing and admission the gap before the
    second.
    """

    queue_ms: float | None = None
    prefill_ms: float | None = None
    grant_ms: float | None = None
    transfer_ms: float | None = None
    landing_ms: float | None = None
    admission_ms: float | None = None


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The ``pdserve`` object of an answer.

    Attributes:
        mode: "aggregated": one decode node did all; "prefill_only": the first token was the last; "forked": the decode
            node went on from the prompt of another choice, whose proof tells of the prefill node and of the transfer.
        tokens_recomputed: prompt tokens that the decode node computed although a prefill node had.
        blocks_resent: blocks that did not arrive as they were sent and were sent again.
        retries: attempts before this one that failed; the client has their tokens as well.
        exact: the tokens are those that a single node would have made.
        reason: why one decode node did all although prefill nodes are configured: "prefill_busy": so the first token
            came earlier; "no_prefill_node"; "avoided": an attempt before this one failed there; "mismatch": none that
            goes with it.
    """

    mode: Mode
    prefill_node: str | None
    decode_node: str | None
    transport: str | None
    blocks_moved: int
    bytes_moved: int
    tokens_recomputed: int
    cached_tokens: CachedTokens
    exact: bool
    time: TimeSplit
    blocks_resent: int = 0
    retries: int = 0
    reason: Reason | None = None


def build_proof(
    life: AttemptLife,
    mode: Mode,
    prefill_node: str | None,
    decode_node: str | None,
    num_retries: int = 0,
    exact: bool = True,
    reason: Reason | None = None,
) -> Proof:
    """Proof of an attempt from what its nodes have said so far."""
    alone = mode in ("aggregated", "forked")
    prefill = life.prefill_proofs.get(Half.DECODE if alone else Half.PREFILL)
    transfer = life.transfer_proof
    cached = None if prefill is None else prefill.cached_tokens
    recomputed = prefill.computed_tokens if prefill is not None and mode == "forked" else 0
    return Proof(
        mode=mode,
        prefill_node=prefill_node,
        decode_node=decode_node,
        transport=transfer.transport if transfer else None,
        blocks_moved=transfer.blocks if transfer else 0,
        bytes_moved=transfer.bytes if transfer else 0,
        tokens_recomputed=transfer.recomputed_tokens if transfer else recomputed,
        cached_tokens=CachedTokens(
            prefill=None if alone else cached,
            decode=cached if alone else (transfer.cached_tokens if transfer else None),
        ),
        exact=exact and (transfer.exact if transfer else True),
        time=TimeSplit(
            queue_ms=_ms(prefill.queue_s if prefill else None),
            prefill_ms=_ms(prefill.prefill_s if prefill else None),
            grant_ms=_ms(transfer.grant_s if transfer else None),
            transfer_ms=_ms(transfer.transfer_s if transfer else None),
            landing_ms=_ms(transfer.landing_s if transfer else None),
            admission_ms=_ms(transfer.admission_s if transfer else None),
        ),
        blocks_resent=transfer.resent_blocks if transfer else 0,
        retries=num_retries,
        reason=reason,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
