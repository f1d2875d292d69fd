"""A prefill node and a decode node on one device: the tokens of aggregated serving, and how fast KV moves."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_bench.errors import NodeFailed
from pdserve_bench.gpu_check.nodes import Pair, running_node

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdserve_protocol.door import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    """Attributes:
    prompt_lens: of the requests that run one after the other, whole and disaggregated.
    concurrency: requests of the longest prompt that then run together.
    node_arguments: of both nodes.
    """

    folder: Path
    vocab_size: int
    prompt_lens: Sequence[int]
    num_tokens: int
    concurrency: int
    node_arguments: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """Attributes:
    unlike: prompt lengths whose tokens differ from aggregated serving, one request after the other.
    unlike_together: of the concurrent requests, those whose tokens differ; batches change the order of sums.
    moved_bytes, transfer_s, landing_s: of the longest prompt alone. ``transfer_s`` runs from the grant to the last
        block's arrival and holds most of the prompt's computation; ``landing_s`` follows it.
    recomputed_tokens: of all requests.
    tokens_per_s: of the concurrent requests, prompts and transfers included.
    """

    transport: str
    exact: bool
    unlike: list[int]
    unlike_together: int
    moved_bytes: int
    transfer_s: float
    landing_s: float
    recomputed_tokens: int
    tokens_per_s: float


def run_pair(config: PairConfig) -> PairResult:
    """Raises NodeFailed."""
    common = ["--model", str(config.folder), *config.node_arguments]
    with (
        running_node("prefill", config.folder, common) as prefill,
        running_node("decode", config.folder, common) as decode,
    ):
        return asyncio.run(_drive(config, prefill, decode))


async def _drive(config: PairConfig, prefill: Address, decode: Address) -> PairResult:
    draw, num_tokens = random.Random(0), config.num_tokens
    prompts = [[draw.randrange(config.vocab_size) for _ in range(length)] for length in sorted(config.prompt_lens)]
    async with Pair(prefill, decode) as pair:
        whole = [await pair.generate(prompt, num_tokens, disaggregated=False) for prompt in prompts]
        halves = [await pair.generate(prompt, num_tokens, disaggregated=True) for prompt in prompts]
        began = time.perf_counter()
        together = await asyncio.gather(
            *(pair.generate(prompts[-1], num_tokens, disaggregated=True) for _ in range(config.concurrency))
        )
        took_s = time.perf_counter() - began
    proofs = [answer.transfer for answer in [*halves, *together] if answer.transfer is not None]
    longest = halves[-1].transfer
    if longest is None or len(proofs) < len(halves) + len(together):
        raise NodeFailed("decode", "an answer has no proof of its transfer")
    return PairResult(
        transport=longest.transport,
        exact=longest.exact,
        unlike=[len(prompts[i]) for i in range(len(prompts)) if halves[i].output != whole[i].output],
        unlike_together=sum(answer.output != whole[-1].output for answer in together),
        moved_bytes=longest.bytes,
        transfer_s=longest.transfer_s,
        landing_s=longest.landing_s,
        recomputed_tokens=sum(proof.recomputed_tokens for proof in proofs),
        tokens_per_s=config.concurrency * num_tokens / took_s,
    )
