"""Function calls in the text of an answer, by the formats that models were trained on. One parser per answer.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>      (Hermes, Qwen2.5, Qwen3)
    llama3_json   {"name": ..., "parameters": {...}}; ...                       (Llama 3.1 and later)
    mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]  or  [TOOL_CALLS]name[ARGS]{...}
    qwen3_coder   <tool_call><function=name><parameter=key>value</parameter></function></tool_call>

What a parser returns, joined, depends on the text alone, not on how it was cut into pushes. Text that only looked like
a call comes out as content; nothing is lost but the marks and the space around them.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Any

from pdserve_text.json_call import JsonCall, ObjectEnd
from pdserve_text.pieces import CallArguments, CallStart, Content, partial_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve_text.pieces import Piece

_ALPHANUMERIC = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class ToolParser:
    """What the formats share: text outside of calls, and the numbering of calls.

    Args:
        tools: the functions that were offered, by name, with the JSON schema of their arguments.
        new_id: the id of the next call.

    Attributes:
        needs_special_tokens: the marks are special tokens, so that their text must be there.
    """

    marker = ""
    needs_special_tokens = False

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], new_id: Callable[[], str] | None = None) -> None:
        self._tools = tools
        self._new_id = new_id or self._random_id
        self._held = ""
        self._in_call = False
        self._num_calls = 0
        # The mark of the call under way with the space around it, for when it turns out to be none.
        self._mark = ""

    def push(self, text: str) -> list[Piece]:
        """Pieces that are decided now."""
        self._held += text
        pieces: list[Piece] = []
        while self._held and (self._call(pieces) if self._in_call else self._outside(pieces)):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """The answer is over: what was held back."""
        pieces: list[Piece] = []
        if self._in_call:
            self._give_up(pieces)
        held, self._held = self._held, ""
        if held and not (self._num_calls and held.isspace()):
            pieces.append(Content(held))
        return pieces

    def _outside(self, pieces: list[Piece]) -> bool:
        """Emit content up to the next mark; whether there is more to do."""
        start = self._held.find(self.marker)
        if start >= 0:
            before = self._held[:start].rstrip()
            self._mark = self._held[len(before) : start + len(self.marker)]
            self._held = self._held[start + len(self.marker) :]
            self._in_call = True
            self._enter()
        else:
            before = self._held[: len(self._held) - partial_marker(self._held, self.marker)].rstrip()
            self._held = self._held[len(before) :]
        if self._num_calls:
            before = before.lstrip()
        if before:
            pieces.append(Content(before))
        return start >= 0

    def _start(self, pieces: list[Piece], name: str) -> None:
        pieces.append(CallStart(self._num_calls, self._new_id(), name))
        self._num_calls += 1

    def _arguments(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(CallArguments(self._num_calls - 1, text))

    def _trim(self) -> None:
        """Space after the mark is as good as part of it."""
        text = self._held.lstrip()
        self._mark += self._held[: len(self._held) - len(text)]
        self._held = text

    def _reject(self, pieces: list[Piece], text: str) -> None:
        """It was no call: ``text``, with its mark, is content."""
        pieces.append(Content(text))
        self._in_call = False

    def _enter(self) -> None:
        """A mark was found."""
        raise NotImplementedError

    def _call(self, pieces: list[Piece]) -> bool:
        """Take from ``_held`` what belongs to calls; whether there is more to do."""
        raise NotImplementedError

    def _give_up(self, pieces: list[Piece]) -> None:
        """The answer ended within a call."""
        raise NotImplementedError

    def _random_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


class _JsonParser(ToolParser):
    """Reads one JsonCall at a time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._json: JsonCall | None = None
        self._announced = False

    def _enter(self) -> None:
        self._json = None

    def _read(self, pieces: list[Piece]) -> JsonCall:
        """Feed all of ``_held`` to the call under way; what follows it is held again."""
        if self._json is None:
            self._json, self._announced = JsonCall(), False
        call = self._json
        arguments, self._held = call.feed(self._held)
        if call.name is not None and not self._announced:
            if self._is_call(call.name):
                self._announced = True
                self._start(pieces, call.name)
            else:
                call.broken = True
        if self._announced:
            self._arguments(pieces, arguments)
        return call

    def _is_call(self, name: str) -> bool:
        return True

    def _give_up(self, pieces: list[Piece]) -> None:
        if self._json is not None and not self._announced:
            self._reject(pieces, self._mark + self._json.raw)
        elif self._json is None and self._mark:
            self._reject(pieces, self._mark + self._held)
            self._held = ""


