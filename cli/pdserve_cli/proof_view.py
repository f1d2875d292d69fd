"""The ``pdserve`` object of an answer: what it says, whether it is a proof, and how it looks in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve_cli.openai_api import Answer


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that each side had in its prefix cache."""

    prefill: int | None = None
    decode: int | None = None


class TimeSplit(msgspec.Struct, frozen=True):
    """Milliseconds, each by the clock of the node that measured it."""

    queue_ms: float | None = None
    prefill_ms: float | None = None
    grant_ms: float | None = None
    transfer_ms: float | None = None
    landing_ms: float | None = None
    admission_ms: float | None = None


class Proof(msgspec.Struct, frozen=True):
    """What happened to one request, as the router tells it."""

    mode: str
    prefill_node: str | None = None
    decode_node: str | None = None
    transport: str | None = None
    blocks_moved: int = 0
    bytes_moved: int = 0
    tokens_recomputed: int = 0
    cached_tokens: CachedTokens = CachedTokens()
    exact: bool = False
    time: TimeSplit = TimeSplit()


def faults(proof: Proof) -> Iterator[str]:
    """What speaks against a whole hand-off from one node to another; nothing where it is proven."""
    if proof.mode != "disaggregated":
        yield f"the request was served {proof.mode}, not disaggregated"
    if proof.prefill_node is None or proof.prefill_node == proof.decode_node:
        yield f"prefill and decode are not two nodes: {proof.prefill_node} and {proof.decode_node}"
    if proof.bytes_moved <= 0:
        yield "no byte of KV was moved"
    if proof.tokens_recomputed:
        yield f"the decode node recomputed {proof.tokens_recomputed} tokens"


def proof_table(answer: Answer) -> Table:
    """The proof and the client's measurements, a line for each stage."""
    proof, split = answer.proof, answer.proof.time
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    table.add_row(
        "prefill",
        str(proof.prefill_node),
        f"queue {ms(split.queue_ms)}, prefill {ms(split.prefill_ms)}; "
        f"{answer.num_prompt_tokens} prompt tokens, {proof.cached_tokens.prefill or 0} of them cached",
    )
    table.add_row(
        "hand-off",
        f"{proof.blocks_moved} blocks, {size(proof.bytes_moved)}",
        f"over {proof.transport}: grant {ms(split.grant_ms)}, transfer {ms(split.transfer_ms)}, "
        f"landing {ms(split.landing_ms)}, admission {ms(split.admission_ms)}",
    )
    table.add_row(
        "decode",
        str(proof.decode_node),
        f"{proof.tokens_recomputed} tokens recomputed, {proof.cached_tokens.decode or 0} cached; "
        f"exact: {'yes' if proof.exact else 'no'}",
    )
    table.add_row(
        "client",
        f"TTFT {ms(answer.ttft_s * 1000)}, ITL {ms(answer.itl_s * 1000 if answer.itl_s is not None else None)}",
        f"{answer.num_output_tokens} tokens generated",
    )
    return table


def ms(value: float | None) -> str:
    """Milliseconds for people."""
    if value is None:
        return "-"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def size(num_bytes: int) -> str:
    """Bytes for people."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
