"""Errors of the text room.

TextError
├── TokenizerFilesError    files that are missing, damaged or contradict each other
│   └── UnsupportedTokenizer   files that are sound but of a kind that is not supported, named
├── NotUnicode             text with half a surrogate pair, which has no UTF-8 form
├── UnsupportedContent     a message whose content is not text
├── ChatTemplateError      the template cannot be compiled, or refuses the messages
│   └── NoChatTemplate     the model has none
└── BadGrammar             a grammar for the output that is wrong, not supported or too complex
"""

from __future__ import annotations


class TextError(Exception):
    """Base of all errors of this package."""


class TokenizerFilesError(TextError):
    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")


class UnsupportedTokenizer(TokenizerFilesError):
    """``name`` is the file or field, ``kind`` what it holds, ``supported`` what it may hold."""

    def __init__(self, name: str, kind: str, supported: str) -> None:
        super().__init__(name, f"{kind} is not supported (supported: {supported})")


class NotUnicode(TextError):
    def __init__(self, position: int) -> None:
        super().__init__(f"the text has half a surrogate pair at character {position} and cannot be written as UTF-8")


class UnsupportedContent(TextError):
    """``index`` is the position in the list of messages."""

    def __init__(self, index: int, detail: str) -> None:
        super().__init__(f"messages[{index}].content: {detail}")
        self.index = index


class ChatTemplateError(TextError):
    """The message is what the template raised, word for word."""


class NoChatTemplate(ChatTemplateError):
    def __init__(self, detail: str = "") -> None:
        super().__init__(
            "the model has no chat template" + (f" ({detail})" if detail else "") + "; use the completions endpoint,"
            " or add chat_template.jinja to the model folder"
        )


class BadGrammar(TextError):
    """The message is the library's, on one line, and the beginning of it where it is long."""

    def __init__(self, detail: str) -> None:
        super().__init__(" ".join(detail.split())[:300] or "the grammar is not valid")
