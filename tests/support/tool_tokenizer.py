"""The tiny tokenizer with a chat template that knows tools and thinking, as Qwen's does."""

from __future__ import annotations

import json

from support.tokenizers import tiny_tokenizer_files

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool.function | tojson }}{% endfor %}"
    " <tool_call>{name, arguments}</tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments.city }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tool_tokenizer_files(template: str = TOOL_TEMPLATE) -> dict[str, bytes]:
    files = tiny_tokenizer_files()
    config = json.loads(files["tokenizer_config.json"])
    files["tokenizer_config.json"] = json.dumps(config | {"chat_template": template}).encode()
    return files
