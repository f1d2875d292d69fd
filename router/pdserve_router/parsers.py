"""Which parsers take an answer apart: what the command line says, else what the model's chat template shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_text.output_parser import OutputParser
from pdserve_text.reasoning import CLOSE, OPEN, ReasoningParser, default_reasoning_parser, prompt_thinking
from pdserve_text.tool_parsers import JsonListParser, default_tool_parser, tool_parser

from pdserve_router.errors import NotSupported
from pdserve_router.structure import after_thinking

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from pdserve_protocol.sampling import Grammar
    from pdserve_text.tokenizer import Tokenizer
    from pdserve_text.tool_parsers import ToolParser

    from pdserve_router.text_model import TextModel
    from pdserve_router.validate import GenerationRequest

AUTO, NONE = "auto", "none"
# Tokens at the end of a prompt that are looked at for a tag that opens the answer.
_TAIL_TOKENS = 16


class ParserChoice:
    """Args:
    tool_call, reasoning: a parser's name, "auto" or "none".
    """

    def __init__(self, tool_call: str = AUTO, reasoning: str = AUTO) -> None:
        self._tool_call = tool_call
        self._reasoning = reasoning

    def of(self, request: GenerationRequest, text: TextModel) -> RequestParsers:
        """For the choices of one request.

        Raises:
            NotSupported: it offers tools, and no parser is known.
        """
        if request.endpoint == "completion":
            return RequestParsers(text.tokenizer)
        reasoning = default_reasoning_parser(text.chat_template) if self._reasoning == AUTO else self._reasoning
        tools: type[ToolParser] | None = None
        if request.grammar is not None:
            tools = JsonListParser if request.must_call else None
            return RequestParsers(text.tokenizer, None if reasoning == NONE else reasoning, tools, request.tools)
        if request.tools:
            name = default_tool_parser(text.chat_template) if self._tool_call == AUTO else self._tool_call
            if name is None or name == NONE:
                raise NotSupported("tools", "the router knows no format of this model's calls; see --tool-call-parser")
            tools = tool_parser(name)
        return RequestParsers(
            text.tokenizer,
            None if reasoning == NONE else reasoning,
            tools,
            request.tools,
            parallel=request.parallel_tool_calls,
        )


class RequestParsers:
    """Attributes:
    need_special_tokens: a parser looks for the text of special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reasoning: str | None = None,
        tools: type[ToolParser] | None = None,
        offered: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        parallel: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._tools = tools
        self._offered = offered or {}
        self._parallel = parallel
        self.need_special_tokens = tools is not None and tools.needs_special_tokens

    def grammar(self, grammar: Grammar, prompt_token_ids: Sequence[int], *, calls: bool) -> Grammar:
        """What the whole output must look like, where ``grammar`` is for what follows the thinking."""
        if self._reasoning is None:
            return grammar
        thinking = prompt_thinking(self._reasoning, self._tail(prompt_token_ids))
        if thinking is None:
            return grammar
        tags_are_tokens = all(len(self._tokenizer.encode(tag, add_special_tokens=False)) == 1 for tag in (OPEN, CLOSE))
        return after_thinking(grammar, begun=thinking, calls=calls, tags_are_tokens=tags_are_tokens)

    def new(self, prompt_token_ids: Sequence[int]) -> OutputParser | None:
        """For one choice; None where its text is its content."""
        if self._reasoning is None and self._tools is None:
            return None
        reasoning = None
        if self._reasoning is not None:
            reasoning = ReasoningParser(self._reasoning, self._tail(prompt_token_ids))
        tools = self._tools(self._offered) if self._tools is not None else None
        return OutputParser(reasoning, tools, parallel=self._parallel)

    def _tail(self, prompt_token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt_token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
