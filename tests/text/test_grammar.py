"""Grammars: what is refused, and that an output which keeps to the masks keeps to the grammar."""

from __future__ import annotations

import json
import random
import re

import pytest
from pdserve_text.errors import BadGrammar, TokenizerFilesError
from pdserve_text.grammar import GrammarCompiler, GrammarMatcher, choice_source
from pdserve_text.tokenizer import Tokenizer
from support.tokenizers import END_OF_TEXT_ID, EOS_ID, tiny_tokenizer_files

FILES = tiny_tokenizer_files()
TOKENIZER = Tokenizer.from_files(FILES)
VOCAB_SIZE = TOKENIZER.vocab_size + 40
ENDS = {END_OF_TEXT_ID, EOS_ID}
COMPILER = GrammarCompiler(FILES, ENDS, VOCAB_SIZE)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "béta", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def allowed(matcher: GrammarMatcher) -> list[int]:
    mask = matcher.mask()
    return [i for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1]


def walk(matcher: GrammarMatcher, rng: random.Random) -> list[int]:
    """A random output that keeps to the masks, without its end id."""
    token_ids: list[int] = []
    for _ in range(400):
        token_id = rng.choice(allowed(matcher))
        assert matcher.append(token_id)
        if token_id in ENDS:
            return token_ids
        token_ids.append(token_id)
    raise AssertionError(f"no end: {TOKENIZER.decode(token_ids)!r}")


@pytest.mark.parametrize("seed", range(8))
def test_an_output_that_keeps_to_the_masks_keeps_to_the_schema(seed: int) -> None:
    token_ids = walk(COMPILER.matcher("json_schema", json.dumps(PERSON)), random.Random(seed))
    value = json.loads(TOKENIZER.decode(token_ids))
    assert list(value) == ["name", "age", "tags"]
    assert len(value["name"]) <= 8
    assert 0 <= value["age"] <= 150
    assert len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"a", "béta", "c"}


@pytest.mark.parametrize("seed", range(4))
def test_regular_expressions_choices_and_grammars(seed: int) -> None:
    def text(kind: str, source: str) -> str:
        return TOKENIZER.decode(walk(COMPILER.matcher(kind, source), random.Random(seed)))  # type: ignore[arg-type]

    assert re.fullmatch(r"[0-9]{3}-[a-z]{1,5}", text("regex", r"[0-9]{3}-[a-z]{1,5}"))
    assert text("choice", choice_source(['say "yes"', "no", "東京"])) in {'say "yes"', "no", "東京"}
    assert re.fullmatch("a{1,2}|b", text("grammar", 'start: "a" "a"? | "b"'))
    assert text("grammar", 'root ::= "x" | "y" "z"') in {"x", "yz"}


def test_an_end_is_allowed_only_where_the_grammar_may_end() -> None:
    matcher = COMPILER.matcher("regex", "ab")
    for character in "ab":
        assert not ENDS & set(allowed(matcher))
        assert not matcher.is_complete
        assert matcher.append(TOKENIZER.encode(character, add_special_tokens=False)[0])
    assert set(allowed(matcher)) == ENDS
    assert matcher.is_complete


def test_a_token_that_is_not_allowed_is_refused_and_ids_without_a_text_are_never_allowed() -> None:
    matcher = COMPILER.matcher("json_object", "")
    assert max(allowed(matcher)) < TOKENIZER.vocab_size
    assert not matcher.append(TOKENIZER.encode("x", add_special_tokens=False)[0])
    assert not matcher.append(TOKENIZER.encode("{", add_special_tokens=False)[0])


def test_matchers_of_one_grammar_do_not_share_their_place() -> None:
    first, second = COMPILER.matcher("regex", "ab"), COMPILER.matcher("regex", "ab")
    before = second.mask()
    assert first.append(TOKENIZER.encode("a", add_special_tokens=False)[0])
    assert second.mask() == before != first.mask()


@pytest.mark.parametrize(
    ("kind", "source", "named"),
    [
        ("json_schema", '{"type": "objct"}', "objct"),
        ("json_schema", "[1", "EOF"),
        ("json_schema", '{"$ref": "#/nowhere"}', "/nowhere"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ("json_schema", '{"a":' * 3000 + "1" + "}" * 3000, "recursion"),
        ("regex", "a(b", "unclosed"),
        ("choice", "[1]", "Expected"),
        ("grammar", "start: missing", "missing"),
    ],
)
def test_a_grammar_with_a_fault_is_refused_in_one_line(kind: str, source: str, named: str) -> None:
    with pytest.raises(BadGrammar, match=named) as caught:
        COMPILER.check(kind, source)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_without_an_end_id_or_a_readable_tokenizer_there_are_no_grammars() -> None:
    with pytest.raises(TokenizerFilesError, match="end id"):
        GrammarCompiler(FILES, [])
    with pytest.raises(TokenizerFilesError, match="no grammars"):
        GrammarCompiler({**FILES, "tokenizer.json": b"{}"}, ENDS)
