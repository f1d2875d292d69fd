"""Grammars: what an output must look like, checked before any node works and followed token by token.

Owns the ``llguidance`` library, which no other module sees. Does not know requests, logits or JSON bodies.

JSON is written without free white space (", " and ": " between its parts), so that a model cannot fill its output with
blanks. Masks are sets of token ids: bit ``i % 8`` of byte ``i // 8`` is set where token ``i`` may come next.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from pdserve_text import files as folder_files
from pdserve_text.errors import BadGrammar, TokenizerFilesError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llguidance._lib import JsonCompileOptions

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

NUM_KEPT_GRAMMARS = 64
# Other grammars wait while one is compiled: 50 ms at most (with the library's default, a second and a half).
_LIMITS = LLParserLimits(initial_lexer_fuel=100_000, verbose_errors=False)
_JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarMatcher:
    """Where one output stands in its grammar. Made by ``GrammarCompiler.matcher``."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Nothing but an end id may follow."""
        return self._matcher.is_stopped()

    def mask(self) -> bytes:
        """The tokens that may come next, as bits; other threads run meanwhile. End ids where the output may end."""
        return self._matcher.compute_bitmask()

    def copy(self) -> GrammarMatcher:
        """Another one at the same place."""
        return GrammarMatcher(self._matcher.deep_copy())

    def append(self, token_id: int) -> bool:
        """Takes the next token; False where the grammar does not allow it, and from then on."""
        return self._matcher.consume_token(token_id)


class GrammarCompiler:
    """Grammars over one vocabulary. Safe to use from several threads.

    Args:
        files: of the tokenizer, by name.
        vocab_size: logits of the model; None where only ``check`` is wanted.
        end_token_ids: every id that ends an output, at least one.

    Raises:
        TokenizerFilesError: the library cannot read the tokenizer, or there is no end id.
    """

    def __init__(self, files: Mapping[str, bytes], end_token_ids: Iterable[int], vocab_size: int | None = None) -> None:
        ends = sorted(end_token_ids)
        if not ends:
            raise TokenizerFilesError(folder_files.TOKENIZER, "there is no end id, without which no grammar can end")
        try:
            self._tokenizer = LLTokenizer(files[folder_files.TOKENIZER].decode(), n_vocab=vocab_size, eos_token=ends)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerFilesError(folder_files.TOKENIZER, f"no grammars over it: {error}") from error
        self._compiled = lru_cache(maxsize=NUM_KEPT_GRAMMARS)(self._compile)

    def check(self, kind: GrammarKind, source: str) -> None:
        """Raises BadGrammar where ``matcher`` would."""
        self._compiled(kind, source)

    def matcher(self, kind: GrammarKind, source: str) -> GrammarMatcher:
        """A matcher at the start of the grammar.

        Args:
            source: JSON schema, regular expression (Rust's syntax), JSON list of texts, or Lark or GBNF grammar;
                nothing for ``json_object``.

        Raises:
            BadGrammar: it has a fault, uses what is not supported, or is too complex.
        """
        return GrammarMatcher(self._compiled(kind, source).deep_copy())

    def _compile(self, kind: GrammarKind, source: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, _llguidance(kind, source), log_level=0, limits=_LIMITS)
        # Much is compiled only when it is first needed: let it be now.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise BadGrammar(matcher.get_error())
        return matcher


def choice_source(choices: Sequence[str]) -> str:
    """Source of a grammar of kind ``choice``."""
    return json.dumps(list(choices))


def _llguidance(kind: GrammarKind, source: str) -> str:
    try:
        match kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_STYLE)
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(source, overrides=_JSON_STYLE)
            case _:
                return grammar_from(kind, source)
    except ValueError as error:
        raise BadGrammar(str(error)) from error
