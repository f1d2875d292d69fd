"""Reasoning and function calls in the text of an answer, whole and cut into pieces in every way."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from pdserve_text.output_parser import OutputParser
from pdserve_text.pieces import CallArguments, CallStart, Content, Reasoning
from pdserve_text.reasoning import REASONING_PARSERS, ReasoningParser, default_reasoning_parser
from pdserve_text.tool_parsers import TOOL_PARSERS, default_tool_parser, tool_parser

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "time": {},
}
Parsed = tuple[str, str, list[tuple[str, str, str]]]


def parse(
    parts: list[str], tools: str | None, reasoning: str | None = None, prompt_end: str = "", parallel: bool = True
) -> Parsed:
    """Content, reasoning, and (id, name, arguments) of each call."""
    numbers = count()
    parser = OutputParser(
        ReasoningParser(reasoning, prompt_end) if reasoning else None,
        tool_parser(tools)(TOOLS, lambda: f"id{next(numbers)}") if tools else None,
        parallel=parallel,
    )
    content = thought = ""
    calls: list[tuple[str, str, str]] = []
    for i, part in enumerate([*parts, ""]):
        for piece in parser.push(part, last=i == len(parts)):
            match piece:
                case Content(text):
                    content += text
                case Reasoning(text):
                    thought += text
                case CallStart(index, call_id, name):
                    assert index == len(calls)
                    calls.append((call_id, name, ""))
                case CallArguments(index, text):
                    assert index == len(calls) - 1
                    calls[index] = (*calls[index][:2], calls[index][2] + text)
    assert parser.called == bool(calls)
    return content, thought, calls


def calls_of(text: str, tools: str) -> tuple[str, list[tuple[str, Any]]]:
    content, _, calls = parse([text], tools)
    return content, [(name, json.loads(arguments)) for _, name, arguments in calls]


PARIS = ("weather", {"city": "Paris"})
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
QWEN_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
QWEN_TIME = "<tool_call>\n<function=time>\n</function>\n</tool_call>"
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", HERMES_CALL, "", [PARIS]),
    ("hermes", "Let me see.\n" + HERMES_CALL + "\n" + HERMES_CALL + "\n", "Let me see.", [PARIS, PARIS]),
    ("hermes", HERMES_CALL + " So.", "So.", [PARIS]),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", [("time", {})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}</tool_call>', "", [PARIS]),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": {"a": "}</tool_call>\\""}}',
        "",
        [("time", {"a": '}</tool_call>"'})],
    ),
    ("hermes", "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", []),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "weat', '<tool_call>{"name": "weat', []),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", "no call \n", "no call \n", []),
    ("hermes", "\n\n", "\n\n", []),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3_json", '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "time", "parameters": {}}',
        "",
        [PARIS, ("time", {})],
    ),
    ("llama3_json", '{"type": "function", "name": "time", "parameters": null}', "", [("time", {})]),
    ("llama3_json", '{"name": "Ada", "parameters": {"age": 3}}', '{"name": "Ada", "parameters": {"age": 3}}', []),
    ("llama3_json", '{"answer": 42, "name": "time"}', '{"answer": 42, "name": "time"}', []),
    ("llama3_json", '{"name": "tim', '{"name": "tim', []),
    ("llama3_json", "{}", "{}", []),
    ("llama3_json", "It is {late}.", "It is {late}.", []),
    ("llama3_json", "<|python", "<|python", []),
    ("llama3_json", '{"name": "time", "parameters": {}} Done.', "Done.", [("time", {})]),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": {}}]',
        "",
        [PARIS, ("time", {})],
    ),
    ("mistral", 'Sure. [TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "Sure.", [PARIS]),
    (
        "mistral",
        '[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{"city": "Paris"}[TOOL_CALLS]time{}',
        "",
        [PARIS, ("time", {})],
    ),
    ("mistral", "[TOOL_CALLS]what is this?", "[TOOL_CALLS]what is this?", []),
    ("mistral", "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("mistral", "[TOOL", "[TOOL", []),
    ("qwen3_coder", "Well.\n" + QWEN_CALL, "Well.", [("weather", {"city": "Paris", "days": 3})]),
    ("qwen3_coder", QWEN_CALL + "\n" + QWEN_CALL, "", [("weather", {"city": "Paris", "days": 3})] * 2),
    ("qwen3_coder", "<tool_call>\n<function=time>\n</function>\n</tool_call>", "", [("time", {})]),
    ("qwen3_coder", "<tool_call>\n<fun", "<tool_call>\n<fun", []),
    ("qwen3_coder", "<tool_call>x", "<tool_call>x", []),
    ("qwen3_coder", QWEN_CALL[:70], "", [("weather", {"city": "Paris"})]),
    # Text after a call keeps its spaces.
    ("hermes", HERMES_CALL + "\n Here you are:\n - one \n", "Here you are:\n - one \n", [PARIS]),
    ("qwen3_coder", QWEN_TIME + " Here you are.", "Here you are.", [("time", {})]),
    ("mistral", "[TOOL_CALLS]time{} Here you are.", "Here you are.", [("time", {})]),
    # A mark that closes a call may be missing.
    ("hermes", HERMES_CALL[:-13] + "\n" + HERMES_CALL, "", [PARIS, PARIS]),
    ("hermes", HERMES_CALL[:-13] + "\nHere you are.", "Here you are.", [PARIS]),
    ("hermes", HERMES_CALL[:-13] + "\nOne more. " + HERMES_CALL, "One more.", [PARIS, PARIS]),
    ("hermes", HERMES_CALL[:-14] + "\nHere you are.", "Here you are.", [PARIS]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {}, x', ", x", [("time", {})]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {}, "id": "a"}</tool_call>', "", [("time", {})]),
    ("hermes", '<tool_call>{"name": "time", "arguments": {}}}\n</tool_call> So.', "So.", [("time", {})]),
    ("hermes", HERMES_CALL[:-1], "", [PARIS]),
    ("mistral", '[TOOL_CALLS][{"name": "time", "arguments": {}, "id": "abcdefghi"}]', "", [("time", {})]),
    ("mistral", '[TOOL_CALLS][{"name": "time", "arguments": {}] Here you are.', "Here you are.", [("time", {})]),
    ("llama3_json", '{"name": "time", "parameters": {} Here you are.', "Here you are.", [("time", {})]),
    ("qwen3_coder", "<tool_call><function=time>" + QWEN_TIME, "", [("time", {}), ("time", {})]),
    ("qwen3_coder", "<tool_call><function=time></function>" + QWEN_TIME, "", [("time", {}), ("time", {})]),
    ("qwen3_coder", "<tool_call><function=time></tool_call>" + QWEN_TIME, "", [("time", {}), ("time", {})]),
    ("qwen3_coder", "<tool_call><function=time></function>\nHere you are.", "Here you are.", [("time", {})]),
    ("qwen3_coder", "<tool_call><function=time>\nHere you are.", "Here you are.", [("time", {})]),
    ("qwen3_coder", QWEN_CALL[:86], "<parameter=days>\n3", [("weather", {"city": "Paris"})]),
    # What follows that which was no call is read once, and as what it is.
    ("hermes", '<tool_call>{"type": 1}tail', '<tool_call>{"type": 1}tail', []),
    ("hermes", '<tool_call>{"x": 1}</tool_call> ' + HERMES_CALL, '<tool_call>{"x": 1}</tool_call>', [PARIS]),
    ("llama3_json", '{"name": "Ada", "parameters": {}} and so on', '{"name": "Ada", "parameters": {}} and so on', []),
    # A name is short, and half a character is none.
    ("hermes", f'<tool_call>{{"name": "{"a" * 256}", "arguments": {{}}}}', "", [("a" * 256, {})]),
    ("hermes", f'<tool_call>{{"name": "{"a" * 257}', f'<tool_call>{{"name": "{"a" * 257}', []),
    ("hermes", f'<tool_call>{{"id": 1, "name": "{"a" * 257}"}}', f'<tool_call>{{"id": 1, "name": "{"a" * 257}"}}', []),
    (
        "hermes",
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        [],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "time"}', "", [("time", {"a": "\ud800"})]),
    # So is the space around a mark.
    ("hermes", "a" + " " * 300 + HERMES_CALL, "a" + " " * 44, [PARIS]),
    ("hermes", "<tool_call>" + " " * 300 + "{}", "<tool_call>" + " " * 300 + "{}", []),
    ("llama3_json", " " * 300 + '{"name": "time"}', " " * 300 + '{"name": "time"}', []),
]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CASES)
def test_formats(tools: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    # B95: what only looked like a call is content when the answer ends.
    assert calls_of(text, tools) == (content, calls)


@pytest.mark.parametrize(("tools", "text"), [(case[0], case[1]) for case in CASES])
def test_a_cut_at_every_place_changes_nothing(tools: str, text: str) -> None:
    whole = parse([text], tools)
    assert parse(list(text), tools) == whole
    for cut in range(1, len(text), 1 + len(text) // 300):
        assert parse([text[:cut], text[cut:]], tools) == whole


OPENERS = {
    "hermes": [HERMES_CALL, HERMES_CALL[:-13], HERMES_CALL[:-12], '<tool_call>{"name": "time"}</tool_call>'],
    "qwen3_coder": [QWEN_CALL, QWEN_TIME, "<tool_call><function=time></function>", "<tool_call><function=time>"],
    "mistral": ["[TOOL_CALLS]time{}", '[TOOL_CALLS][{"name": "time", "arguments": {}}]'],
}
WORDS = st.text("ab ,.:\n", max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(OPENERS)), st.data())
def test_words_among_calls_stay_as_they_are(tools: str, data: st.DataObject) -> None:
    calls = st.sampled_from(OPENERS[tools])
    words = st.text("ab.:", min_size=1, max_size=3)
    texts = [words, WORDS, words]
    parts: list[str] = []
    expected, num_calls = "", data.draw(st.integers(0, 3))
    for i in range(num_calls + 1):
        said = "".join(data.draw(t) for t in texts)
        parts += [said, data.draw(calls) if i < num_calls else ""]
        expected += said
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pushed = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for one in ([text], pushed, list(text)):
        content, _, found = parse(one, tools)
        assert content == expected
        assert len(found) == num_calls


ENDLESS = ['<tool_call>{"name": "', '<tool_call>{"', "<tool_call>{", "<tool_call>", "<tool_call><function=f>", "x", ""]
ENDLESS += [
    "[TOOL_CALLS]",
    "[TOOL_CALLS][",
    '[TOOL_CALLS][{"name": "f", "arguments": {}',
    '{"name": "',
    "<|python_tag|>",
]


@pytest.mark.parametrize("tools", TOOL_PARSERS)
@pytest.mark.parametrize("piece", ["abcd", "    ", "\n\n\n\n", "<parameter=a>", ", , "])
def test_no_more_is_read_again_than_a_few_kilobytes(tools: str, piece: str) -> None:
    for reasoning in (None, "qwen3", "deepseek_r1"):
        for start in ENDLESS:
            thinking = ReasoningParser(reasoning) if reasoning else None
            parser = tool_parser(tools)(TOOLS)
            output = OutputParser(thinking, parser)
            for text in [start, *[piece] * 400]:
                output.push(text)
            assert len(parser._held) + len(parser._mark) < 1024
            assert thinking is None or len(thinking._held) < 1024


@pytest.mark.parametrize("tools", ["hermes", "mistral", "llama3_json"])
def test_a_name_that_does_not_end_is_content_while_it_grows(tools: str) -> None:
    start = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS][", "llama3_json": ""}[tools] + '{"name": "'
    for text in (start, start.replace("name", "x" * 1100), start.replace("{", "{" + " " * 1100)):
        parser = tool_parser(tools)(TOOLS)
        pieces = [piece for part in [text, *["abcd"] * 65] for piece in parser.push(part)]
        assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == text + "abcd" * 65


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[",
        "]",
        "{",
        "}",
        "{}",
        '"name"',
        '"time"',
        '"arguments"',
        "time",
        ":",
        ",",
        ";",
        "x",
        "é",
        "\\",
        '"',
        "<|python_tag|>",
        "<function=",
        ">",
        "<parameter=",
        "</parameter>",
        "</function>",
        '{"type": 1}',
        ', "id": 1}',
        "<think>",
        "</think>",
        " " * 300,
        "\n",
        " ",
        '{"name": "time", "arguments": {',
        '{"name": "time", "parameters": {}}',
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(FRAGMENTS, max_size=14),
    st.sampled_from([None, *TOOL_PARSERS]),
    st.sampled_from([None, *REASONING_PARSERS]),
    st.data(),
)
def test_streamed_is_plain_whatever_the_text(
    fragments: list[str], tools: str | None, reasoning: str | None, data: st.DataObject
) -> None:
    text = "".join(fragments)
    whole = parse([text], tools, reasoning)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(parts, tools, reasoning) == whole
    assert parse(list(text), tools, reasoning) == whole
    if tools is None and reasoning is None:
        assert whole == (text, "", [])
    if not whole[2] and reasoning is None:
        # Without a call nothing at all is lost.
        assert whole[0] == text


@pytest.mark.parametrize(
    ("name", "prompt_end", "text", "thought", "content"),
    [
        ("qwen3", "", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("qwen3", "", "\n<think>a\nb</think>c", "a\nb", "c"),
        ("qwen3", "", "Yes.", "", "Yes."),
        ("qwen3", "", "Yes <think> no", "", "Yes <think> no"),
        ("qwen3", "<think>\n", "hm\n</think>\n\nYes.", "hm", "Yes."),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("qwen3", "", "<think>hm", "hm", ""),
        ("qwen3", "", "<think>hm</thi", "hm</thi", ""),
        ("qwen3", "", "<thi", "", "<thi"),
        ("deepseek_r1", "", "hm</think>Yes.", "hm", "Yes."),
        ("deepseek_r1", "<think>\n", "hm", "hm", ""),
        ("deepseek_r1", "", "<think>hm</think>Yes </think>.", "hm", "Yes </think>."),
        ("deepseek_r1", "</think>\n", "Yes.", "", "Yes."),
        ("deepseek_r1", "", "<think></think>Yes.", "", "Yes."),
    ],
)
def test_reasoning(name: str, prompt_end: str, text: str, thought: str, content: str) -> None:
    for parts in ([text], list(text)):
        assert parse(parts, None, name, prompt_end) == (content, thought, [])


def test_a_call_within_reasoning_is_reasoning_and_one_after_it_a_call() -> None:
    text = f"<think>I could {HERMES_CALL}</think>\n\n{HERMES_CALL}"
    content, thought, calls = parse(list(text), "hermes", "qwen3")
    assert (content, thought) == ("", f"I could {HERMES_CALL}")
    assert [name for _, name, _ in calls] == ["weather"]


def test_one_call_where_parallel_ones_are_not_wanted() -> None:
    text = HERMES_CALL + HERMES_CALL.replace("Paris", "Rome") + "end"
    content, _, calls = parse(list(text), "hermes", parallel=False)
    assert content == "end"
    assert [arguments for _, _, arguments in calls] == ['{"city": "Paris"}']


def test_ids() -> None:
    for name, length in (("hermes", 29), ("mistral", 9)):
        parser = tool_parser(name)(TOOLS)
        text = HERMES_CALL if name == "hermes" else "[TOOL_CALLS]time{}[TOOL_CALLS]time{}"
        ids = {piece.id for piece in parser.push(text) if isinstance(piece, CallStart)}
        assert {len(i) for i in ids} == {length}
        assert all(i.replace("_", "").isalnum() for i in ids)


def test_defaults_are_taken_from_the_chat_template_where_it_is_plain() -> None:
    assert default_tool_parser("{% for tool in tools %}<tool_call>{{ x }}") == "hermes"
    assert default_tool_parser("tools <tool_call><function=") == "qwen3_coder"
    assert default_tool_parser("tools [TOOL_CALLS]") == "mistral"
    llama = 'tools {"name": function name, "parameters": dictionary of argument name and its value}'
    assert default_tool_parser(llama) == "llama3_json"
    assert default_tool_parser("<tool_call>") is None
    assert default_tool_parser("tools") is None
    assert default_reasoning_parser("x <think> </think>") == "qwen3"
    assert default_reasoning_parser("no thinking") is None
