"""The tokenizer and the files it is made from."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings, strategies as st
from pdserve_text.errors import NotUnicode, TokenizerFilesError
from pdserve_text.files import end_token_ids, load_tokenizer_files, tokenizer_id
from pdserve_text.tokenizer import Tokenizer
from support.tokenizers import BOS_ID, END_OF_TEXT_ID, EOS_ID, SPECIAL_TOKENS, tiny_tokenizer_files, write_tokenizer
from tokenizers import AddedToken, Tokenizer as LibraryTokenizer, models, normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FILES = tiny_tokenizer_files()
TOKENIZER = Tokenizer.from_files(FILES)


def with_json(name: str, **values: object) -> dict[str, bytes]:
    """FILES with these keys of a JSON file replaced."""
    return {**FILES, name: json.dumps({**json.loads(FILES.get(name, b"{}")), **values}).encode()}


def with_bos() -> dict[str, bytes]:
    """FILES whose tokenizer.json adds bos to a plain text, as Llama's does."""
    backend = LibraryTokenizer.from_buffer(FILES["tokenizer.json"])
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", BOS_ID)]
    )
    return {**FILES, "tokenizer.json": backend.to_str().encode()}


@pytest.mark.parametrize("vocab_size", [259, 384, 1024])
def test_facts(vocab_size: int) -> None:
    tokenizer = Tokenizer.from_files(tiny_tokenizer_files(vocab_size))
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.table.special_ids == {END_OF_TEXT_ID, BOS_ID, EOS_ID}
    assert tokenizer.end_token_ids == {EOS_ID}
    assert tokenizer.generation_defaults == {}


def test_text_survives_the_round_trip() -> None:
    text = "the question: 東京 \U0001f468\u200d\U0001f469 café\n\n  end"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode()


def test_special_tokens_written_out_become_their_ids() -> None:  # B27
    ids = TOKENIZER.encode("a<|im_end|>b", add_special_tokens=True)
    assert ids == [3 + ord("a"), EOS_ID, 3 + ord("b")]
    assert TOKENIZER.decode(ids) == "ab"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_bos_is_added_where_tokenizer_json_says_so_and_only_on_request() -> None:
    tokenizer = Tokenizer.from_files(with_bos())
    assert tokenizer.encode("a", add_special_tokens=True) == [BOS_ID, 3 + ord("a")]
    assert tokenizer.encode("a", add_special_tokens=False) == [3 + ord("a")]
    assert tokenizer.encode("", add_special_tokens=True) == [BOS_ID]
    assert TOKENIZER.encode("a", add_special_tokens=True) == [3 + ord("a")]


def test_truncation_and_padding_of_tokenizer_json_are_off() -> None:
    backend = LibraryTokenizer.from_buffer(FILES["tokenizer.json"])
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_files({**FILES, "tokenizer.json": backend.to_str().encode()})
    assert len(tokenizer.encode("abcde", add_special_tokens=True)) == 5


def test_half_a_surrogate_pair_is_refused_with_its_place() -> None:
    with pytest.raises(NotUnicode, match="character 2"):
        TOKENIZER.encode("ab\ud83d", add_special_tokens=True)


@settings(deadline=None)
@given(text=st.text(max_size=60) | st.lists(st.sampled_from([*SPECIAL_TOKENS, "the", " ", "é"])).map("".join))
def test_no_text_has_fewer_tokens_than_it_is_said_to_have_at_least(text: str) -> None:
    assert TOKENIZER.fewest_tokens(text) <= len(TOKENIZER.encode(text, add_special_tokens=False))


def test_fewest_tokens() -> None:
    assert TOKENIZER.fewest_tokens("") == 0
    assert TOKENIZER.fewest_tokens("<|endoftext|>" * 1000) == 1000, "the longest token there is"
    assert TOKENIZER.fewest_tokens("\ud83d") == 1, "what is no text is refused when it is encoded"
    backend = LibraryTokenizer.from_buffer(FILES["tokenizer.json"])
    vocab = backend.get_vocab(with_added_tokens=False)
    del vocab["z"]
    backend.model = models.BPE(vocab, [])
    tokenizer = Tokenizer.from_files({**FILES, "tokenizer.json": backend.to_str().encode()})
    text = "z" * 1000
    assert tokenizer.encode(text, add_special_tokens=False) == []
    assert tokenizer.fewest_tokens(text) == 0


def _normalizes(backend: LibraryTokenizer) -> None:
    backend.normalizer = normalizers.NFC()


def _drops(backend: LibraryTokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _splits_at_spaces(backend: LibraryTokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def _strips(backend: LibraryTokenizer) -> None:
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])


