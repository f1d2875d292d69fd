"""Messages of the chat and responses endpoints become what chat templates expect. Renders nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict

from pdserve_router.errors import BadRequest, NotSupported
from pdserve_router.nesting import check_nesting, too_deep
from pdserve_router.openai_types import MAX_MESSAGES, CalledFunction, ChatMessage, ContentPart, ToolCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_router.openai_types import ResponseInputItem, Tool

# A client may not take over what the server says to the template.
_OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """What a chat template is rendered with.

    Attributes:
        continue_final_message: the prompt ends within the last message, for the model to go on with.
        variables: further names for the template.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = field(default_factory=dict)


def chat_prompt(
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Tool],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: dict[str, Any] | None,
) -> ChatPrompt:
    """Check what the types cannot say.

    Raises:
        BadRequest: with the place named.
    """
    if sum(1 + (len(m.content) if isinstance(m.content, list) else 0) for m in messages) > MAX_MESSAGES:
        raise BadRequest(f"'messages' takes at most {MAX_MESSAGES} messages and parts of messages", "messages")
    if continue_final_message and add_generation_prompt:
        raise BadRequest(
            "'continue_final_message' and 'add_generation_prompt' exclude each other", "continue_final_message"
        )
    for name in variables or ():
        if name in _OWN_NAMES:
            raise BadRequest(f"'chat_template_kwargs' must not set '{name}'", "chat_template_kwargs")
    check_nesting(variables, "chat_template_kwargs")
    for i, tool in enumerate(tools):
        check_nesting(tool.function.parameters, f"tools[{i}]")
    return ChatPrompt(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        tools=[{"function": asdict(tool.function), "type": tool.type} for tool in tools],
        add_generation_prompt=not continue_final_message and add_generation_prompt is not False,
        continue_final_message=bool(continue_final_message),
        variables=variables or {},
    )


def messages_of_items(items: str | Sequence[ResponseInputItem], instructions: str | None) -> list[ChatMessage]:
    """Input of the responses endpoint as chat messages.

    Raises:
        BadRequest: an item without what its type needs.
    """
    messages = [] if instructions is None else [ChatMessage(role="system", content=instructions)]
    if isinstance(items, str):
        return [*messages, ChatMessage(role="user", content=items)]
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.type:
            case "message":
                role = _given(item.role, f"{where}.role")
                content = _given(item.content, f"{where}.content")
                messages.append(ChatMessage(role=role, content=_text_parts(content, f"{where}.content")))
            case "function_call":
                function = CalledFunction(
                    name=_given(item.name, f"{where}.name"), arguments=_given(item.arguments, f"{where}.arguments")
                )
                call = ToolCall(function=function, id=item.call_id)
                last = messages[-1] if messages else None
                if last is not None and last.role == "assistant":
                    last.tool_calls = [*(last.tool_calls or []), call]
                else:
                    messages.append(ChatMessage(role="assistant", tool_calls=[call]))
            case "function_call_output":
                output = _text_parts(_given(item.output, f"{where}.output"), f"{where}.output")
                call_id = _given(item.call_id, f"{where}.call_id")
                messages.append(ChatMessage(role="tool", content=output, tool_call_id=call_id))
            case "reasoning":
                pass
    if not messages:
        raise BadRequest("'input' has no message", "input")
    return messages


def _given(value: Any, where: str) -> Any:
    if value is None:
        raise BadRequest(f"'{where}' is required", where, "missing_required_parameter")
    return value


def _text_parts(content: str | list[ContentPart], where: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    for j, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text"):
            raise NotSupported(f"{where}[{j}]", f"content of type {part.type[:32]!r}; only text is")
    return [ContentPart(type="text", text=part.text) for part in content]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role == "function":
        raise NotSupported(f"{where}.role", "role 'function'; use 'tool'")
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise NotSupported(f"{where}.{name}")
    # "developer" is OpenAI's newer word for "system"; chat templates know the older one.
    role = "system" if message.role == "developer" else message.role
    checked: dict[str, Any] = {"role": role, "content": _content(message, where)}
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            checked[name] = value
    if role == "assistant":
        if message.reasoning_content is not None:
            checked["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            calls = enumerate(message.tool_calls)
            checked["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{j}]") for j, call in calls]
    elif message.tool_calls:
        raise BadRequest(f"'{where}.tool_calls' is only an assistant's", f"{where}.tool_calls")
    return checked


def _content(message: ChatMessage, where: str) -> str | list[dict[str, str]]:
    if message.content is None:
        if message.role != "assistant":
            raise BadRequest(f"'{where}.content' is required", f"{where}.content", "missing_required_parameter")
        return ""
    if isinstance(message.content, str):
        return message.content
    content = []
    for j, part in enumerate(message.content):
        if part.type != "text":
            raise NotSupported(f"{where}.content[{j}]", f"content of type {part.type[:32]!r}; only text is")
        if part.text is None:
            raise BadRequest(f"'{where}.content[{j}].text' is required", f"{where}.content[{j}].text")
        content.append({"type": "text", "text": part.text})
    return content


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates write arguments out as JSON themselves, so they get the value, not its text."""
    param = f"{where}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadRequest(f"'{param}' is not a JSON object: {error}", param) from error
    except RecursionError as error:
        raise too_deep(param) from error
    check_nesting(arguments, param)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}
