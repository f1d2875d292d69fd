"""Outputs that must keep to a grammar, through the whole engine: they do, and whoever continues them knows where."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import jsonschema_rs
import pytest
from pdserve_engine.errors import BadRequest
from pdserve_engine.llm import LLM
from pdserve_protocol.requests import AddRequest
from pdserve_protocol.sampling import Grammar, SamplingParams
from support.models import tiny_model
from support.schemas import schemas

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return LLM(str(folder), dtype="float32", threads=1, kv_cache_memory=32 << 20)


def params(schema: dict[str, object], seed: int | None, **fields: object) -> SamplingParams:
    grammar = Grammar(kind="json_schema", source=json.dumps(schema))
    temperature = 0.0 if seed is None else 1.0
    return SamplingParams(max_tokens=400, temperature=temperature, seed=seed or 0, grammar=grammar, **fields)  # type: ignore[arg-type]


@pytest.mark.slow
def test_every_output_is_a_document_of_its_schema(llm: LLM) -> None:
    wanted = [
        (schema, seed)
        for number, schema in enumerate(schemas())
        for seed in ((None, number) if number % 4 == 0 else (number,))
    ]
    prompts = [[5, 6, 7, 8 + number % 90] for number in range(len(wanted))]
    made = llm.generate(prompts, [params(schema, seed) for schema, seed in wanted], use_tqdm=False)
    for (schema, _), generation in zip(wanted, made, strict=True):
        assert generation.finish_reason == "stop"
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(generation.text))


def test_a_forced_prefix_is_replayed_over_the_grammar(llm: LLM) -> None:
    """Whoever continues an output on another node begins in the middle of the document."""
    schema = schemas()[-20]
    sampling = params(schema, 7)
    (whole,) = llm.generate([[5, 6, 7]], [sampling], use_tqdm=False)
    core = llm.core
    half = whole.token_ids[: len(whole.token_ids) // 2]
    message = AddRequest(
        id="half", boot_id="", prompt_token_ids=[5, 6, 7], output_token_ids=list(half), sampling=sampling
    )
    request = core.add_request(message, 0.0)
    while core.scheduler.requests:
        core.step(lambda: 0.0)
    assert request.output_token_ids == list(whole.token_ids)


def test_min_tokens_does_not_keep_a_complete_document_from_its_end(llm: LLM) -> None:
    (made,) = llm.generate([[5, 6, 7]], [params({"const": "fixed"}, None, min_tokens=50)], use_tqdm=False)
    assert (made.text, made.finish_reason) == ('"fixed"', "stop")


def test_a_grammar_with_a_fault_is_refused_before_any_step(llm: LLM) -> None:
    with pytest.raises(BadRequest, match=r"grammar: .*objct"):
        llm.core.add_request(
            AddRequest(id="bad", boot_id="", prompt_token_ids=[5], sampling=params({"type": "objct"}, None)), 0.0
        )
    assert "bad" not in llm.core.scheduler.requests
