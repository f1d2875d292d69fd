"""Function calls in the text of an answer, by the formats that models were trained on. One parser per answer.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>      (Hermes, Qwen2.5, Qwen3)
    llama3_json   {"name": ..., "parameters": {...}}; ...                       (Llama 3.1 and later)
    mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]  or  [TOOL_CALLS]name[ARGS]{...}
    qwen3_coder   <tool_call><function=name><parameter=key>value</parameter></function></tool_call>

What a parser returns, joined, depends on the text alone, not on how it was cut into pushes. Text that only looked like
a call comes out as content, and so does what follows a call whose closing mark is missing; nothing is lost but the
marks and the space around them. What is held back and read again with each push is short, however long the answer.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from pdserve_text.json_call import JsonCall, ObjectEnd, json_text
from pdserve_text.pieces import MOST_SPACE, CallArguments, CallStart, Content, partial_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve_text.pieces import Piece

_BETWEEN = ", \n\t\r"
_ALPHANUMERIC = string.ascii_letters + string.digits


class ToolParser(ABC):
    """What the formats share: text outside of calls, and the numbering of calls.

    Args:
        tools: the functions that were offered, by name, with the JSON schema of their arguments.
        new_id: the id of the next call.

    Attributes:
        needs_special_tokens: the marks are special tokens, so that their text must be there.
    """

    marker = ""
    needs_special_tokens = False
    # What ends a call, and characters that mean nothing right after one; None: space.
    _close = ""
    _loose: str | None = None

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], new_id: Callable[[], str] | None = None) -> None:
        self._tools = tools
        self._new_id = new_id or self._random_id
        self._held = ""
        self._in_call = False
        self._num_calls = 0
        self._after_call = False
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
        if not (self._after_call and (held.isspace() or self._close.startswith(held))):
            self._content(pieces, held)
        return pieces

    def _outside(self, pieces: list[Piece]) -> bool:
        """Emit content up to the next mark; whether there is more to do."""
        if self._after_call:
            self._held = self._held.lstrip(self._loose)
            if self._close and self._held.startswith(self._close):
                self._held = self._held[len(self._close) :]
                return True
            if self._close.startswith(self._held):
                return False
        start = self._held.find(self.marker)
        end = start if start >= 0 else len(self._held) - partial_marker(self._held, self.marker)
        cut = max(len(self._held[:end].rstrip()), end - MOST_SPACE)
        self._content(pieces, self._held[:cut])
        if start < 0:
            self._held = self._held[cut:]
            return False
        self._mark = self._held[cut : start + len(self.marker)]
        self._held = self._held[start + len(self.marker) :]
        self._in_call = True
        self._enter()
        return True

    def _content(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(Content(text))
            self._after_call = False

    def _start(self, pieces: list[Piece], name: str) -> None:
        pieces.append(CallStart(self._num_calls, self._new_id(), name))
        self._num_calls += 1
        self._after_call = True

    def _arguments(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(CallArguments(self._num_calls - 1, text))

    def _skip_space(self, pieces: list[Piece], characters: str | None = None) -> bool:
        """Space after the mark is as good as part of it; whether something follows that is to be read. Where there is
        too much of it, it was no call.
        """
        space = len(self._held) - len(self._held.lstrip(characters))
        if space > MOST_SPACE:
            self._reject(pieces, self._mark)
        elif space < len(self._held):
            self._mark += self._held[:space]
            self._held = self._held[space:]
            return True
        return False

    def _reject(self, pieces: list[Piece], text: str) -> None:
        """It was no call: ``text``, with its mark, is content."""
        self._content(pieces, text)
        self._in_call = False

    @abstractmethod
    def _enter(self) -> None:
        """A mark was found."""

    @abstractmethod
    def _call(self, pieces: list[Piece]) -> bool:
        """Take from ``_held`` what belongs to calls; whether there is more to do."""

    @abstractmethod
    def _give_up(self, pieces: list[Piece]) -> None:
        """The answer ended within a call."""

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

    def _read(self, pieces: list[Piece]) -> bool:
        """Feed all of ``_held`` to the call under way; what follows it is held again. Whether there is more to do."""
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
        if call.broken:
            self._reject(pieces, self._mark + call.raw)
        else:
            self._arguments(pieces, arguments)
        return bool(self._held)

    def _closed(self, call: JsonCall) -> bool:
        """Leave out the rest of the object; whether its end is known."""
        rest = call.close(self._held)
        if rest is not None:
            self._held = rest
        return rest is not None

    def _is_call(self, name: str) -> bool:
        return True

    def _give_up(self, pieces: list[Piece]) -> None:
        if self._json is None:
            self._reject(pieces, self._mark + self._held)
            self._held = ""
        elif not self._announced:
            self._reject(pieces, self._mark + self._json.raw)


class HermesParser(_JsonParser):
    marker = "<tool_call>"
    _close = "</tool_call>"
    _loose = string.whitespace + "}"

    def _call(self, pieces: list[Piece]) -> bool:
        if self._json is not None and self._json.ended:
            self._in_call = not self._closed(self._json)
            return bool(self._held) and not self._in_call
        if self._json is None:
            if not self._skip_space(pieces):
                return not self._in_call
            if not self._held.startswith("{"):
                self._reject(pieces, self._mark)
                return True
        return self._read(pieces)


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
        if self._decided:
            self._content(pieces, self._held)
            self._held = ""
            return False
        text = self._held.lstrip()
        if text.startswith(self.marker):
            text = text[len(self.marker) :].lstrip()
        much_space = len(self._held) - len(text) > MOST_SPACE
        if self.marker.startswith(text) and not much_space:
            return False
        self._decided = True
        if much_space or not text.startswith("{"):
            return True
        self._in_call = True
        self._json, self._mark = None, self._held[: len(self._held) - len(text)]
        self._held = text
        return True

    def _call(self, pieces: list[Piece]) -> bool:
        if self._json is not None and self._json.ended:
            return self._next(self._json)
        return self._read(pieces)

    def _next(self, call: JsonCall) -> bool:
        """After a call: the end of its object, a semicolon, another call; or something else."""
        if not self._closed(call):
            return False
        self._held = self._held.lstrip("; \n")
        if self._held.startswith("{"):
            self._json, self._mark = None, ""
        elif self._held:
            self._in_call = False
        return bool(self._held)

    def _is_call(self, name: str) -> bool:
        return name in self._tools


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
        if not self._skip_space(pieces):
            return not self._in_call
        if self._held.startswith("["):
            self._array, self._held, self._mark = True, self._held[1:], self._mark + "["
            return bool(self._held)
        return self._name(pieces)

    def _next_in_array(self, pieces: list[Piece]) -> bool:
        if self._json is not None and not self._json.ended:
            return self._element(pieces)
        if self._json is None:
            if not self._skip_space(pieces, _BETWEEN):
                return not self._in_call
        elif not self._closed(self._json):
            return False
        self._held = self._held.lstrip(_BETWEEN)
        if self._held.startswith("{"):
            self._json = None
            return self._element(pieces)
        if self._json is None:
            self._reject(pieces, self._mark)
        elif self._held:
            self._held = self._held.removeprefix("]")
            self._in_call = False
        return bool(self._held)

    def _element(self, pieces: list[Piece]) -> bool:
        more = self._read(pieces)
        if self._announced:
            self._mark = ""
        return more

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
        if self._object is None:
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
    _function = re.compile(r"<function=([^>\s]{1,128})>")
    _maybe = re.compile(r"(<(f(u(n(c(t(i(o(n(=([^>\s]{0,128})?)?)?)?)?)?)?)?)?)?)\Z")
    _end = "</function>"
    _token = re.compile(r"<parameter=([^<>]{1,128})>|</parameter>|</function>|</?tool_call>")
    _longest_token = 140

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._enter()

    def _enter(self) -> None:
        self._name: str | None = None
        self._values: dict[str, str] = {}
        # The parameter under way with its text so far, and text that belongs to none.
        self._key: str | None = None
        self._value: list[str] = []
        self._rest: list[str] = []

    def _call(self, pieces: list[Piece]) -> bool:
        if self._name is not None:
            return self._body(pieces)
        if not self._skip_space(pieces):
            return not self._in_call
        found = self._function.match(self._held)
        if found is not None:
            self._name = found[1]
            self._held = self._held[found.end() :]
            self._start(pieces, self._name)
            return bool(self._held)
        if self._maybe.match(self._held):
            return False
        self._reject(pieces, self._mark)
        return True

    def _body(self, pieces: list[Piece]) -> bool:
        """Take the next tag, and the text before it."""
        text = self._rest if self._key is None else self._value
        found = self._token.search(self._held)
        if found is None:
            cut = self._held.rfind("<")
            if cut < 0 or ">" in self._held[cut:] or len(self._held) - cut > self._longest_token:
                cut = len(self._held)
            text.append(self._held[:cut])
            self._held = self._held[cut:]
            return False
        text.append(self._held[: found.start()])
        if self._key is None and found[0] in (self.marker, self._close):
            # The end of the function is missing.
            self._held = self._held[found.start() :]
            self._end_call(pieces)
            return True
        self._held = self._held[found.end() :]
        if found[0] == self._end:
            self._end_value()
            self._end_call(pieces)
        elif self._key is None and found[1] is not None:
            self._key = found[1]
        elif self._key is not None and found[0] == "</parameter>":
            self._end_value()
        else:
            text.append(found[0])
        return bool(self._held)

    def _end_value(self) -> None:
        if self._key is not None:
            self._values[self._key] = "".join(self._value).removeprefix("\n").removesuffix("\n")
        self._key, self._value = None, []

    def _end_call(self, pieces: list[Piece]) -> None:
        properties = self._tools.get(self._name or "", {}).get("properties")
        properties = properties if isinstance(properties, dict) else {}
        values = {key: _typed(value, properties.get(key)) for key, value in self._values.items()}
        self._arguments(pieces, json_text(values))
        self._content(pieces, "".join(self._rest).strip())
        self._in_call, self._after_call = False, True

    def _give_up(self, pieces: list[Piece]) -> None:
        if self._name is None:
            self._reject(pieces, self._mark + self._held)
        else:
            if self._key is not None:
                self._rest += [f"<parameter={self._key}>", *self._value, self._held]
            self._end_call(pieces)
        self._held = ""


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
