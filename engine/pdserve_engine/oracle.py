"""OracleWorker: a device without a model, which knows what every KV entry must be.

The next token is a hash of all tokens before it, so that it does not depend on chunks, caching, preemption or which
node computes it, and the KV entry of a position is a hash of the tokens up to it, of the layer and of K or V. Every
step verifies each entry that attention would read: a block that is stale, torn, reused too early or in the wrong place
fails the step at once, where the largest logit of a real model often would not notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from pdserve_protocol.node import KVLayout
from pdserve_protocol.outputs import PromptLogprobs, TokenLogprobs

from pdserve_engine import kv_memory
from pdserve_engine.errors import ContractBroken, WrongKV
from pdserve_engine.scheduler_output import ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pdserve_engine.scheduler_output import NewRequestData, SchedulerOutput

    Words = npt.NDArray[np.uint64]

NUM_LAYERS = 2
WORDS_PER_ENTRY = 2
HEAD_DIM = WORDS_PER_ENTRY * 2
"""float32 numbers of an entry; only their bits count."""


def oracle_layout(block_size: int) -> KVLayout:
    """One head, NUM_LAYERS layers."""
    return KVLayout(
        block_size=block_size,
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        dtype="float32",
        block_bytes=block_size * NUM_LAYERS * 2 * HEAD_DIM * 4,
    )


def kv_entries(token_ids: Sequence[int], before: bytes = b"") -> list[bytes]:
    """Hash of the tokens up to each position, given that of the position before the first."""
    entries = []
    for token_id in token_ids:
        before = blake2b(before + token_id.to_bytes(4, "little"), digest_size=8).digest()
        entries.append(before)
    return entries


def next_token(entry: bytes, vocab_size: int) -> int:
    """The token after the position with this hash."""
    return int.from_bytes(entry, "little") % vocab_size


def expected_tokens(token_ids: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What the oracle generates after ``token_ids``, if nothing ends it."""
    entry = kv_entries(token_ids)[-1]
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(next_token(entry, vocab_size))
        entry = kv_entries(tokens[-1:], entry)[0]
    return tokens


@dataclass(slots=True)
class _Known:
    """A request as the runner knows it; ``entries`` are the hashes of its tokens, ``words`` what their KV must be."""

    token_ids: list[int]
    block_ids: list[int]
    entries: list[bytes]
    words_T: Words
    wants_logprobs: bool
    num_scored_tokens: int


