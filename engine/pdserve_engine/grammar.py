"""Where the outputs of the engine's requests stand in their grammars, and the masks that follow from it.

The mask of a token is computed on a thread of its own while the forward pass runs, since all that it depends on, the
tokens before it, is known by then.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
from pdserve_text.errors import BadGrammar

from pdserve_engine.errors import BadRequest

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy.typing as npt
    from pdserve_protocol.sampling import Grammar
    from pdserve_text.grammar import GrammarCompiler, GrammarMatcher


class GrammarState:
    """One output and its grammar. Made by ``Grammars.state``.

    A token that the grammar does not allow is never sampled; if the grammar becomes too complex on the way, only an end
    id is allowed.
    """

    def __init__(self, matcher: GrammarMatcher, thread: ThreadPoolExecutor, vocab_size: int) -> None:
        self._matcher = matcher
        self._thread = thread
        self._vocab_size = vocab_size
        self._mask: Future[bytes] | None = None

    @property
    def is_complete(self) -> bool:
        """Nothing but an end id may follow."""
        if self._mask is not None:
            # The matcher answers nothing while it computes.
            self._mask.result()
        return self._matcher.is_complete

    def append(self, token_id: int) -> None:
        """Takes note of one more output token."""
        self._mask = None
        self._matcher.append(token_id)

    def begin_mask(self) -> None:
        """Starts to compute the mask of the next token, unless that is under way."""
        if self._mask is None:
            self._mask = self._thread.submit(self._matcher.mask)

    def allows(self, token_id: int) -> bool:
        """Whether it may be the next token."""
        return bool(self._bits()[token_id // 8] >> token_id % 8 & 1)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Whether each token may be the next one, [vocab]."""
        bits = np.frombuffer(self._bits(), dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _bits(self) -> bytes:
        self.begin_mask()
        assert self._mask is not None
        return self._mask.result()


class Grammars:
    """The grammars of one engine. Safe to use from several threads.

    Args:
        vocab_size: logits of the model.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._compiling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
        self._compiled: WeakValueDictionary[Grammar, GrammarMatcher] = WeakValueDictionary()

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """At its start, for ``state`` to copy as long as somebody keeps it. Raises BadRequest."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            try:
                matcher = self._compiler.matcher(grammar.kind, grammar.source)
            except BadGrammar as error:
                raise BadRequest(f"grammar: {error}") from error
            self._compiled[grammar] = matcher
        return matcher

    def begin_compile(self, grammar: Grammar) -> Future[GrammarMatcher]:
        """Compiles it on a thread of its own, one after the other."""
        return self._compiling.submit(self.compile, grammar)

    def state(self, grammar: Grammar) -> GrammarState:
        """At the start of a grammar, at once where it is compiled."""
        return GrammarState(self.compile(grammar).copy(), self._thread, self._vocab_size)

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._compiling.shutdown(cancel_futures=True)
        self._thread.shutdown()
