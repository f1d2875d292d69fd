"""What an output must look like, as a request asks for it: a schema, an expression, a grammar, or calls of functions.

Whether the grammar itself is sound, the served model's TextModel says.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from pdserve_protocol.sampling import Grammar
from pdserve_text.grammar import choice_source
from pdserve_text.reasoning import CLOSE, OPEN

from pdserve_router.errors import BadRequest
from pdserve_router.nesting import check_nesting

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
        BadRequest: two fields ask, one asks for nothing, or a schema is nested too deeply.
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
        rule = _json_rule({**schema, "type": "object"})
        rules.append(f'call_{number}: {head} arguments_{number} "}}"\narguments_{number}: {rule}')
        calls.append(f"call_{number}")
    more = f' (", " call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    lines = [f'start: "[" call{more} "]"', f"call: {' | '.join(calls)}", *rules]
    return Grammar(kind="grammar", source="\n".join(lines))


def after_thinking(grammar: Grammar, *, begun: bool, calls: bool, tags_are_tokens: bool) -> Grammar:
    """The same grammar for what follows thinking. A client's own Lark or GBNF grammar stays as it is.

    Args:
        grammar: one that has been checked.
        begun: the prompt has opened the thinking; else the answer may, with its first words.
        calls: it is one of ``calls_grammar``.
        tags_are_tokens: the model's vocabulary has the tags; else they are text.
    """
    if grammar.kind == "grammar":
        if not calls:
            return grammar
        answer = grammar.source.replace("start:", "answer:", 1)
    elif (rule := _lark(grammar)) is not None:
        answer = f"answer: {rule}"
    else:
        return grammar
    if tags_are_tokens:
        thinking = f"{OPEN}{'?' if begun else ''} thought {CLOSE} blank"
        thought = "thought: /(.|\\n)*/"
    else:
        thinking = "thought blank" if begun else f'"{OPEN}" thought blank'
        thought = f'thought[stop="{CLOSE}"]: /(.|\\n)*/'
    start = f"start: {thinking} answer" if begun else f"start: ({thinking})? answer"
    return Grammar(kind="grammar", source="\n".join([start, thought, "blank: /\\n{0,2}/", answer]))


def _lark(grammar: Grammar) -> str | None:
    """What stands for a grammar in a Lark rule; None where nothing does."""
    if grammar.kind in ("json_schema", "json_object"):
        schema = json.loads(grammar.source) if grammar.kind == "json_schema" else {"type": "object"}
        return _json_rule(schema) if isinstance(schema, dict) else None
    if "::=" in grammar.source:
        # It would be taken for GBNF.
        return None
    if grammar.kind == "choice":
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.source))
    source = re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], grammar.source, flags=re.DOTALL)
    return None if "\n" in source else f"/{source}/"


def _json_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _STYLE}).replace("::=", "\\u003a:=")


def _of_format(wanted: ResponseFormat, param: str) -> Grammar:
    if wanted.type == "json_object":
        return Grammar(kind="json_object")
    schema = wanted.json_schema.schema if wanted.json_schema is not None else None
    # The responses endpoint has the members of json_schema beside the type.
    holder = param if param == RESPONSES_FORMAT else f"{param}.json_schema"
    if schema is None:
        missing = holder if wanted.json_schema is None else f"{holder}.schema"
        raise BadRequest(f"'{missing}' is required", missing, "missing_required_parameter")
    check_nesting(schema, f"{holder}.schema")
    return Grammar(kind="json_schema", source=json.dumps(schema))


def _of_structured_outputs(wanted: StructuredOutputs) -> Grammar:
    given: list[Grammar] = []
    if wanted.json is not None:
        check_nesting(wanted.json, "structured_outputs.json")
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
