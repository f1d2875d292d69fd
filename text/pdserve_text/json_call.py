"""A function call written as a JSON object, read while it arrives: the name first, then the arguments as they come.

Owns the recognition of such an object. Does not know what marks it in a text.
"""

from __future__ import annotations

import json
import re

LONGEST_NAME = 256
_LONGEST_HEAD = 1024
_S = r"\s{0,64}"
_NAME = rf'\{{{_S}"name"{_S}:{_S}'
_CHARACTER = r'(?:[^"\\]|\\.)'
_HEAD = re.compile(
    rf'{_NAME}("{_CHARACTER}{{1,{LONGEST_NAME}}}"){_S},{_S}"(?:arguments|parameters)"{_S}:{_S}(?=\{{)', re.DOTALL
)
_LONG_NAME = re.compile(rf'{_NAME}"{_CHARACTER}{{{LONGEST_NAME + 1}}}', re.DOTALL)
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_NO_OBJECT = re.compile(r'\{\s*[^"\s]')
_KEYS = ("name", "arguments", "parameters", "type", "id")
_TAIL = re.compile(rf'{_S}(?:,{_S}"[^{{}}<]{{0,512}})?\}}')
_TAIL_BEGUN = re.compile(rf'{_S}(?:,{_S}(?:"[^{{}}<]{{0,512}})?)?\Z')
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
    """One object, beginning with ``{``. Feed it text until ``ended`` or ``broken``, then ``close`` it.

    Attributes:
        name: of the function, as soon as it is certain; ``LONGEST_NAME`` characters at most.
        ended: the arguments are complete; ``closed`` says whether the object around them is, too.
        broken: it is no call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.ended = False
        self.closed = False
        self.broken = False
        self._parts: list[str] = []
        self._head = ""
        self._end = ObjectEnd()

    @property
    def raw(self) -> str:
        """Text of the object until its name was known, for when it turns out to be no call."""
        return "".join(self._parts)

    def feed(self, text: str) -> tuple[str, str]:
        """New text of the arguments, and what does not belong to the object: what follows its end, or all that there
        was where the beginning shows that it is no call.
        """
        if self.name is not None:
            return self._stream(text)
        self._parts.append(text)
        # The beginning decides, so that no text is read over and over however long the object becomes.
        if len(self._head) < _LONGEST_HEAD:
            self._head = (self._head + text)[:_LONGEST_HEAD]
            head = _HEAD.match(self._head)
            if head is not None and (name := _string(head[1])):
                return self._named(name, head.end())
            if self._is_none():
                self.broken = True
                rest, self._parts = self.raw, []
                return "", rest
        end = self._end.feed(text)
        if end is None:
            return "", ""
        self._parts[-1] = text[:end]
        return self._whole(self.raw), text[end:]

    def close(self, text: str) -> str | None:
        """What follows the object in ``text``, which follows the arguments; None where that takes more text to say.
        Members after the arguments are left out, and a brace may be missing.
        """
        if not self.closed:
            tail = _TAIL.match(text)
            if tail is None and _TAIL_BEGUN.match(text):
                return None
            self.closed = True
            text = text if tail is None else text[tail.end() :]
        return text

    def _named(self, name: str, start: int) -> tuple[str, str]:
        raw, self.name, self._end = self.raw, name, ObjectEnd()
        arguments, rest = self._stream(raw[start:])
        self._parts = [raw[: len(raw) - len(rest)]]
        return arguments, rest

    def _is_none(self) -> bool:
        first = _FIRST_KEY.match(self._head)
        if first is None:
            return len(self._head) == _LONGEST_HEAD or bool(_NO_OBJECT.match(self._head))
        return first[1] not in _KEYS or bool(_LONG_NAME.match(self._head))

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
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not _is_text(name):
            self.broken = True
            return ""
        self.name = name
        self.ended = self.closed = True
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str) and _is_text(arguments):
            return arguments
        return "{}" if arguments is None else json_text(arguments)


def json_text(value: object) -> str:
    """``value`` as JSON. Half a character, which JSON can write as an escape and no text can hold, stays an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_text(text) else json.dumps(value)


def _string(literal: str) -> str:
    try:
        text = str(json.loads(literal))
    except ValueError:
        return ""
    return text if _is_text(text) else ""


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
