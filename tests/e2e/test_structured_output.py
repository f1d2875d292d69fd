"""Structured output over a prefill and a decode node: documents of a hundred schemas, the same as on one node."""

from __future__ import annotations

import concurrent.futures
import json
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest
from support.cluster import Cluster
from support.models import tiny_model
from support.schemas import schemas

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ARGS = ["--dtype", "float32", "--kv-cache-memory", "32MiB"]
CONCURRENCY = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(model=model, folder=tmp_path_factory.mktemp("pair"), node_args=ARGS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(model=model, folder=tmp_path_factory.mktemp("alone"), node_args=ARGS, num_prefill=0) as cluster:
        yield cluster


def bodies() -> list[dict[str, Any]]:
    """Every schema, greedy and seeded."""
    made = []
    for number, schema in enumerate(schemas()):
        response_format = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        body = {"prompt": [5, 6, 7, 8 + number], "max_tokens": 400, "response_format": response_format}
        made += [body | {"temperature": 0}, body | {"temperature": 1, "seed": number}]
    return made


def answers(cluster: Cluster, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as threads:
        made = list(threads.map(lambda body: cluster.post("/v1/completions", body), asked))
    assert {status for status, _ in made} == {200}
    return [answer for _, answer in made]


def test_documents_of_a_hundred_schemas_are_valid_and_the_same_on_two_nodes_as_on_one(
    pair: Cluster, alone: Cluster
) -> None:
    asked = bodies()
    apart, together = answers(pair, asked), answers(alone, asked)
    for body, answer, other in zip(asked, apart, together, strict=True):
        choice = answer["choices"][0]
        schema = body["response_format"]["json_schema"]["schema"]
        assert choice["finish_reason"] == "stop"
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(choice["text"]))
        assert choice["text"] == other["choices"][0]["text"]
        assert answer["pdserve"]["tokens_recomputed"] == 0
    pair.wait_until_idle()


def test_streamed_is_plain(pair: Cluster) -> None:
    for body in bodies()[::31]:
        plain = pair.post("/v1/completions", body)[1]["choices"][0]["text"]
        events = list(pair.stream("/v1/completions", body))
        assert "".join(choice["text"] for event in events for choice in event["choices"]) == plain


def test_a_call_that_must_be_made_is_made(pair: Cluster) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
                  "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "Rain?"}], "tools": [tool], "max_tokens": 400, "temperature": 0,
            "parallel_tool_calls": False}  # fmt: skip
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        _, answer = pair.post("/v1/chat/completions", body | {"tool_choice": choice})
        calls = answer["choices"][0]["message"]["tool_calls"]
        assert calls
        for call in calls:
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["city"] in {"Oslo", "Rome"}
