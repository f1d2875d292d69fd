"""The bytes that each token id stands for.

Owns the reading of a tokenizer's decoder: for the two families in use, byte-level BPE (Radford et al., GPT-2, 2019) and
SentencePiece with byte fallback (Kudo and Richardson, 2018), text is the concatenation of one byte string a token,
trimmed at its beginning. Does not know about streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdserve_text.errors import UnsupportedTokenizer
from pdserve_text.files import TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_KEEPING = ("ByteLevel", "Digits", "Split")
_SUPPORTED = "ByteLevel, Metaspace, and sequences of Replace, ByteFallback, Fuse and Strip at the start"


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """Bytes of every token, and what the beginning of a text loses.

    Attributes:
        pieces: bytes by id; empty where an id has no token.
        visible_pieces: the same with special tokens empty.
        special_ids: ids of special tokens.
        strip: so many spaces at the very beginning of a text are dropped.
        strip_first_token: the first token of a text loses all its spaces.
    """

    pieces: list[bytes]
    visible_pieces: list[bytes]
    special_ids: frozenset[int]
    strip: int
    strip_first_token: bool

    @property
    def trims(self) -> bool:
        """Whether a text at its beginning differs from the same tokens after others."""
        return self.strip > 0 or self.strip_first_token


@dataclass(frozen=True)
class _Rules:
    to_bytes: Callable[[str], bytes]
    strip: int = 0
    strip_first_token: bool = False


def token_table(tokens: Mapping[int, str], special_ids: frozenset[int], decoder: dict[str, Any] | None) -> TokenTable:
    """Apply the ``decoder`` of a tokenizer.json to each token; UnsupportedTokenizer where it is of another kind."""
    rules = _rules(decoder)
    pieces = [b""] * (max(tokens, default=-1) + 1)
    for token_id, token in tokens.items():
        pieces[token_id] = rules.to_bytes(token)
    visible = list(pieces)
    for token_id in special_ids:
        visible[token_id] = b""
    return TokenTable(
        pieces=pieces,
        visible_pieces=visible,
        special_ids=special_ids,
        strip=rules.strip,
        strip_first_token=rules.strip_first_token,
    )


def writes_every_byte(spec: Mapping[str, Any]) -> bool:
    """Whether, by a tokenizer.json, the tokens of any text hold all its bytes (those that the vocabulary has).

    A normalizer may shorten a text, a pre-tokenizer may drop spaces, and so may an added token beside it.
    """
    steps = spec.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    return (
        (spec.get("decoder") or {}).get("type") == "ByteLevel"
        and spec.get("normalizer") is None
        and (spec.get("model") or {}).get("type", "BPE") == "BPE"
        and all(step.get("type") in _KEEPING and step.get("behavior") != "Removed" for step in steps)
        and not any(token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens") or [])
    )


def byte_characters() -> dict[int, str]:
    """The character that byte-level BPE writes for each byte: itself where Latin-1 can print it, else U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def _rules(decoder: dict[str, Any] | None) -> _Rules:
    kind = None if decoder is None else decoder.get("type")
    if decoder is None or kind is None:
        raise UnsupportedTokenizer(TOKENIZER, "a tokenizer without a decoder", _SUPPORTED)
    steps = decoder["decoders"] if kind == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _Rules(_byte_level())
    if [step["type"] for step in steps] == ["Metaspace"]:
        mark = steps[0].get("replacement", "▁")
        first = steps[0].get("prepend_scheme", "always") != "never"
        return _Rules(lambda token: token.replace(mark, " ").encode(), strip_first_token=first)
    return _sentencepiece(steps)


def _byte_level() -> Callable[[str], bytes]:
    bytes_of = {ord(character): byte for byte, character in byte_characters().items()}
    alphabet = frozenset(byte_characters().values())

    def to_bytes(token: str) -> bytes:
        # An added token may hold characters outside the byte alphabet; it then stands for itself.
        return token.translate(bytes_of).encode("latin-1") if alphabet.issuperset(token) else token.encode()

    return to_bytes


def _sentencepiece(steps: list[dict[str, Any]]) -> _Rules:
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    strip = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not byte_fallback:
                replacements.append((old, new))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                strip += start
            case _:
                raise UnsupportedTokenizer(TOKENIZER, f"the decoder step {step}", _SUPPORTED)

    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                return token.encode()
        return token.encode()

    return _Rules(to_bytes, strip=strip)
