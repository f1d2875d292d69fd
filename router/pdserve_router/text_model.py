"""Tokenizer and chat template of one served model. Foreign text errors become the router's own here."""

from __future__ import annotations

import asyncio
from threading import Lock
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import msgspec
from pdserve_text.chat_template import ChatTemplate
from pdserve_text.errors import BadGrammar, ChatTemplateError, NotUnicode, TokenizerFilesError, UnsupportedContent
from pdserve_text.grammar import GrammarCompiler
from pdserve_text.tokenizer import Tokenizer

from pdserve_router.errors import BadRequest, ContextTooLong, NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve_protocol.sampling import Grammar

    from pdserve_router.messages import ChatPrompt
    from pdserve_router.validate import Prompt

# Below this a prompt is rendered and tokenized in a fraction of the time that a trip to another thread takes.
_INLINE_CHARS = 8192
Args = TypeVarTuple("Args")
Result = TypeVar("Result")


class TextModel:
    """Immutable to the eye, and safe to use from several threads.

    Args:
        files: of a Hugging Face folder, by name.

    Raises:
        TokenizerFilesError: they make no tokenizer.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.tokenizer = Tokenizer.from_files(files)
        self._template = ChatTemplate.from_files(files)
        self._files = files
        self._grammars: GrammarCompiler | None = None
        self._making_grammars = Lock()

    @property
    def chat_template(self) -> str:
        """The Jinja text of the template; empty where the model has none."""
        return self._template.source

    async def prompt_ids(
        self, prompt: Prompt, limit: int, param: str = "prompt", *, add_special_tokens: bool | None = None
    ) -> list[int]:
        """Token ids of a prompt: messages, text, or ids that pass through. A long one does not hold up the event loop.

        Args:
            limit: a prompt that has more tokens than this for certain is not tokenized.
            param: the field that it came from.
            add_special_tokens: what the tokenizer adds to a plain text; None is as the kind of prompt wants it.

        Raises:
            ContextTooLong: it has.
            BadRequest: the template refuses the messages, or the text cannot be encoded.
            NotSupported: the template would not show the tools to the model.
        """
        if isinstance(prompt, list):
            if len(prompt) > limit:
                raise ContextTooLong(len(prompt), None, limit, param)
            return prompt
        special = isinstance(prompt, str) if add_special_tokens is None else add_special_tokens
        if not isinstance(prompt, str):
            prompt = await _aside(len(msgspec.json.encode(prompt)), self._render, prompt, param)
        return await _aside(len(prompt), self._encode, prompt, limit, param, special)

    async def check_grammar(self, grammar: Grammar, param: str) -> None:
        """Raises BadRequest where the grammar has a fault. Others go on while it is compiled."""
        await asyncio.get_running_loop().run_in_executor(None, self._check_grammar, grammar, param)

    def _check_grammar(self, grammar: Grammar, param: str) -> None:
        try:
            with self._making_grammars:
                # Made when it is first needed: it takes a third of a second.
                if self._grammars is None:
                    self._grammars = GrammarCompiler(self._files, self.tokenizer.end_token_ids)
            self._grammars.check(grammar.kind, grammar.source)
        except TokenizerFilesError as error:
            raise NotSupported(param, f"not with this model's tokenizer: {error}") from error
        except BadGrammar as error:
            raise BadRequest(f"'{param}': {error}", param) from error

    def _encode(self, text: str, limit: int, param: str, special: bool) -> list[int]:
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest > limit:
            raise ContextTooLong(fewest, None, limit, param, at_least=True)
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=special)
        except NotUnicode as error:
            raise BadRequest(str(error), param) from error
        if not ids:
            raise BadRequest(f"'{param}' has no tokens", param)
        return ids

    def _render(self, prompt: ChatPrompt, param: str) -> str:
        if prompt.tools and not self._template.knows_tools:
            raise NotSupported("tools", "this model's chat template does not tell the model of them")
        variables = prompt.variables | ({"tools": prompt.tools} if prompt.tools else {})
        try:
            return self._template.render(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                **variables,
            )
        except (ChatTemplateError, UnsupportedContent) as error:
            raise BadRequest(str(error), param) from error


async def _aside(size: int, work: Callable[[*Args], Result], *args: *Args) -> Result:
    """The result of ``work``, which others wait for only where what it works on is small."""
    if size <= _INLINE_CHARS:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(None, work, *args)
