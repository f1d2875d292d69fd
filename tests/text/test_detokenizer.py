"""Incremental detokenization: whole characters only, the same text however the ids are cut, no stall (B87, B88)."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from pdserve_text.detokenizer import IncrementalDetokenizer
from pdserve_text.errors import UnsupportedTokenizer
from pdserve_text.tokenizer import Tokenizer
from support.tokenizers import EOS_ID, tiny_tokenizer_files
from tokenizers import AddedToken, decoders, models

VOCAB_SIZE = 1024
FILES = tiny_tokenizer_files(VOCAB_SIZE)
TOKENIZER = Tokenizer.from_files(FILES)
LIBRARY = tokenizers.Tokenizer.from_buffer(FILES["tokenizer.json"])

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
TEXTS = [
    f"a family {FAMILY}!",
    "東京は日本の首都です",
    "café à la crème",
    "\U0001f1ef\U0001f1f5 عربى ไทย",
]
examples = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def sentencepiece(decoder: decoders.Decoder) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """The vocabulary of a Llama 2 in small: <s>, all bytes, and words with the mark of a space."""
    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "東", "▁▁c"]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    backend.decoder = decoder
    return Tokenizer.from_files({"tokenizer.json": backend.to_str().encode()}), backend


LLAMA2_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
LLAMA2, LLAMA2_LIBRARY = sentencepiece(LLAMA2_DECODER)
METASPACE, METASPACE_LIBRARY = sentencepiece(decoders.Metaspace())
BYTES_AT = 1


def stream(detokenizer: IncrementalDetokenizer, ids: list[int], sizes: list[int]) -> str:
    """Push ``ids`` in chunks of these sizes, in turn."""
    text, start, turn = "", 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        text += detokenizer.push(ids[start : start + size])
        start, turn = start + size, turn + 1
    return text


@pytest.mark.parametrize("text", TEXTS)
def test_characters_over_several_tokens_arrive_whole(text: str) -> None:  # B87
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    shown = [TOKENIZER.token_bytes(token_id).decode(errors="replace") for token_id in ids]
    assert "\ufffd" in "".join(shown), "no character is split, a weak example"


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_cut_inside_a_character_drops_it(cut: int) -> None:  # B88
    ids = TOKENIZER.encode(FAMILY, add_special_tokens=False)[:cut]
    streamed = stream(IncrementalDetokenizer(TOKENIZER), ids, [1])
    assert FAMILY.startswith(streamed)
    assert streamed == TOKENIZER.decode(ids)
    assert LIBRARY.decode(ids).removesuffix("\ufffd") == streamed


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@pytest.mark.slow
@examples
@given(text=st.text(max_size=40), sizes=sizes)
def test_any_text_in_any_chunks(text: str, sizes: list[int]) -> None:  # B87
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert stream(IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False), ids, sizes) == text


@examples
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30), sizes=sizes, skip=st.booleans())
def test_any_ids_decode_as_the_library_decodes_them_whole(ids: list[int], sizes: list[int], skip: bool) -> None:  # B87
    def streamed(ids: list[int]) -> str:
        return stream(IncrementalDetokenizer(TOKENIZER, skip_special_tokens=skip), ids, sizes)

    # After a letter nothing is unfinished, so the texts are equal; before it, the unfinished character may be missing.
    ended = [*ids, 3 + ord("z")]
    assert streamed(ended) == LIBRARY.decode(ended, skip_special_tokens=skip)
    assert LIBRARY.decode(ids, skip_special_tokens=skip) in (streamed(ids), streamed(ids) + "\ufffd")
    assert streamed(ids) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@examples
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
def test_invalid_bytes_never_stall_the_stream(ids: list[int]) -> None:  # B87, B88
    """Whatever came before, text follows at most 3 bytes behind the tokens."""
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    detokenizer.push(ids)
    assert detokenizer.push(TOKENIZER.encode("ok", add_special_tokens=False)).endswith("ok")
    lead_byte = 3 + 0xF0
    assert len("".join(detokenizer.push([lead_byte]) for _ in range(100))) == 99


def test_special_tokens_are_skipped_or_written() -> None:
    ids = [*TOKENIZER.encode("done", add_special_tokens=False), EOS_ID]
    assert stream(IncrementalDetokenizer(TOKENIZER), ids, [1]) == "done"
    assert stream(IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False), ids, [1]) == "done<|im_end|>"


def test_ids_without_a_token_have_no_text() -> None:
    """Embeddings are often padded beyond the vocabulary."""
    assert IncrementalDetokenizer(TOKENIZER).push([VOCAB_SIZE + 5, 3 + ord("a"), 10**6]) == "a"


def test_a_character_begun_by_the_prompt_is_finished_by_the_output() -> None:
    ids = TOKENIZER.encode(FAMILY, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(TOKENIZER, prompt_token_ids=ids[:1])
    assert stream(detokenizer, ids[1:], [1]) == FAMILY


sentencepiece_ids = st.lists(st.sampled_from([0, *range(BYTES_AT + 256, BYTES_AT + 261)]), max_size=12)


@examples
@given(ids=sentencepiece_ids, sizes=sizes)
def test_the_space_at_the_beginning_of_a_sentencepiece_text(ids: list[int], sizes: list[int]) -> None:
    assert stream(IncrementalDetokenizer(LLAMA2), ids, sizes) == LLAMA2_LIBRARY.decode(ids)
    assert stream(IncrementalDetokenizer(METASPACE), ids, sizes) == METASPACE_LIBRARY.decode(ids)


@examples
@given(text=st.text(max_size=20), sizes=sizes)
def test_byte_fallback_in_any_chunks(text: str, sizes: list[int]) -> None:  # B87
    ids = [0, BYTES_AT + 256, *(BYTES_AT + byte for byte in text.encode())]
    assert stream(IncrementalDetokenizer(LLAMA2), ids, sizes) == text
    assert LLAMA2_LIBRARY.decode(ids) == text


def test_an_output_keeps_the_space_after_its_prompt() -> None:
    a = BYTES_AT + 257
    assert IncrementalDetokenizer(LLAMA2).push([a, a]) == "a a"
    assert IncrementalDetokenizer(LLAMA2, prompt_token_ids=[0, a]).push([a, a]) == " a a"
    assert IncrementalDetokenizer(LLAMA2, prompt_token_ids=[0]).push([a, a]) == "a a"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Strip("x", 0, 1), None])
def test_other_decoders_are_refused_by_name(decoder: decoders.Decoder | None) -> None:
    spec = json.loads(FILES["tokenizer.json"])
    spec["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    with pytest.raises(UnsupportedTokenizer, match=r"WordPiece|Strip|without a decoder"):
        Tokenizer.from_files({"tokenizer.json": json.dumps(spec).encode()})
