"""One attempt as a pure state machine: tokens of both halves in order of position, each once, and exactly one end.

Knows no sockets, clocks or text. Either node's message about a position may be late, doubled or missing as long as the
other's says it: the prefill node sends position 0 at once, the decode node repeats it in its first output.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec
from pdserve_protocol.outputs import Aborted, Failed, Finished, HandedOver

from pdserve_router.errors import NodeFailed, NodeLost, RouterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_protocol.outputs import ErrorCode, PrefillProof, RequestOutput, TokenLogprobs, TransferProof


class Half(Enum):
    """Which of an attempt's nodes speaks. A request on one node alone has that node's half only."""

    PREFILL = "prefill"
    DECODE = "decode"

    # Members are singletons. Enum's own hash runs Python code, and every token looks its half up.
    __hash__ = object.__hash__


class Progress(msgspec.Struct):
    """What one output brought: new tokens in order, and the end where all of them are in."""

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finished: Finished | None = None


_NOTHING = Progress()


class AttemptLife:
    """State of one attempt. After ``ended`` nothing more is reported, whatever still arrives.

    Attributes:
        ended: the attempt has had its one end.
        completed: that end was a node's Finished with every token in; the nodes settle the rest among themselves.
        open_halves: halves that have not sent their terminal output.
        proofs: what each half said that it did.
        prompt_logprobs: of the prompt's tokens but the first. No output token is reported before the last of them.
    """

    def __init__(self, nodes: Mapping[Half, str], num_prompt_logprobs: int = 0, num_forced: int = 0) -> None:
        """Args:
        nodes: the halves of this attempt and the name of the node of each, for error messages.
        num_forced: output tokens that the nodes were given; the first that they report comes after these.
        """
        self._nodes = dict(nodes)
        self._next = num_forced
        self._early: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._finished: Finished | None = None
        self._total: int | None = None
        self._decode_speaks = False
        self._num_prompt_logprobs = num_prompt_logprobs
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.ended = False
        self.completed = False
        self.open_halves = set(nodes)
        self.prefill_proofs: dict[Half, PrefillProof] = {}
        self.transfer_proof: TransferProof | None = None

    @property
    def has_forkable_prompt(self) -> bool:
        """Whether the decode node has taken over the prompt's KV, and just as it would have computed it itself."""
        return self.transfer_proof is not None and self.transfer_proof.exact

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, with those that the nodes were given."""
        return self._next

    def on_output(self, half: Half, output: RequestOutput) -> Progress:
        """Take one output of one half.

        Raises:
            NodeFailed, NodeLost: this output ends the attempt with an error; only once, and never after its end.
        """
        if half not in self.open_halves:
            return _NOTHING
        if output.prompt_logprobs is not None and output.prompt_logprobs.position == len(self.prompt_logprobs) + 1:
            self.prompt_logprobs += output.prompt_logprobs.tokens
        if output.end is None and output.prefill is None and output.transfer is None and self._finished is None:
            # Most outputs are tokens and nothing else.
            return _NOTHING if self.ended else self._take(half, output)
        if output.prefill is not None:
            self.prefill_proofs[half] = output.prefill
        if output.transfer is not None:
            self.transfer_proof = output.transfer
        if output.end is not None:
            self.open_halves.discard(half)
        if self.ended:
            return _NOTHING
        progress = self._take(half, output)
        if output.end is not None:
            self._on_end(half, output)
        if self._finished is not None and self._total is not None and self._next >= self._total:
            self.ended = self.completed = True
            progress = Progress(progress.token_ids, progress.logprobs, self._finished)
        elif not self.open_halves:
            self._fail(half, "internal", f"all halves ended after {self._next} tokens, before the output was complete")
        return progress

    def on_lost(self, half: Half, error: RouterError) -> None:
        """The node of ``half`` is dead.

        Raises:
            RouterError: ``error``, where the attempt cannot go on without it.
        """
        if half not in self.open_halves:
            return
        self.open_halves.discard(half)
        if self.ended or not self._needed(half):
            return
        self.ended = True
        raise error

    def stop(self) -> None:
        """The router itself ends the attempt: a stop string, a client that has gone, a deadline."""
        self.ended = True

    def _take(self, half: Half, output: RequestOutput) -> Progress:
        ids, logprobs, position = output.token_ids, output.logprobs, output.position
        if not ids:
            return _NOTHING
        if half is Half.DECODE:
            self._decode_speaks = True
        if position == self._next and not self._early and not self._misses_prompt():
            self._next += len(ids)
            return Progress(ids, logprobs or [])
        for offset, token_id in enumerate(ids):
            if position + offset >= self._next:
                logprob = logprobs[offset] if logprobs and offset < len(logprobs) else None
                self._early.setdefault(position + offset, (token_id, logprob))
        progress = Progress()
        if self._misses_prompt():
            return progress
        while self._next in self._early:
            token_id, logprob = self._early.pop(self._next)
            progress.token_ids.append(token_id)
            if logprob is not None:
                progress.logprobs.append(logprob)
            self._next += 1
        return progress

    def _on_end(self, half: Half, output: RequestOutput) -> None:
        match output.end:
            case Finished() as finished:
                if self._finished is None:
                    self._finished, self._total = finished, output.position + len(output.token_ids)
            case HandedOver():
                pass
            case Failed(code=code, message=message):
                if self._needed(half):
                    self._fail(half, code, message)
            case Aborted():
                # A half also ends this way because of the other: a decode half when the first token was the last, a
                # prefill half when the decode node gave up. Who knows why is the other node, whose word may come later.
                waits = bool(self.open_halves) and not self._decode_speaks
                if self._needed(half) and not waits:
                    self.ended = True
                    raise NodeLost(f"{half.value} node {self._nodes[half]}", "ended the request by itself")

    def _misses_prompt(self) -> bool:
        return len(self.prompt_logprobs) < self._num_prompt_logprobs

    def _needed(self, half: Half) -> bool:
        """Whether the output can no longer be completed without ``half``.

        Once the decode node generates it has the KV, so a prefill node that dies between hand-over and its word about
        it takes nothing along. Once a half has finished, only positions of the other's that are under way are missing.
        """
        if self._finished is not None:
            return not self.open_halves
        return half is Half.DECODE or not self._decode_speaks or self._misses_prompt()

    def _fail(self, half: Half, code: ErrorCode, detail: str) -> None:
        self.ended = True
        raise NodeFailed(f"{half.value} node {self._nodes[half]}", code, detail, self._nodes[half])
