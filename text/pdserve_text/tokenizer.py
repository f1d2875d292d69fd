"""Tokenizer: text to token ids and back, from the files of a Hugging Face folder held in memory.

Owns the ``tokenizers`` library, which no other module but gguf_tokenizer sees. Does not know chat templates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tokenizers

from pdserve_text import files as folder_files
from pdserve_text.detokenizer import IncrementalDetokenizer
from pdserve_text.errors import NotUnicode, TokenizerFilesError
from pdserve_text.token_table import TokenTable, token_table, writes_every_byte

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Tokenizer:
    """Immutable once made, and safe to use from several threads.

    Attributes:
        id: identity of the files it was made from.
        vocab_size: highest token id + 1; a model's output may be wider.
        end_token_ids: every id that ends an output.
        generation_defaults: sampling parameters the model's authors recommend, by name.
        table: the bytes of each token, for the detokenizer.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        if folder_files.TOKENIZER not in files:
            raise TokenizerFilesError(folder_files.TOKENIZER, "missing")
        spec = folder_files.read_json(files, folder_files.TOKENIZER)
        try:
            backend = tokenizers.Tokenizer.from_buffer(files[folder_files.TOKENIZER])
        except Exception as error:  # the library raises bare Exception
            raise TokenizerFilesError(folder_files.TOKENIZER, str(error)) from error
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
        tokens |= {token_id: token.content for token_id, token in added.items()}

        self.id: str = folder_files.tokenizer_id(files)
        self.table: TokenTable = token_table(tokens, special_ids, spec.get("decoder"))
        self.vocab_size: int = len(self.table.pieces)
        self._longest = max(map(len, self.table.pieces), default=0) if writes_every_byte(spec) else 0
        self._unwritten = bytes(set(range(256)) - {piece[0] for piece in self.table.pieces if len(piece) == 1})
        self.end_token_ids: frozenset[int] = folder_files.end_token_ids(files)
        self.generation_defaults: dict[str, float] = folder_files.generation_defaults(files)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """Make one from files by name; TokenizerFilesError where tokenizer.json is missing, damaged or unsupported."""
        return cls(files)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; special tokens written out in it become their ids.

        ``add_special_tokens`` adds what tokenizer.json adds to a plain text (bos, where the model wants one): True for
        completions, False for rendered chat templates, which already hold theirs. Raises NotUnicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise NotUnicode(error.start) from error
        # Of the library's ways to encode, this is the one that lets other threads run meanwhile.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def fewest_tokens(self, text: str) -> int:
        """So many tokens ``text`` has at least; far quicker than encoding it. 0 where the tokenizer allows no guess."""
        if not self._longest:
            return 0
        # Bytes without a token of their own, perhaps control characters, are dropped by the library in silence.
        return -(-len(text.encode(errors="replace").translate(None, self._unwritten)) // self._longest)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of these tokens as IncrementalDetokenizer streams it; an unfinished character at the end is dropped."""
        return IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens).push(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, perhaps part of a character; of a special token, its name; none for an unknown id."""
        pieces = self.table.pieces
        return pieces[token_id] if 0 <= token_id < len(pieces) else b""