@pytest.mark.parametrize("change", [_normalizes, _drops, _splits_at_spaces, _strips])
def test_there_is_no_guess_where_text_may_vanish(change: Callable[[LibraryTokenizer], None]) -> None:
    backend = LibraryTokenizer.from_buffer(FILES["tokenizer.json"])
    change(backend)
    tokenizer = Tokenizer.from_files({**FILES, "tokenizer.json": backend.to_str().encode()})
    assert tokenizer.fewest_tokens("x" * 1000) == 0


@pytest.mark.slow
def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    # B108
    done = threading.Event()

    def encode() -> None:
        TOKENIZER.encode("x " * (1 << 19), add_special_tokens=False)
        done.set()

    start = last = time.monotonic()
    longest = 0.0
    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    thread.join()
    assert max(longest, time.monotonic() - last) < (time.monotonic() - start) / 3


def test_token_bytes_for_logprobs() -> None:
    assert TOKENIZER.token_bytes(EOS_ID) == b"<|im_end|>"
    assert TOKENIZER.token_bytes(3 + 0xF0) == b"\xf0"
    assert TOKENIZER.token_bytes(10**6) == TOKENIZER.token_bytes(-1) == b""


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("generation_config.json", [EOS_ID, END_OF_TEXT_ID], {EOS_ID, END_OF_TEXT_ID}),
        ("generation_config.json", 7, {7, EOS_ID}),
        ("generation_config.json", None, {EOS_ID}),
        ("config.json", 9, {9, EOS_ID}),
        ("config.json", [9, 8], {9, 8, EOS_ID}),
    ],
)
def test_every_end_id_counts(name: str, value: object, expected: set[int]) -> None:
    assert Tokenizer.from_files(with_json(name, eos_token_id=value)).end_token_ids == expected


def test_the_end_token_of_the_tokenizer_config_counts() -> None:
    files = with_json("tokenizer_config.json", eos_token={"content": "<|endoftext|>", "special": True})
    del files["generation_config.json"]
    assert Tokenizer.from_files(files).end_token_ids == {END_OF_TEXT_ID}
    del files["tokenizer_config.json"]
    assert Tokenizer.from_files(files).end_token_ids == frozenset()


@pytest.mark.parametrize("vocab", [{"a": 0, "</s>": 1}, [["a", -1.0], ["</s>", -2.0]]])
def test_the_end_token_may_be_an_ordinary_one(vocab: object) -> None:
    files = {
        "tokenizer.json": json.dumps({"added_tokens": [], "model": {"vocab": vocab}}).encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "</s>"}).encode(),
    }
    assert end_token_ids(files) == {1}


def test_sampling_defaults_come_from_the_generation_config() -> None:
    stated = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    files = tiny_tokenizer_files(do_sample=False, min_p=None, max_new_tokens=99, **stated)
    assert Tokenizer.from_files(files).generation_defaults == stated


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("generation_config.json", {"temperature": "hot"}, "temperature is not a number"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id is not a token id"),
        ("tokenizer_config.json", {"eos_token": 2}, "eos_token is not a text"),
    ],
)
def test_wrong_values_name_file_and_key(name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerFilesError, match=f"{name}: {message}"):
        Tokenizer.from_files(with_json(name, **values))


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "not JSON"), (b"[]", "object is expected"), (b"{}", "tokenizer.json: ")]
)
def test_a_damaged_tokenizer_json_is_a_clear_error(content: bytes, message: str) -> None:
    with pytest.raises(TokenizerFilesError, match=message):
        Tokenizer.from_files({"tokenizer.json": content})


def test_files_come_from_a_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "eos_token_id": 5, "bos_token_id": None}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    files = load_tokenizer_files(tmp_path)
    assert sorted(files) == sorted([*FILES, "config.json", "chat_template.jinja"])
    assert json.loads(files["config.json"]) == {"eos_token_id": 5}
    assert {name: files[name] for name in FILES} == FILES


def test_a_folder_without_tokenizer_json_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerFilesError, match=r"tokenizer\.json: not found in .*tokenizer\.model alone"):
        load_tokenizer_files(tmp_path)
    with pytest.raises(TokenizerFilesError, match="missing"):
        Tokenizer.from_files({})


def test_identity_is_of_contents_not_of_order() -> None:
    assert tokenizer_id(dict(reversed(FILES.items()))) == tokenizer_id(FILES) == TOKENIZER.id
    assert tokenizer_id({"a": b"bc"}) != tokenizer_id({"ab": b"c"})
    assert tokenizer_id(with_json("generation_config.json", temperature=0.5)) != TOKENIZER.id


def test_the_tiny_tokenizer_refuses_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="below"):
        tiny_tokenizer_files(len(SPECIAL_TOKENS) + 255)
