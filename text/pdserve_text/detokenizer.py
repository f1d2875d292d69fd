"""A stream of token ids becomes a stream of text, in whole characters.

Owns the few bytes of a character that is not complete yet. Does not know about stop strings.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Text of one output, as its tokens arrive.

    What ``push`` returns, joined, is the text of all tokens together, however they were cut into pushes; only the bytes
    of an unfinished character at the very end are missing. At most 3 bytes are held back. A byte that cannot belong to
    a character becomes U+FFFD at once (one for each maximal subpart: Unicode 16, section 3.9), so that no sequence of
    tokens stops the stream.

    Args:
        skip_special_tokens: special tokens have no text.
        prompt_token_ids: what the output follows. SentencePiece drops the space at the beginning of a text, but not at
            the beginning of what follows a prompt. An unfinished character at the prompt's end is finished here.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        table = tokenizer.table
        self._pieces = table.visible_pieces if skip_special_tokens else table.pieces
        self._decoder = _Utf8Decoder("replace")
        self._holds_bytes = False
        self._strips_first_token = table.strip_first_token
        self._strip = table.strip
        self._at_start = table.trims and not any(map(self._piece, prompt_token_ids))
        if prompt_token_ids:
            self.push(prompt_token_ids[-_LONGEST_CHARACTER:])

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became complete with these tokens; ids without a token have none."""
        to_bytes = self._trimmed if self._at_start else self._piece
        data = to_bytes(token_ids[0]) if len(token_ids) == 1 else b"".join(map(to_bytes, token_ids))
        if not self._holds_bytes:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._holds_bytes = self._decoder.getstate()[0] != b""
        return text

    def _piece(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def _trimmed(self, token_id: int) -> bytes:
        piece = self._piece(token_id)
        if not self._at_start or not piece:
            return piece
        if self._strips_first_token:
            self._at_start = False
            return piece.replace(b" ", b"")
        spaces = len(piece) - len(piece.lstrip(b" "))
        dropped = min(spaces, self._strip)
        self._strip -= dropped
        self._at_start = dropped == len(piece) and self._strip > 0
        return piece[dropped:]
