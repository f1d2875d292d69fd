"""Chat templates render as transformers renders them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
from pdserve_text.chat_template import ChatTemplate, normalize_messages
from pdserve_text.errors import ChatTemplateError, NoChatTemplate, TokenizerFilesError, UnsupportedContent
from support.tokenizers import tiny_tokenizer_files, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **variables)


def from_config(chat_template: object) -> ChatTemplate:
    return ChatTemplate.from_files({"tokenizer_config.json": json.dumps({"chat_template": chat_template}).encode()})


def test_chatml() -> None:
    template = ChatTemplate.from_files(tiny_tokenizer_files())
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    assert template.render(messages) == expected + "<|im_start|>assistant\n"
    assert template.render(messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}", "<s>Hello</s>"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ {'a': '<b> & é'} | tojson }}", '{"a": "<b> & é"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_what_templates_expect_of_their_environment(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_date_is_the_given_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2031, 5, 4))
    assert template.render(HELLO) == "04 May 2031"


def test_further_variables_reach_the_template() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}", False),
        ("{{ messages[0].content }}{% if tools %}tools{% endif %}", False),
        ("{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}", True),
        ("{% if tools and messages[-1].role == 'user' %}{{ tools | tojson }}{% endif %}", True),
        # Each request says it.
        ("{{ raise_exception('a system message first') }}", True),
        (None, True),
    ],
)
def test_whether_a_template_knows_tools(source: str | None, expected: bool) -> None:
    assert ChatTemplate(source, {}).knows_tools is expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[5].content.x }}", "has no element 5"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_fails_says_why(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


def test_no_template_is_a_clear_error() -> None:
    with pytest.raises(NoChatTemplate, match="no chat template; use the completions endpoint"):
        ChatTemplate.from_files({}).render(HELLO)
    with pytest.raises(NoChatTemplate, match=r"none named default among \['rag'\]"):
        from_config([{"name": "rag", "template": "x"}]).render(HELLO)


def test_where_the_template_is_found() -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert from_config(named).render(HELLO) == "plain"
    files = {"tokenizer_config.json": b'{"chat_template": "config"}', "chat_template.jinja": b"file"}
    assert ChatTemplate.from_files(files).render(HELLO) == "file"


@pytest.mark.parametrize("value", [7, ["x"], [{"name": "default"}]])
def test_a_template_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(TokenizerFilesError, match="neither a text nor a list"):
        from_config(value)


def test_content_becomes_a_text() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "name": "Ann"},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "user", "content": []},
    ]
    normal = normalize_messages(messages)
    assert [message["content"] for message in normal] == ["Hello", "", "", ""]
    assert normal[0]["name"] == "Ann"
    assert messages[1]["content"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], r"messages\[1\]\.content: parts of type 'image_url'"),
        ([{"type": "text"}], "needs a 'text'"),
        (["plain"], "needs a 'type'"),
        (7, "not int"),
    ],
)
def test_content_that_is_not_text_is_refused_by_name(content: object, message: str) -> None:
    with pytest.raises(UnsupportedContent, match=message) as caught:
        normalize_messages([*HELLO, {"role": "user", "content": content}])
    assert caught.value.index == 1


@pytest.mark.slow
def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from pdserve_text.tokenizer import Tokenizer
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    files = tiny_tokenizer_files()
    messages = [{"role": "user", "content": "What is <|im_end|> in 東京?\n"}, {"role": "assistant", "content": " it"}]
    text = ChatTemplate.from_files(files).render(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.from_files(files).encode(text, add_special_tokens=False) == theirs.encode(
        text, add_special_tokens=False
    )
