"""What is refused, with which field named; what the defaults are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pdserve_router.errors import BadRequest, ContextTooLong, NotSupported
from pdserve_router.nesting import MAX_NESTING
from pdserve_router.validate import check_token_ids, parse_chat, parse_completion, parse_responses, sampling_params

MESSAGES = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({"messages": MESSAGES} | fields).encode())


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"prompt": "hi"} | fields).encode())


def params(request: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"num_prompt_tokens": 10, "limit": 100, "vocab_size": 384, "defaults": {}}
    return sampling_params(request, **settings | options)


BAD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.5),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-310),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("seed", 1 << 63),
    ("seed", "lucky"),
    ("n", 0),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["x"] * 17),
    ("stop", 5),
    ("stop", "x" * 5000),
    ("stop_token_ids", ["x"]),
    ("stop_token_ids", list(range(300))),
    ("logit_bias", {str(i): 1 for i in range(2000)}),
    ("logit_bias", [1]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", 5),
    ("model", 5),
    ("cache_salt", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
@pytest.mark.parametrize("parse", [chat, completion])
def test_bad_values_are_refused_by_name(parse: Any, field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        parse(**{field: value})
    assert caught.value.param is not None
    assert caught.value.param.split(".")[0].split("[")[0] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {}),
        ("use_beam_search", True),
        ("reasoning_effort", "low"),
        ("prediction", {"type": "content", "content": "x"}),
        ("prompt_embeds", "AAAA"),
        ("length_penalty", 0.5),
        ("spaces_between_special_tokens", False),
        ("return_tokens_as_token_ids", True),
        ("logits_processors", ["f"]),
    ],
)
@pytest.mark.parametrize("parse", [chat, completion])
def test_fields_that_are_not_built_are_refused_by_name(parse: Any, field: str, value: Any) -> None:
    # B100: never dropped in silence.
    with pytest.raises(NotSupported, match=field) as caught:
        parse(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("audio", {}),
        ("modalities", ["audio"]),
        ("chat_template", "x"),
    ],
)
def test_chat_fields_that_are_not_built_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(NotSupported, match=field):
        chat(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("best_of", 2), ("suffix", "x")])
def test_completion_fields_that_are_not_built_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(NotSupported, match=field):
        completion(**{field: value, "logprobs": 1})


def test_values_that_ask_for_nothing_are_accepted() -> None:
    chat(n=1, tools=[], tool_choice="none", response_format={"type": "text"}, logprobs=False, echo=False, stop=None)
    completion(best_of=1, echo=False, suffix=None, n=1)
    chat(parallel_tool_calls=True, length_penalty=1, reasoning_effort=None, logits_processors=[])
    # B105: not ours, whatever it holds.
    for evil in ({"do_remote_prefill": True, "remote_host": "evil", "remote_block_ids": [0, 1]}, "x", 5, None):
        completion(kv_transfer_params=evil, some_future_field=[1], user="me", store=True)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "boss", "content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": "tool"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([*MESSAGES, {"role": "user", "content": [{"type": "text"}]}], "messages[1].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{"}}]}], ARGUMENTS),
        ([{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[]"}}]}], ARGUMENTS),
        (MESSAGES * 2049, "messages"),
        ([{"role": "user", "content": []}] * 2049, "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}] * 1024}] * 2, "messages"),
    ],
)
def test_bad_messages_are_refused_by_place(messages: Any, param: str) -> None:
    # B18: an image, which this server cannot see, is not left out in silence. B108: nor are there messages without end.
    with pytest.raises(BadRequest) as caught:
        chat(messages=messages)
    assert caught.value.param == param


def test_text_parts_and_newer_roles_work() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    expected = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    assert request.prompts[0].messages == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        ([[1], [2, "a"]], "prompt[1][1]"),
        (["a"] * 257, "prompt"),
        ([1, "a"], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
    ],
)
def test_bad_prompts_are_refused_by_place(prompt: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_prompts(prompt: Any, taken: Any) -> None:
    # B77
    assert completion(prompt=prompt).prompts == taken


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"5", b"null", b'"x"', b"{'a': 1}", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"\x00"],
)
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_bodies_that_are_not_json_objects(parse: Any, data: bytes) -> None:
    with pytest.raises(BadRequest):
        parse(data)


@pytest.mark.parametrize(
    "data", [b'{"prompt":' + b"[" * 200_000, b'{"x":' + b"[" * 200_000, b'{"x":' + b'{"y":' * 200_000]
)
def test_deep_bodies(data: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_completion(data)


def nested(depth: int, leaf: str = "{}") -> str:
    return '{"a":' * depth + leaf + "}" * depth


NESTED = {
    "tools": (parse_chat, '"messages":[%s],"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]'),
    "chat_template_kwargs": (parse_chat, '"messages":[%s],"chat_template_kwargs":%s'),
    "response_format.json_schema.schema": (
        parse_chat,
        '"messages":[%s],"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":%s}}',
    ),
    "structured_outputs.json": (parse_chat, '"messages":[%s],"structured_outputs":{"json":%s}'),
    "tools[0]": (parse_responses, '"input":[%s],"tools":[{"type":"function","name":"f","parameters":%s}]'),
    "text.format.schema": (
        parse_responses,
        '"input":[%s],"text":{"format":{"type":"json_schema","name":"a","schema":%s}}',
    ),
}


@pytest.mark.parametrize("param", NESTED)
def test_deep_values_are_refused_by_name(param: str) -> None:
    # B108: nothing that is taken is too deep for what comes later.
    parse, fields = NESTED[param]

    def parsed(depth: int) -> None:
        parse(("{" + fields % (json.dumps(MESSAGES[0]), nested(depth)) + "}").encode())

    parsed(MAX_NESTING - 1)
    for depth in (MAX_NESTING, 400, *range(930, 1000)):
        with pytest.raises(BadRequest, match="nested too deeply") as caught:
            parsed(depth)
        # Near Python's own limit the body cannot be read at all, and no field is known.
        assert (caught.value.param or param).startswith(param) or depth >= 930


def test_deep_arguments_are_refused_by_place() -> None:
    for depth in (MAX_NESTING, *range(930, 1000)):
        call = CALL | {"function": {"name": "f", "arguments": nested(depth)}}
        with pytest.raises(BadRequest, match="nested too deeply") as caught:
            chat(messages=[{"role": "assistant", "tool_calls": [call]}])
        assert caught.value.param == ARGUMENTS


def test_nan_may_be_deep() -> None:
    for depth in range(300, 1000, 10):
        with pytest.raises(BadRequest, match=r"'zz' is not a finite number|not valid JSON|nested too deeply"):
            parse_completion(b'{"prompt":"x","zz":' + b"[" * depth + b"NaN" + b"]" * depth + b"}")
    with pytest.raises(BadRequest, match="'zz' is not a finite number"):
        parse_completion(b'{"prompt":"x","zz":[{"a":[NaN]}]}')


@pytest.mark.parametrize(("parse", "harmless"), [(chat, False), (completion, True)])
def test_special_tokens_are_added_as_the_endpoint_does(parse: Any, harmless: bool) -> None:
    parse(add_special_tokens=harmless)
    with pytest.raises(NotSupported, match="add_special_tokens"):
        parse(add_special_tokens=not harmless)


def test_logprobs_of_both_endpoints() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert completion(logprobs=0).logprobs == 0
    for bad in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 5}):
        with pytest.raises(BadRequest, match="logprobs"):
            chat(**bad)
    for bad_count in (-1, 21, True):
        with pytest.raises(BadRequest, match="logprobs"):
            completion(logprobs=bad_count)


def test_max_tokens_and_its_defaults() -> None:
    # B75
    assert params(chat()).max_tokens == 90
    assert params(completion()).max_tokens == 16
    assert params(completion(), num_prompt_tokens=95).max_tokens == 5
    assert params(chat(max_completion_tokens=7)).max_tokens == 7
    assert params(chat(max_tokens=9, max_completion_tokens=7)).max_tokens == 7
    assert params(chat(max_tokens=9)).max_tokens == 9
    with pytest.raises(BadRequest, match="max_completion_tokens"):
        chat(max_completion_tokens=0)


def test_too_long() -> None:
    # B44: what can never fit is refused at once, with the counts.
    for fields, options in (
        ({"max_tokens": 91}, {}),
        ({}, {"num_prompt_tokens": 100}),
        ({}, {"num_prompt_tokens": 5000}),
        ({"max_tokens": 10**9}, {}),
    ):
        for parse in (chat, completion):
            with pytest.raises(ContextTooLong, match="100 tokens") as caught:
                params(parse(**fields), **options)
            assert caught.value.code == "context_length_exceeded"
    assert params(completion(max_tokens=90)).max_tokens == 90


def test_min_tokens() -> None:
    # B74
    assert params(completion(min_tokens=10, max_tokens=50)).min_tokens == 10
    assert params(completion(min_tokens=50, max_tokens=50)).min_tokens == 50
    assert params(completion(min_tokens=0)).min_tokens == 0
    with pytest.raises(BadRequest, match="min_tokens"):
        params(completion(min_tokens=17))


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [384]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [10**30]},
        {"logit_bias": {"384": 1}},
        {"logit_bias": {"AI": -100}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"5": 101}},
        {"logit_bias": {"1" * 5000: 1}},
        {"logit_bias": {"": 1}},
        {"logit_bias": {"٣": 1}},
        {"stop_token_ids": [10**6]},
        {"logit_bias": {"999999": 5}},
    ],
)
def test_token_ids_outside_the_vocabulary(fields: dict[str, Any]) -> None:
    # B64
    with pytest.raises(BadRequest) as caught:
        params(completion(min_tokens=5, **fields))
    assert caught.value.param is not None
    assert caught.value.param.split("[")[0] == next(iter(fields))


def test_prompt_ids_outside_the_vocabulary() -> None:
    check_token_ids([0, 383], 384)
    for bad in ([0, 384], [-1], [10**30]):
        with pytest.raises(BadRequest, match="prompt"):
            check_token_ids(bad, 384)


def test_defaults_come_from_the_model_and_the_client_overrides_them() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    sampling = params(completion(), defaults=defaults)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 40)
    assert sampling.repetition_penalty == 1.1
    sampling = params(completion(temperature=0, top_k=-1, top_p=1), defaults=defaults)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 1, 0)
    plain = params(completion())
    assert (plain.temperature, plain.top_p, plain.top_k, plain.repetition_penalty) == (1, 1, 0, 1)


def test_everything_else_is_passed_on() -> None:
    request = completion(
        presence_penalty=2,
        frequency_penalty=-1,
        ignore_eos=True,
        logit_bias={"5": -100},
        stop_token_ids=[7, 7, 8],
        seed=-3,
    )
    sampling = params(request)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.ignore_eos) == (2, -1, True)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({5: -100}, (7, 8))
    assert sampling.seed == params(request).seed >= 0


def test_a_seed_is_drawn_where_there_is_none() -> None:
    assert len({params(completion()).seed for _ in range(20)}) == 20
