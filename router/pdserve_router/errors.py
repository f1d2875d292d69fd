"""Errors of the router.

RouterError
├── BadRequest                  the body is not what the API allows; names the field
│   ├── NotSupported            a field that the API has and this server has not
│   └── ContextTooLong          prompt, or prompt and max_tokens, exceed what the nodes take
├── ModelNotFound               no node serves this name
├── NotReady                    no usable node, or no tokenizer yet
├── RouterDraining              the router is about to stop
├── RequestTimeout              the request's time is over
├── NodeFailed                  a node ended its half with an error
├── NodeLost                    a node died, was restarted, or took the router for dead, under the request
└── ArgumentError               the command line makes no sense
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve_protocol.outputs import ErrorCode


class RouterError(Exception):
    """Base of all errors of this package."""

    param: str | None = None
    code: str | None = None


class BadRequest(RouterError):
    def __init__(self, message: str, param: str | None = None, code: str | None = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotSupported(BadRequest):
    def __init__(self, param: str, hint: str = "") -> None:
        super().__init__(
            f"'{param}' is not supported by this server{f': {hint}' if hint else ''}", param, "unsupported_parameter"
        )


class ContextTooLong(BadRequest):
    """``at_least``: the prompt was not tokenized, and has ``num_prompt`` tokens or more."""

    def __init__(
        self, num_prompt: int, max_tokens: int | None, limit: int, param: str, *, at_least: bool = False
    ) -> None:
        asked = f"your prompt has {'at least ' if at_least else ''}{num_prompt} tokens"
        if max_tokens is not None:
            asked += f" and {param} asks for {max_tokens} more, {num_prompt + max_tokens} in all"
        else:
            asked += ", which leaves no room for an output token"
        message = f"This model takes at most {limit} tokens of prompt and output together; {asked}. Shorten either."
        super().__init__(message, param, "context_length_exceeded")


class ModelNotFound(RouterError):
    def __init__(self, model: str, served: list[str]) -> None:
        super().__init__(f"The model '{model[:200]}' is not served here; served: {', '.join(served) or 'none'}")
        self.param = "model"
        self.code = "model_not_found"


class NotReady(RouterError):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.code = "not_ready"


class RouterDraining(RouterError):
    def __init__(self) -> None:
        super().__init__("The router is stopping and takes no new requests")
        self.code = "draining"


class RequestTimeout(RouterError):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request was not finished within its time limit of {seconds:g} s")
        self.code = "deadline"


class NodeFailed(RouterError):
    """A half ended with an error; ``node_code`` is the node's own word for it, ``node_name`` its name by itself."""

    def __init__(self, node: str, node_code: ErrorCode, detail: str, node_name: str = "") -> None:
        super().__init__(f"{node}: {detail}")
        self.node_name = node_name
        self.node_code: ErrorCode = node_code
        self.code = node_code


class NodeLost(RouterError):
    def __init__(self, node: str, what: str = "died or was restarted while it worked on the request") -> None:
        super().__init__(f"{node} {what}")
        self.code = "node_lost"


class ArgumentError(RouterError):
    """The message says which flag and why."""