class HermesParser(_JsonParser):
    marker = "<tool_call>"
    _close = "</tool_call>"

    def _call(self, pieces: list[Piece]) -> bool:
        if self._json is not None and self._json.ended:
            return self._skip_close()
        if self._json is None:
            text = self._held.lstrip()
            if not text:
                return False
            if not text.startswith("{"):
                self._reject(pieces, self._mark)
                return True
            self._trim()
        call = self._read(pieces)
        if call.broken:
            self._reject(pieces, self._mark + call.raw)
        return bool(self._held)

    def _skip_close(self) -> bool:
        end = self._held.find(self._close)
        if end < 0:
            self._held = self._held[len(self._held) - partial_marker(self._held, self._close) :]
            return False
        self._held = self._held[end + len(self._close) :]
        self._in_call = False
        return bool(self._held)

    def _give_up(self, pieces: list[Piece]) -> None:
        if self._json is not None and self._json.ended:
            self._held = ""
        else:
            super()._give_up(pieces)


class Llama3JsonParser(_JsonParser):
    """Calls are all that the answer consists of, so its first characters decide. Only functions that were offered are
    called: a model may well answer a question in JSON.
    """

    marker = "<|python_tag|>"
    needs_special_tokens = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._decided = False

    def _outside(self, pieces: list[Piece]) -> bool:
        text = self._held.lstrip()
        if self._decided:
            if self._held:
                pieces.append(Content(self._held))
                self._held = ""
            return False
        if text.startswith(self.marker):
            text = text[len(self.marker) :].lstrip()
        elif self.marker.startswith(text):
            return False
        if not text:
            return False
        self._decided = True
        if not text.startswith("{"):
            return True
        self._in_call = True
        self._json, self._mark = None, self._held[: len(self._held) - len(text)]
        self._held = text
        return True

    def _call(self, pieces: list[Piece]) -> bool:
        if self._json is not None and self._json.ended:
            return self._next()
        call = self._read(pieces)
        if call.broken:
            self._reject(pieces, self._mark + call.raw)
            self._held = ""
            return False
        return bool(self._held)

    def _next(self) -> bool:
        """After a call: the end of its object, a semicolon, another call; or something else."""
        assert self._json is not None
        text = self._held.lstrip()
        if not self._json.closed:
            if not text:
                return False
            self._json.closed = True
            self._held = text[1:] if text.startswith("}") else text
            return bool(self._held)
        text = text.lstrip("; \n")
        if not text:
            return False
        self._held = text
        if text.startswith("{"):
            self._json, self._mark = None, ""
        else:
            self._in_call = False
        return True

    def _is_call(self, name: str) -> bool:
        return name in self._tools

    def _give_up(self, pieces: list[Piece]) -> None:
        if self._json is not None and self._json.ended:
            self._held = ""
        else:
            super()._give_up(pieces)


