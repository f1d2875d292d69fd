"""What an output must look like, as a request asks for it: a schema, an expression, a grammar, or calls of functions.

Whether the grammar itself is sound, the served model's TextModel says.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pdserve_protocol.sampling import Grammar
from pdserve_text.grammar import choice_source

from pdserve_router.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_router.openai_types import GenerationBody, ResponseFormat, StructuredOutputs

MAX_CHOICES_OF_TEXT = 1000
MAX_CALLS = 16
"""So many calls an answer that must call makes at most: a small model would not come to an end."""
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
RESPONSES_FORMAT = "text.format"
"""What ``response_format`` is called at the responses endpoint."""


def wanted_grammar(body: GenerationBody, format_param: str) -> tuple[str, Grammar] | None:
    """The field that asks for structure and the grammar; None where none does.

    Args:
        format_param: what ``response_format`` is called at this endpoint.

    Raises:
        BadRequest: two fields ask, or one asks for nothing.
    """
    asked: list[tuple[str, Grammar]] = []
    if body.response_format is not None and body.response_format.type != "text":
        asked.append((format_param, _of_format(body.response_format, format_param)))
    if body.structured_outputs is not None:
        asked.append(("structured_outputs", _of_structured_outputs(body.structured_outputs)))
    if len(asked) > 1:
        raise BadRequest("'structured_outputs' and 'response_format' are given; one is enough", "structured_outputs")
    if not asked:
        return None
    return asked[0]


def calls_grammar(functions: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> Grammar:
    """A JSON list of calls, ``{"name": ..., "arguments": {...}}``, of these functions; of one where not ``parallel``.

    Args:
        functions: schema of the arguments by name, at least one.
    """
    rules, calls = [], []
    for number, (name, schema) in enumerate(functions.items()):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        # A schema of its own for each, so that its references stay within it.
        text = json.dumps({**schema, "type": "object", "x-guidance": _STYLE}).replace("::=", "\\u003a:=")
        rules.append(f'call_{number}: {head} arguments_{number} "}}"\narguments_{number}: %json {text}')
        calls.append(f"call_{number}")
    more = f' (", " call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    lines = [f'start: "[" call{more} "]"', f"call: {' | '.join(calls)}", *rules]
    return Grammar(kind="grammar", source="\n".join(lines))


def _of_format(wanted: ResponseFormat, param: str) -> Grammar:
    if wanted.type == "json_object":
        return Grammar(kind="json_object")
    schema = wanted.json_schema.schema if wanted.json_schema is not None else None
    if schema is None:
        # The responses endpoint has the members of json_schema beside the type.
        missing = "json_schema" if wanted.json_schema is None else "json_schema.schema"
        missing = f"{param}.{'schema' if param == RESPONSES_FORMAT else missing}"
        raise BadRequest(f"'{missing}' is required", missing, "missing_required_parameter")
    return Grammar(kind="json_schema", source=json.dumps(schema))


def _of_structured_outputs(wanted: StructuredOutputs) -> Grammar:
    given: list[Grammar] = []
    if wanted.json is not None:
        source = wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json)
        given.append(Grammar(kind="json_schema", source=source))
    if wanted.json_object:
        given.append(Grammar(kind="json_object"))
    if wanted.regex is not None:
        given.append(Grammar(kind="regex", source=wanted.regex))
    if wanted.choice is not None:
        if not 1 <= len(wanted.choice) <= MAX_CHOICES_OF_TEXT or not all(wanted.choice):
            raise BadRequest(
                f"'structured_outputs.choice' takes 1 to {MAX_CHOICES_OF_TEXT} texts, none of them empty",
                "structured_outputs.choice",
            )
        given.append(Grammar(kind="choice", source=choice_source(wanted.choice)))
    if wanted.grammar is not None:
        given.append(Grammar(kind="grammar", source=wanted.grammar))
    if len(given) != 1:
        kinds = "json, json_object, regex, choice and grammar"
        raise BadRequest(f"'structured_outputs' takes exactly one of {kinds}", "structured_outputs")
    return given[0]
