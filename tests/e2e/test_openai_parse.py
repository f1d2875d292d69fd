"""The official client's documented examples of structured output, over real nodes whose model knows nothing."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import openai
import pytest
from pydantic import BaseModel, Field
from support.cluster import Cluster
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

Word = Annotated[str, Field(max_length=12)]
QUESTION: Any = [
    {"role": "system", "content": "Extract the event."},
    {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
]


class CalendarEvent(BaseModel):
    name: Word
    date: Word
    participants: Annotated[list[Word], Field(max_length=3)]


class Step(BaseModel):
    explanation: Word
    output: Word


class MathReasoning(BaseModel):
    steps: Annotated[list[Step], Field(min_length=1, max_length=2)]
    final_answer: Word


class Operator(StrEnum):
    eq = "="
    gt = ">"


class Condition(BaseModel):
    column: Word
    operator: Operator
    value: Word | Annotated[int, Field(ge=0, le=99)] | None


class Query(BaseModel):
    """Runs a query."""

    table: Operator
    conditions: Annotated[list[Condition], Field(max_length=2)]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("parse")
    model = str(tiny_model(folder / "tiny"))
    args = ["--dtype", "float32", "--kv-cache-memory", "16MiB"]
    with (
        Cluster(model=model, folder=folder, node_args=args) as cluster,
        openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.port}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


@pytest.mark.parametrize("wanted", [CalendarEvent, MathReasoning, Query])
def test_chat_parse(client: openai.OpenAI, model: str, wanted: type[BaseModel]) -> None:
    chat = client.chat.completions.parse(model=model, messages=QUESTION, response_format=wanted, temperature=0)
    assert chat.choices[0].finish_reason == "stop"
    assert isinstance(chat.choices[0].message.parsed, wanted)


def test_an_answer_that_is_cut_off_is_not_parsed(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=model, messages=QUESTION, response_format=CalendarEvent, max_tokens=5)


def test_chat_stream(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=QUESTION, response_format=MathReasoning, temperature=0, logprobs=True
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    parsed = final.choices[0].message.parsed
    assert isinstance(parsed, MathReasoning)
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(deltas) == final.choices[0].message.content
    assert [event.parsed for event in events if event.type == "content.done"] == [parsed]
    assert any(event.type == "logprobs.content.delta" for event in events)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Query"}}])
def test_functions_of_models(client: openai.OpenAI, model: str, choice: Any) -> None:
    tools = [openai.pydantic_function_tool(Query), openai.pydantic_function_tool(Step, name="step")]
    chat = client.chat.completions.parse(
        model=model, messages=QUESTION, tools=tools, tool_choice=choice, parallel_tool_calls=False, temperature=0
    )
    assert chat.choices[0].finish_reason == "tool_calls"
    assert chat.choices[0].message.tool_calls is not None
    (call,) = chat.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, {"Query": Query, "step": Step}[call.function.name])
    with client.chat.completions.stream(
        model=model, messages=QUESTION, tools=tools, tool_choice=choice, parallel_tool_calls=False, temperature=0
    ) as stream:
        (done,) = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert done.parsed_arguments == call.function.parsed_arguments


def test_responses_parse(client: openai.OpenAI, model: str) -> None:
    response = client.responses.parse(model=model, input=QUESTION, text_format=CalendarEvent, temperature=0)
    assert isinstance(response.output_parsed, CalendarEvent)
    with client.responses.stream(model=model, input=QUESTION, text_format=CalendarEvent, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_parsed == response.output_parsed
    assert "".join(deltas) == final.output_text


def test_responses_with_functions_of_models(client: openai.OpenAI, model: str) -> None:
    tools: Any = [openai.pydantic_function_tool(Query)]
    response = client.responses.parse(
        model=model, input=QUESTION, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    (call,) = response.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Query)