class MistralParser(_JsonParser):
    """Both generations of the format. Ids have nine letters and digits, because their templates insist."""

    marker = "[TOOL_CALLS]"
    needs_special_tokens = True
    _longest_name = 256
    _named = re.compile(r"\s*([\w.-]{1,128})\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._array = False
        self._object: ObjectEnd | None = None

    def _enter(self) -> None:
        super()._enter()
        self._array = False
        self._object = None

    def _call(self, pieces: list[Piece]) -> bool:
        if self._object is not None:
            return self._named_arguments(pieces, self._object)
        if self._array:
            return self._next_in_array(pieces)
        text = self._held.lstrip()
        if not text:
            return False
        if text.startswith("["):
            self._trim()
            self._array, self._held, self._mark = True, self._held[1:], self._mark + "["
            return bool(self._held)
        return self._name(pieces)

    def _next_in_array(self, pieces: list[Piece]) -> bool:
        if self._json is not None and not self._json.ended:
            return self._element(pieces)
        text = self._held
        if self._json is not None and not self._json.closed:
            end = text.find("}")
            if end < 0:
                self._held = ""
                return False
            self._json.closed, text = True, text[end + 1 :]
        stripped = text.lstrip(", \n\t\r")
        if self._json is None:
            self._mark += text[: len(text) - len(stripped)]
        self._held = text = stripped
        if not text:
            return False
        if text.startswith("{"):
            self._json = None
            return self._element(pieces)
        if text.startswith("]") and self._json is not None:
            self._held = text[1:]
            self._in_call = False
        elif self._json is not None:
            self._in_call = False
        else:
            self._reject(pieces, self._mark)
        return bool(self._held)

    def _element(self, pieces: list[Piece]) -> bool:
        call = self._read(pieces)
        if call.broken:
            self._reject(pieces, self._mark + call.raw)
        if self._announced:
            self._mark = ""
        return bool(self._held)

    def _name(self, pieces: list[Piece]) -> bool:
        found = self._named.match(self._held)
        if found is not None and found.end() < self._longest_name:
            self._start(pieces, found[1])
            self._held = self._held[found.end() :]
            self._object, self._mark = ObjectEnd(), ""
            return True
        if "{" in self._held[: self._longest_name] or len(self._held) >= self._longest_name:
            self._reject(pieces, self._mark)
            return True
        return False

    def _named_arguments(self, pieces: list[Piece], end_of: ObjectEnd) -> bool:
        end = end_of.feed(self._held)
        if end is None:
            self._arguments(pieces, self._held)
            self._held = ""
            return False
        self._arguments(pieces, self._held[:end])
        self._held = self._held[end:]
        self._in_call = False
        return bool(self._held)

    def _give_up(self, pieces: list[Piece]) -> None:
        if self._object is not None or (self._json is not None and self._json.ended):
            self._held = ""
        else:
            super()._give_up(pieces)

    def _random_id(self) -> str:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class JsonListParser(MistralParser):
    """An answer that is nothing but a JSON list of calls, because a grammar left it no choice."""

    marker = "["
    needs_special_tokens = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_call = True
        self._enter()


class Qwen3CoderParser(ToolParser):
    """Arguments are text, whose types only the schema tells, so that each call's come in one piece."""

    marker = "<tool_call>"
    _close = "</tool_call>"
    _function = re.compile(r"\s*<function=([^>\s]{1,128})>")
    _maybe = re.compile(r"\s*(<(f(u(n(c(t(i(o(n(=([^>\s]{0,128})?)?)?)?)?)?)?)?)?)?)?\Z")
    _end = "</function>"
    _parameter = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._name: str | None = None
        self._ended = False

    def _enter(self) -> None:
        self._name, self._ended = None, False

    def _call(self, pieces: list[Piece]) -> bool:
        if self._ended:
            end = self._held.find(self._close)
            if end < 0:
                self._held = self._held[len(self._held) - partial_marker(self._held, self._close) :]
                return False
            self._held = self._held[end + len(self._close) :]
            self._in_call = False
            return bool(self._held)
        if self._name is None:
            found = self._function.match(self._held)
            if found is None:
                if self._maybe.match(self._held):
                    return False
                self._reject(pieces, self._mark)
                return True
            self._name = found[1]
            self._held = self._held[found.end() :]
            self._start(pieces, self._name)
            return True
        end = self._held.find(self._end)
        if end < 0:
            return False
        self._arguments(pieces, self._values(self._held[:end]))
        self._held = self._held[end + len(self._end) :]
        self._ended = True
        return bool(self._held)

    def _give_up(self, pieces: list[Piece]) -> None:
        if self._name is None:
            self._reject(pieces, self._mark + self._held)
        elif not self._ended:
            self._arguments(pieces, self._values(self._held))
        self._held = ""

    def _values(self, text: str) -> str:
        schema = self._tools.get(self._name or "", {})
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        found = self._parameter.findall(text)
        return json.dumps({key: _typed(value, properties.get(key)) for key, value in found}, ensure_ascii=False)


_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
}
TOOL_PARSERS = tuple(_PARSERS)


def tool_parser(name: str) -> type[ToolParser]:
    """The parser of this name, one of ``TOOL_PARSERS``."""
    return _PARSERS[name]


def default_tool_parser(chat_template: str) -> str | None:
    """The format that a chat template teaches the model, where it is one of these."""
    if "tools" not in chat_template:
        return None
    if "<tool_call>" in chat_template:
        return "qwen3_coder" if "<function=" in chat_template else "hermes"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if '{"name": function name, "parameters": dictionary of argument name and its value}' in chat_template:
        return "llama3_json"
    return None


def _typed(value: str, schema: object) -> Any:
    """A parameter's text as its schema's type; text where it is text or does not fit."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind is None or kind == "string" or (isinstance(kind, list) and "string" in kind):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