class OracleWorker:
    """A worker over real memory, with the attributes of ``Worker``.

    Attributes:
        num_steps: executed so far.
    """

    model_id = "oracle"
    numerics = "oracle"
    grammars = None
    weight_bytes = 0

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        max_model_len: int = 4096,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self.layout = oracle_layout(block_size)
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.end_token_ids = tuple(end_token_ids)
        self.num_steps = 0
        self._kv_bytes = kv_memory.allocate(num_blocks, self.layout)
        shape = (num_blocks, NUM_LAYERS, 2, block_size, WORDS_PER_ENTRY)
        # By token first, as it is written and compared.
        self._kv_words = self._kv_bytes.view(np.uint64).reshape(shape).transpose(0, 3, 1, 2, 4)
        self._known: dict[str, _Known] = {}
        rng = np.random.default_rng(0)
        # Odd factors, so that no two entries of a layer are alike where their hashes are not.
        self._factors = rng.integers(1 << 63, size=(NUM_LAYERS, 2, WORDS_PER_ENTRY), dtype=np.uint64) * np.uint64(2) + 1

    def kv_bytes(self) -> npt.NDArray[np.uint8]:
        """The memory of the KV cache itself, [num_blocks, block_bytes], writable."""
        return self._kv_bytes

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one step.

        Raises:
            WrongKV: an entry that is read is not what it must be.
            ContractBroken: the step contradicts the steps before it.
        """
        self.num_steps += 1
        self._update(step)
        output = ModelRunnerOutput(sampled_token_ids={}, logprobs={})
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        if computed.keys() != step.num_scheduled_tokens.keys():
            raise ContractBroken("*", "scheduled tokens and requests differ")
        if sum(step.num_scheduled_tokens.values()) != step.total_num_scheduled_tokens:
            raise ContractBroken("*", "the total is not the sum")
        # A batch writes before it reads, so that two requests of one step cannot disturb each other unnoticed.
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            self._write(request_id, computed[request_id], num_tokens)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            self._sample(request_id, computed[request_id] + num_tokens, output)
            self._score(request_id, computed[request_id] + 1, num_tokens, output)
        return output

    def _update(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_req_ids:
            self._known.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            if new.req_id in self._known:
                raise ContractBroken(new.req_id, "new, but known")
            self._known[new.req_id] = self._make_known(new)
        cached = step.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id not in self._known:
                raise ContractBroken(request_id, "not new, but not known")
            self._known[request_id].block_ids.extend(block_ids)

    def _make_known(self, new: NewRequestData) -> _Known:
        wants_logprobs = new.sampling.logprobs is not None
        num_scored = new.num_prompt_tokens if new.prompt_logprobs is not None else 0
        known = _Known([], list(new.block_ids), [], self._words_of([]), wants_logprobs, num_scored)
        self._append(known, new.token_ids)
        return known

    def _append(self, known: _Known, token_ids: Sequence[int]) -> None:
        entries = kv_entries(token_ids, known.entries[-1] if known.entries else b"")
        known.entries.extend(entries)
        known.token_ids.extend(token_ids)
        known.words_T = np.concatenate([known.words_T, self._words_of(entries)])

    def _words_of(self, entries: Sequence[bytes]) -> Words:
        """What the KV of these positions must be, [token, layer, K|V, word]."""
        hashes = np.frombuffer(b"".join(entries), dtype=np.uint64)
        return hashes[:, None, None, None] * self._factors

    def _write(self, request_id: str, start: int, num_tokens: int) -> None:
        known = self._known[request_id]
        end = start + num_tokens
        if num_tokens < 1 or end > len(known.token_ids):
            raise ContractBroken(request_id, f"{num_tokens} tokens from {start} of {len(known.token_ids)}")
        if end > len(known.block_ids) * self.layout.block_size:
            raise ContractBroken(request_id, f"{len(known.block_ids)} blocks for {end} tokens")
        blocks, offsets = self._places(known, start, end)
        self._kv_words[blocks, offsets] = known.words_T[start:end]

    def _sample(self, request_id: str, end: int, output: ModelRunnerOutput) -> None:
        known = self._known[request_id]
        blocks, offsets = self._places(known, 0, end)
        wrong = (self._kv_words[blocks, offsets] != known.words_T[:end]).any(axis=(1, 2, 3))
        if wrong.any():
            position = int(wrong.argmax())
            raise WrongKV(request_id, position, int(blocks[position]))
        if end < len(known.token_ids):
            return
        token_id = next_token(known.entries[-1], self.vocab_size)
        output.sampled_token_ids[request_id] = [token_id]
        if known.wants_logprobs:
            output.logprobs[request_id] = [TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1)]
        self._append(known, [token_id])

    def _score(self, request_id: str, position: int, count: int, output: ModelRunnerOutput) -> None:
        """A prompt token's rank is its position."""
        known = self._known[request_id]
        stop = min(position + count, known.num_scored_tokens)
        if position < stop:
            tokens = [TokenLogprobs(token_id=known.token_ids[i], logprob=-0.5, rank=i) for i in range(position, stop)]
            output.prompt_logprobs[request_id] = PromptLogprobs(position=position, tokens=tokens)

    def _places(self, known: _Known, start: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Block and offset of each position."""
        indexes, offsets = np.divmod(np.arange(start, end), self.layout.block_size)
        return np.array(known.block_ids, dtype=np.int64)[indexes], offsets
