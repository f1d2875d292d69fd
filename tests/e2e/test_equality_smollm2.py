"""The demo model through real processes: disaggregated = aggregated = transformers in float32.

In bfloat16 disaggregated = aggregated, where chunks, cache hits and batch are the same on both paths: one request at a
time, from empty caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from pdserve_engine.weights import resolve_model
from support.equality import Output, Paths, start_paths
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.slow

BLOCK = 16
NUM_TOKENS = {"float32": 24, "bfloat16": 16}
MAX_MODEL_LEN = 2048

STORY = (
    "The lighthouse keeper climbed the {} step and counted the ships again. There were {} of them, and each carried a"
    " lamp of another colour, so that the bay looked like a garden at night. "
)
LONG = "".join(STORY.format(number, 3 * number + 1) for number in range(1, 24))
CHATS = [
    "What is the capital of Japan?",
    "Write a haiku about the sea.",
    "How do I sort a list of dictionaries by a key in Python?",
    "Was ist der Unterschied zwischen Äpfeln und Birnen? Antworte auf Deutsch, schön kurz.",
    "日本の首都はどこですか?",
    "Что такое фотосинтез?",
    "Translate 'the café is naïve' into Français, s'il vous plaît. 😀👩‍👩‍👧",
    LONG + "\nSummarize the text above in one sentence.",
]
TEXTS = [
    "Once upon a time, in a small village at the foot of a mountain, there lived",
    "def fibonacci(n: int) -> int:\n    ",
    "1, 2, 4, 8, 16,",
    LONG[:300],
]


class Demo:
    """The prompts as token ids, and what transformers makes of them."""

    def __init__(self) -> None:
        self.folder: Path = resolve_model("smollm2")
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        rendered = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            for content in CHATS
        ]
        self.prompts: list[list[int]] = [
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in [*rendered, *TEXTS]
        ]

    def reference(self, num_tokens: int) -> list[list[int]]:
        """Greedy, in float32, without the end token: all short prompts in one batch, the long one alone."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        outputs: dict[int, list[int]] = {}
        for is_long in (False, True):
            batch = [i for i, prompt in enumerate(self.prompts) if (len(prompt) > 400) is is_long]
            width = max(len(self.prompts[i]) for i in batch)
            padding = [width - len(self.prompts[i]) for i in batch]
            result = model.generate(
                torch.tensor([[0] * pad + self.prompts[i] for pad, i in zip(padding, batch, strict=True)]),
                attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
                max_new_tokens=num_tokens,
                do_sample=False,
            )
            ends = torch.tensor(model.generation_config.eos_token_id).reshape(-1).tolist()
            for i, token_ids in zip(batch, result[:, width:].tolist(), strict=True):
                end = next((place for place, token_id in enumerate(token_ids) if token_id in ends), num_tokens)
                outputs[i] = token_ids[:end]
        return [outputs[i] for i in range(len(self.prompts))]


@pytest.fixture(scope="module")
def demo() -> Demo:
    torch.set_num_threads(1)
    return Demo()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def paths(demo: Demo, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paths]:
    arguments: dict[str, Any] = {
        "--dtype": dtype,
        "--block-size": BLOCK,
        "--max-num-batched-tokens": 512,
        "--max-model-len": MAX_MODEL_LEN,
        "--kv-cache-memory": "512MiB",
    }
    flat = [str(item) for pair in arguments.items() for item in pair]
    with start_paths("smollm2", demo.folder, tmp_path_factory.mktemp(dtype), *flat) as paths:
        yield paths


def check_proofs(outputs: Sequence[Output], prompts: Sequence[Sequence[int]]) -> None:
    """All of each prompt has moved, and nothing was computed twice."""
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.proof["mode"] == "disaggregated"
        assert output.proof["blocks_moved"] == -(-len(prompt) // BLOCK)
        assert output.proof["bytes_moved"] > 0
        assert output.proof["tokens_recomputed"] == 0
        assert output.proof["exact"]


def test_prompts_are_what_they_are_meant_to_be(demo: Demo) -> None:
    assert len(demo.prompts) == 12
    assert 900 < max(map(len, demo.prompts)) < MAX_MODEL_LEN - 100


def test_same_tokens(demo: Demo, paths: Paths, dtype: str) -> None:
    num_tokens = NUM_TOKENS[dtype]
    parameters = {"max_tokens": num_tokens, "ignore_eos": False}
    requests = [(prompt, parameters) for prompt in demo.prompts]
    if dtype == "float32":
        together = [paths.run_all(path, requests, at_once=12) for path in (paths.disaggregated, paths.aggregated)]
        disaggregated, aggregated = together
    else:
        pairs = [paths.run_both(prompt, **parameters) for prompt in demo.prompts]
        disaggregated, aggregated = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    assert [output.token_ids for output in disaggregated] == [output.token_ids for output in aggregated]
    assert [output.text for output in disaggregated] == [output.text for output in aggregated]
    assert [output.usage for output in disaggregated] == [output.usage for output in aggregated]
    if dtype == "float32":
        assert [output.token_ids for output in disaggregated] == demo.reference(num_tokens)
    else:
        check_proofs(disaggregated, demo.prompts)
        # Where all is the same, so are the bits of the logits.
        assert [output.logprobs for output in disaggregated] == [output.logprobs for output in aggregated]


@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
def test_a_chat_is_its_token_ids(demo: Demo, paths: Paths) -> None:
    """The chat endpoint renders and tokenizes as transformers does: the same answer as to the token ids."""
    for content, prompt in zip(CHATS[3:6], demo.prompts[3:6], strict=True):
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 12}
        status, chat = paths.disaggregated.post("/v1/chat/completions", body)
        assert status == 200, chat
        assert chat["usage"]["prompt_tokens"] == len(prompt)
        expected = paths.run(paths.disaggregated, prompt, max_tokens=12, ignore_eos=False)
        assert chat["choices"][0]["message"]["content"] == expected.text
