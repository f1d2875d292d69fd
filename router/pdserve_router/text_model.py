"""Tokenizer and chat template of one served model. Foreign text errors become the router's own here."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve_text.chat_template import ChatTemplate
from pdserve_text.errors import ChatTemplateError, NotUnicode, UnsupportedContent
from pdserve_text.tokenizer import Tokenizer

from pdserve_router.errors import BadRequest, ContextTooLong

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_router.validate import Prompt

# Below this a prompt is tokenized in a fraction of the time that a trip to another thread takes.
_INLINE_CHARS = 8192
# What rendering a message costs, in characters tokenized.
_MESSAGE_CHARS = 64


class TextModel:
    """Immutable, and safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self._template = template

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> TextModel:
        """From the files of a Hugging Face folder by name; TokenizerFilesError where they do not make one."""
        return cls(Tokenizer.from_files(files), ChatTemplate.from_files(files))

    async def prompt_ids(self, prompt: Prompt, limit: int) -> list[int]:
        """Token ids of a prompt: messages, text, or ids that pass through. A long one does not hold up the event loop.

        Args:
            limit: a prompt that has more tokens than this for certain is not tokenized.

        Raises:
            ContextTooLong: it has.
            BadRequest: the template refuses the messages, or the text cannot be encoded.
        """
        if isinstance(prompt, str):
            size = len(prompt)
        elif prompt and isinstance(prompt[0], dict):
            size = sum(_num_chars(message) for message in prompt if isinstance(message, dict))
        else:
            if len(prompt) > limit:
                raise ContextTooLong(len(prompt), None, limit, "prompt")
            return [item for item in prompt if isinstance(item, int)]
        if size <= _INLINE_CHARS:
            return self._encode(prompt, limit)
        return await asyncio.get_running_loop().run_in_executor(None, self._encode, prompt, limit)

    def _encode(self, prompt: Prompt, limit: int) -> list[int]:
        is_text = isinstance(prompt, str)
        param = "prompt" if is_text else "messages"
        try:
            if isinstance(prompt, str):
                text = prompt
            else:
                text = self._template.render([message for message in prompt if isinstance(message, dict)])
            fewest = self.tokenizer.fewest_tokens(text)
            if fewest > limit:
                raise ContextTooLong(fewest, None, limit, param, at_least=True)
            ids = self.tokenizer.encode(text, add_special_tokens=is_text)
        except (ChatTemplateError, NotUnicode, UnsupportedContent) as error:
            raise BadRequest(str(error), param) from error
        if not ids:
            raise BadRequest(f"'{param}' has no tokens", param)
        return ids


def _num_chars(message: Mapping[str, object]) -> int:
    content = message.get("content")
    if isinstance(content, list):
        return sum(_MESSAGE_CHARS + len(part["text"]) for part in content)
    return _MESSAGE_CHARS + (len(content) if isinstance(content, str) else 0)
