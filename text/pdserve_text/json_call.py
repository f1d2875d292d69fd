"""A function call written as a JSON object, read while it arrives: the name first, then the arguments as they come.

Owns the recognition of such an object. Does not know what marks it in a text.
"""

from __future__ import annotations

import json
import re

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_NO_OBJECT = re.compile(r'\{\s*[^"\s]')
_KEYS = ("name", "arguments", "parameters", "type", "id")
_SYNTAX = re.compile(r'["\\{}\[\]]')
_DECODER = json.JSONDecoder()


class ObjectEnd:
    """Finds the end of a JSON object that begins with the first character."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """Position after the closing brace; None where ``text`` does not reach it."""
        position = 0
        if self._escaped and text:
            self._escaped, position = False, 1
        while (found := _SYNTAX.search(text, position)) is not None:
            character, position = found[0], found.end()
            if self._in_string:
                if character == '"':
                    self._in_string = False
                elif character == "\\":
                    if position == len(text):
                        self._escaped = True
                    position += 1
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position
        return None


class JsonCall:
    """One object, beginning with ``{``. Feed it text until ``ended`` or ``broken``.

    Attributes:
        name: of the function, as soon as it is certain.
        raw: all text so far, for when it turns out to be no call.
        ended: the arguments are complete; ``closed`` says whether the object around them is, too.
        broken: it is no call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw = ""
        self.ended = False
        self.closed = False
        self.broken = False
        self._end = ObjectEnd()
        self._searched = 0

    def feed(self, text: str) -> tuple[str, str]:
        """New text of the arguments, and what of ``text`` follows the end."""
        if self.name is not None:
            return self._stream(text)
        self.raw += text
        head = _HEAD.match(self.raw)
        if head is not None and (name := _string(head[1])):
            self.name, arguments = name, self.raw[head.end() :]
            self._end = ObjectEnd()
            return self._stream(arguments)
        first = _FIRST_KEY.match(self.raw)
        self.broken = bool(_NO_OBJECT.match(self.raw)) or (first is not None and first[1] not in _KEYS)
        if self.broken:
            return "", ""
        end = self._end.feed(self.raw[self._searched :])
        if end is None:
            self._searched = len(self.raw)
            return "", ""
        end += self._searched
        return self._whole(self.raw[:end]), self.raw[end:]

    def _stream(self, text: str) -> tuple[str, str]:
        end = self._end.feed(text)
        if end is None:
            return text, ""
        self.ended = True
        return text[:end], text[end:]

    def _whole(self, text: str) -> str:
        """Name and arguments of an object that has them in another order or form."""
        try:
            value, _ = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            value = None
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or not name:
            self.broken = True
            return ""
        self.name = name
        self.ended = self.closed = True
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            return arguments
        return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)


def _string(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        return ""
