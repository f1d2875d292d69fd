"""Chat templates: messages become the text of a prompt, as the model's authors wrote it down in Jinja.

Owns the environment that templates written for ``transformers`` expect. Does not tokenize.
"""

from __future__ import annotations

import json
import secrets
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve_text import files as folder_files
from pdserve_text.errors import ChatTemplateError, NoChatTemplate, TokenizerFilesError, UnsupportedContent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser

Message = dict[str, Any]

_PROBE = "pdserve_probe_of_tools"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}},
}

# What an expression in a template can raise when the messages are not as it expects.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """Renders messages. Made once per model; the template is compiled at its first use and kept.

    Args:
        source: the Jinja text; None where the model has none.
        special_tokens: bos_token and the like, variables of the template.
        absence: why there is none, for the error.
        now: local time for templates that ask for the date.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        *,
        absence: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._absence = absence
        self._now = now

    @property
    def source(self) -> str:
        """The Jinja text; empty where the model has none."""
        return self._source or ""

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatTemplate:
        """From chat_template.jinja, else tokenizer_config.json; of several there, the one named default."""
        special = folder_files.special_tokens(files)
        if folder_files.CHAT_TEMPLATE in files:
            try:
                return cls(files[folder_files.CHAT_TEMPLATE].decode(), special)
            except UnicodeDecodeError as error:
                raise TokenizerFilesError(folder_files.CHAT_TEMPLATE, f"not UTF-8: {error}") from error
        match folder_files.read_json(files, folder_files.TOKENIZER_CONFIG).get("chat_template"):
            case None:
                return cls(None, special)
            case str(source):
                return cls(source, special)
            case [*entries] if all(isinstance(e, dict) and {"name", "template"} <= e.keys() for e in entries):
                named = {entry["name"]: entry["template"] for entry in entries}
                return cls(named.get("default"), special, absence=f"none named default among {sorted(named)}")
            case other:
                detail = f"chat_template is neither a text nor a list of named ones: {other!r:.80}"
                raise TokenizerFilesError(folder_files.TOKENIZER_CONFIG, detail)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """Text of the prompt; encode it without adding special tokens, it has its own.

        With ``continue_final_message`` it ends within the last message, for the model to go on with. ``variables`` are
        further names for the template (``enable_thinking`` and the like). Raises UnsupportedContent for a message that
        is not text, NoChatTemplate, and ChatTemplateError with the template's own words.
        """
        normal = normalize_messages(messages)
        if self._source is None:
            raise NoChatTemplate(self._absence)
        mark = secrets.token_hex(16) if continue_final_message else ""
        if mark:
            add_generation_prompt = False
            normal[-1]["content"] += mark
        names = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            text = self._template.render(names, messages=normal, add_generation_prompt=add_generation_prompt)
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(str(error)) from error
        if not mark:
            return text
        before, found, _ = text.rpartition(mark)
        if not found:
            raise ChatTemplateError("the template does not show the last message, which is to be continued")
        return before

    @cached_property
    def knows_tools(self) -> bool:
        """Whether a model is told of the tools that it is offered; found out by offering it one."""
        try:
            return _PROBE in self.render([{"role": "user", "content": "?"}], tools=[_PROBE_TOOL])
        except ChatTemplateError:
            # That it fails with any messages at all is for the request to find out.
            return True

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: self._now().strftime(layout)
        return environment.from_string(self._source or "")


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies of the messages, each with a text as its content.

    A list of text parts is joined with nothing between them; no content is the empty text. Raises UnsupportedContent
    for anything else, naming the type of the part.
    """
    return [{**message, "content": _text_of(message.get("content"), i)} for i, message in enumerate(messages)]


def _text_of(content: object, index: int) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(_text_of_part(part, index) for part in content)
        case _:
            raise UnsupportedContent(index, f"a text or a list of text parts is expected, not {type(content).__name__}")


def _text_of_part(part: object, index: int) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise UnsupportedContent(index, "a part of type 'text' needs a 'text' that is a string")
        case {"type": str(kind)}:
            raise UnsupportedContent(index, f"parts of type {kind!r} are not supported, only 'text'")
        case _:
            raise UnsupportedContent(index, "each part needs a 'type'")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's words for training; in serving it is its body and no more."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
