"""Tiny random models through real processes: disaggregated = aggregated = transformers, whatever the caches hold.

Everything here is float32 and far from ties. Nodes compute prompts in chunks of CHUNK tokens and have a small KV cache.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.equality import Output, Paths, reference, start_paths
from support.models import tiny_model
from support.tokenizers import EOS_ID
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from support.cluster import Cluster

pytestmark = pytest.mark.slow

BLOCK = 16
CHUNK = 64
MAX_MODEL_LEN = 2304
NUM_BLOCKS = 160
BLOCK_BYTES = 8192
NUM_TOKENS = 12
VOCAB_SIZE = 512
AT_ONCE_S = 2.0
MODELS: dict[str, dict[str, Any]] = {"llama": {"tied": False}, "qwen3": {"tied": True}}
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1, 32 * BLOCK, 2000]


def make_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(length + 10_000 * seed)
    token_ids: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
    return token_ids


class Models:
    """Each model with its processes and its answers by transformers, made when first asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._paths: dict[str, Paths] = {}
        self._references: dict[str, Any] = {}
        self._expected: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def paths(self, name: str) -> Paths:
        if name not in self._paths:
            model = tiny_model(self._folder / name, name, vocab_size=VOCAB_SIZE, **MODELS[name])
            if not MODELS[name]["tied"]:
                _flatten(model)
            arguments = {
                "--dtype": "float32",
                "--block-size": BLOCK,
                "--max-num-batched-tokens": CHUNK,
                "--max-model-len": MAX_MODEL_LEN,
                "--kv-cache-memory": NUM_BLOCKS * BLOCK_BYTES,
            }
            flat = [str(item) for pair in arguments.items() for item in pair]
            self._paths[name] = self._stack.enter_context(start_paths(str(model), model, self._folder, *flat))
        return self._paths[name]

    def expected(self, name: str, prompt: Sequence[int]) -> list[int]:
        """Greedy output of transformers, of NUM_TOKENS tokens."""
        key = (name, tuple(prompt))
        if key not in self._expected:
            self._expected[key] = reference(self._reference(name), prompt, NUM_TOKENS)
        return self._expected[key]

    def logprobs(self, name: str, prompt: Sequence[int]) -> torch.Tensor:
        """Log probabilities of all tokens after each token of the prompt, by transformers."""
        with torch.inference_mode():
            logits = self._reference(name)(torch.tensor([list(prompt)])).logits[0]
        return torch.log_softmax(logits.double(), dim=-1)

    def _reference(self, name: str) -> Any:
        if name not in self._references:
            model = AutoModelForCausalLM.from_pretrained(self._folder / name, dtype=torch.float32)
            model.generation_config.eos_token_id = None
            self._references[name] = model
        return self._references[name]


def _flatten(folder: Path) -> None:
    """Brings the logits so close together that sampling has a choice and a bias of a few units decides."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 0.25
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield Models(tmp_path_factory.mktemp("equality"), stack)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, models: Models) -> str:
    models.paths(request.param)
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def paths(models: Models) -> Paths:
    return models.paths("llama")


@pytest.fixture(params=["disaggregated", "aggregated"])
def path(request: pytest.FixtureRequest, paths: Paths) -> Cluster:
    chosen: Cluster = getattr(paths, request.param)
    return chosen


def full_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK


def all_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def check_proof(output: Output, *, length: int, on_prefill: int, on_decode: int) -> None:
    """What moved, given the blocks of the prompt that each node had. The last prompt token is always computed."""
    proof = output.proof
    assert proof["mode"] == "disaggregated"
    assert proof["transport"] == "nixl"
    assert proof["exact"]
    assert proof["tokens_recomputed"] == 0
    cached = {"prefill": min(on_prefill, full_blocks(length - 1)) * BLOCK, "decode": on_decode * BLOCK}
    assert proof["cached_tokens"] == cached
    assert proof["blocks_moved"] == all_blocks(length) - on_decode
    assert proof["bytes_moved"] == proof["blocks_moved"] * BLOCK_BYTES


# ---- greedy, every state of the caches -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("state", ["neither", "prefill", "decode", "both"])
def test_greedy_whatever_is_cached(models, model, state, length):  # B06, B15, B52
    paths, prompt = models.paths(model), make_prompt(length)
    paths.reset(paths.prefill, paths.decode)
    hits = {"prefill": 0, "decode": 0}
    for name in hits:
        if state in (name, "both"):
            paths.cache(getattr(paths, name), prompt)
            hits[name] = full_blocks(length)
    output = paths.run(paths.disaggregated, prompt, max_tokens=NUM_TOKENS)
    check_proof(output, length=length, on_prefill=hits["prefill"], on_decode=hits["decode"])
    assert output.token_ids == models.expected(model, prompt)
    assert len(set(output.token_ids)) >= NUM_TOKENS // 3, "output is too uniform to prove anything"


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_aggregated(models, model, length):  # B06, B15
    paths, prompt = models.paths(model), make_prompt(length)
    paths.reset(paths.decode)
    for cached in (0, full_blocks(length - 1)):
        output = paths.run(paths.aggregated, prompt, max_tokens=NUM_TOKENS)
        assert output.proof["mode"] == "aggregated"
        assert output.proof["cached_tokens"] == {"prefill": None, "decode": cached * BLOCK}
        assert output.token_ids == models.expected(model, prompt)


@pytest.mark.parametrize("on_decode", [0, 1, 31, 32])
@pytest.mark.parametrize("on_prefill", [0, 1, 31, 32])
def test_blocks_are_paired_by_position(models, model, on_prefill, on_decode):  # B04, B52
    paths, prompt = models.paths(model), make_prompt(32 * BLOCK, seed=1)
    paths.reset(paths.prefill, paths.decode)
    paths.cache(paths.prefill, prompt[: on_prefill * BLOCK])
    paths.cache(paths.decode, prompt[: on_decode * BLOCK])
    output = paths.run(paths.disaggregated, prompt, max_tokens=NUM_TOKENS)
    check_proof(output, length=len(prompt), on_prefill=on_prefill, on_decode=on_decode)
    assert output.token_ids == models.expected(model, prompt)


@pytest.mark.parametrize("length", [BLOCK, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1])
def test_same_prompt_again_and_a_longer_one(models, model, length):  # B06, B52
    paths, prompt = models.paths(model), make_prompt(length, seed=2)
    paths.reset(paths.prefill, paths.decode)
    first, second = (paths.run(paths.disaggregated, prompt, max_tokens=NUM_TOKENS) for _ in range(2))
    assert first.token_ids == second.token_ids == models.expected(model, prompt)
    check_proof(first, length=length, on_prefill=0, on_decode=0)
    check_proof(second, length=length, on_prefill=full_blocks(length), on_decode=full_blocks(length))
    # The next turn: the decode node has cached what it generated as well, without the last token's KV.
    longer = [*prompt, *first.token_ids, *make_prompt(20, seed=3)]
    third = paths.run(paths.disaggregated, longer, max_tokens=NUM_TOKENS)
    generated = full_blocks(length + NUM_TOKENS - 1)
    check_proof(third, length=len(longer), on_prefill=full_blocks(length), on_decode=generated)
    assert third.token_ids == models.expected(model, longer)


def test_prompts_that_share_chunks(models, model):  # B15
    paths = models.paths(model)
    paths.reset(paths.prefill, paths.decode)
    prompts = [make_prompt(length, seed=4) for length in (3 * CHUNK + 1, 3 * CHUNK + 1, 2 * CHUNK - 1, 1, CHUNK)]
    prompts[1] = make_prompt(3 * CHUNK + 1, seed=5)
    requests = [(prompt, {"max_tokens": NUM_TOKENS}) for prompt in prompts]
    outputs = paths.run_all(paths.disaggregated, requests)
    assert [output.token_ids for output in outputs] == [models.expected(model, prompt) for prompt in prompts]
    for output, prompt in zip(outputs, prompts, strict=True):
        check_proof(output, length=len(prompt), on_prefill=0, on_decode=0)


# ---- sampling --------------------------------------------------------------------------------------------------------

SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.2},
    "presence_penalty": {"presence_penalty": 2.0, "top_k": 8},
    "frequency_penalty": {"frequency_penalty": 2.0, "top_k": 8},
    "repetition_penalty": {"repetition_penalty": 2.5},
    "logit_bias": {"logit_bias": {"100": 6.0, "200": 5.5, "300": 5.0, "400": -100.0}},
    "min_tokens": {"min_tokens": 6, "ignore_eos": False, "logit_bias": {str(EOS_ID): 5.0}},
    "stop_token_ids": {"stop_token_ids": list(range(3, 59))},
    "all": {
        "top_p": 0.9,
        "top_k": 100,
        "min_p": 0.02,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"100": 3.0, str(EOS_ID): 4.0},
        "min_tokens": 5,
        "stop_token_ids": [100],
        "ignore_eos": False,
    },
}


def sampled(name: str, seed: int) -> dict[str, Any]:
    return {"temperature": 0.9, "max_tokens": 24, "seed": seed, **SAMPLED[name]}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_with_a_seed(models, model, name):
    paths, prompt = models.paths(model), make_prompt(CHUNK + 1, seed=6)
    outputs = []
    for seed in (1, 2):
        disaggregated, aggregated = paths.run_both(prompt, logprobs=2, **sampled(name, seed))
        assert disaggregated == aggregated
        assert disaggregated.proof["mode"] == "disaggregated"
        outputs.append(disaggregated)
    assert outputs[0].token_ids != outputs[1].token_ids


@pytest.mark.parametrize("state", ["neither", "prefill", "decode", "both"])
def test_sampled_whatever_is_cached(paths, state):
    prompt = make_prompt(5 * BLOCK, seed=7)
    _, expected = paths.run_both(prompt, **sampled("all", 3))
    paths.reset(paths.prefill, paths.decode)
    for name in ("prefill", "decode"):
        if state in (name, "both"):
            paths.cache(getattr(paths, name), prompt)
    output = paths.run(paths.disaggregated, prompt, **sampled("all", 3))
    assert (output.token_ids, output.finish_reason) == (expected.token_ids, expected.finish_reason)


def test_sampled_in_a_full_batch(paths):
    """Neither the batch nor its company changes what a seed gives."""
    requests = [(make_prompt(10 + 17 * i, seed=8), sampled(name, i)) for i, name in enumerate(SAMPLED)]
    alone = [paths.run(paths.aggregated, prompt, **parameters) for prompt, parameters in requests]
    paths.reset(paths.prefill, paths.decode)
    together = paths.run_all(paths.disaggregated, requests, at_once=len(requests))
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.finish_reason for output in together] == [output.finish_reason for output in alone]
    assert len({output.finish_reason for output in alone}) == 2


def test_penalties_count_the_first_token(paths):  # B100
    """With a few tokens far ahead of all others, each token generated so far decides about the next one."""
    prompt = [*[70, 71, 72] * 20, 70]
    ahead = {"logit_bias": {str(token_id): 60.0 for token_id in (70, 71, 72, 73)}, "max_tokens": NUM_TOKENS}
    outputs = {}
    for presence in (0.0, 2.0):
        for frequency in (0.0, 2.0):
            penalties = {"presence_penalty": presence, "frequency_penalty": frequency}
            disaggregated, aggregated = paths.run_both(prompt, **ahead, **penalties)
            assert disaggregated == aggregated
            assert set(disaggregated.token_ids) <= {70, 71, 72, 73}
            outputs[presence, frequency] = disaggregated.token_ids
    assert len({tuple(token_ids) for token_ids in outputs.values()}) >= 3
    # Only output counts: the first choice is the same with and without, though the prompt is full of these tokens.
    assert len({token_ids[0] for token_ids in outputs.values()}) == 1
    assert any(first == second for first, second in pairwise(outputs[0.0, 0.0]))
    assert outputs[0.0, 2.0][1] != outputs[0.0, 2.0][0]


# ---- log probabilities of the prompt ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, BLOCK, 3 * CHUNK + 1, 2000])
def test_prompt_logprobs_are_those_of_transformers_on_both_paths(models, model, length):  # B81
    paths, prompt = models.paths(model), make_prompt(length, seed=9)
    expected = models.logprobs(model, prompt)
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 3, "logprobs": 1, "echo": True}
    answers = []
    # The second time the prompt is cached on both nodes.
    for path in (paths.disaggregated, paths.aggregated, paths.disaggregated, paths.aggregated):
        status, answer = path.post("/v1/completions", body | {"prompt_logprobs": 1})
        assert status == 200, answer
        assert answer["pdserve"]["mode"] == ("disaggregated" if path is paths.disaggregated else "aggregated")
        choice = answer["choices"][0]
        answers.append((choice["logprobs"], choice["prompt_logprobs"]))
    assert all(answer == answers[0] for answer in answers)
    echoed, scores = answers[0]
    assert {len(values) for values in echoed.values()} == {length + 3}
    assert len(scores) == length
    assert scores[0] is echoed["token_logprobs"][0] is None
    for position, score in enumerate(scores[1:], start=1):
        row, entry = expected[position - 1], score[str(prompt[position])]
        wanted = pytest.approx(row[prompt[position]].item(), abs=1e-3)
        assert entry["logprob"] == echoed["token_logprobs"][position] == wanted
        assert abs(entry["rank"] - 1 - int((row > row[prompt[position]]).sum())) <= 2
        best = int(row.argmax())
        assert len(score) == (1 if prompt[position] == best else 2)
        assert score[str(best)]["rank"] == 1


# ---- the split after the first token: text ---------------------------------------------------------------------------


def spell(token_ids: Sequence[int]) -> dict[str, Any]:
    """Parameters that make any model say these tokens, which must differ from each other and from the prompt's."""
    assert len(set(token_ids)) == len(token_ids) <= 12
    bias = {str(token_id): 100.0 - 8.0 * place for place, token_id in enumerate(token_ids)}
    return {"logit_bias": bias, "repetition_penalty": 100.0}


def plain_and_streamed(path: Cluster, **body: Any) -> tuple[str, str, str, dict[str, Any]]:
    """Text of the plain answer, text of the stream; finish reason and usage, which are the same."""
    body = {"temperature": 0, **body}
    status, plain = path.post("/v1/completions", body)
    assert status == 200, plain
    events = list(path.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}}))
    choices = [event["choices"][0] for event in events if event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert reasons == [plain["choices"][0]["finish_reason"]]
    usage = events[-1]["usage"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert {name: usage[name] for name in counts} == {name: plain["usage"][name] for name in counts}
    streamed = "".join(choice["text"] for choice in choices)
    return plain["choices"][0]["text"], streamed, reasons[0], usage


QUESTION = [3 + ord(character) for character in "say it: "]
FAMILY = "❤️\u200d🔥"
WORDS = [" the", " and", " with", " that", " was", " from"]


def family_ids(paths: Paths) -> list[int]:
    """Two emoji and what joins them, in bytes; the joiner as one token, because no token may come twice."""
    joiner = paths.tokenizer.encode("\u200d", add_special_tokens=False)
    assert len(joiner) == 1
    left, right = FAMILY.split("\u200d")
    return [*(3 + byte for byte in left.encode()), *joiner, *(3 + byte for byte in right.encode())]


def word_ids(paths: Paths) -> list[int]:
    token_ids = [paths.tokenizer.encode(word, add_special_tokens=False) for word in WORDS]
    return [only for (only,) in token_ids]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_characters_are_never_split(paths, path, max_tokens):  # B87, B88
    token_ids = family_ids(paths)
    shown = b"".join(paths.tokenizer.token_bytes(token_id) for token_id in token_ids[:max_tokens])
    expected = shown.decode("utf-8", "ignore")
    plain, streamed, reason, usage = plain_and_streamed(
        path, prompt=QUESTION, max_tokens=max_tokens, **spell(token_ids)
    )
    assert plain == streamed == expected
    assert (reason, usage["completion_tokens"]) == ("length", max_tokens)
    if max_tokens == len(token_ids):
        assert plain == FAMILY


STOPS = {
    "the first token": ([" the"], "", 1),
    "inside the first token": (["th"], " ", 1),
    "over tokens 1 and 2": (["he an"], " t", 2),
    "over tokens 2 and 3": (["and with"], " the ", 3),
    "over four tokens": (["e and with t"], " th", 4),
    "one is the beginning of the other": (["and with that", "and wi"], " the ", 3),
    "the last token": (["from"], " the and with that was ", 6),
    "never complete": (["from here"], " the and with that was from", 6),
    "absent": (["zzz"], " the and with that was from", 6),
}


@pytest.mark.parametrize("name", STOPS)
def test_stop_strings(paths, path, name):  # B90, B93, B73
    stop, expected, num_tokens = STOPS[name]
    plain, streamed, reason, usage = plain_and_streamed(
        path, prompt=QUESTION, max_tokens=len(WORDS), stop=stop, **spell(word_ids(paths))
    )
    assert plain == streamed == expected
    assert usage["completion_tokens"] == num_tokens
    assert reason == ("length" if expected.endswith("from") else "stop")
    paths.disaggregated.wait_until_idle()


# ---- the split after the first token: limits and ends ----------------------------------------------------------------


@pytest.mark.parametrize("stop_id", [EOS_ID, 300], ids=["end id", "stop id"])
@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_first_token_is_the_end(paths, path, stop_id, max_tokens, ignore_eos):  # B45
    body: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "logit_bias": {str(stop_id): 100}}
    if stop_id != EOS_ID:
        body["stop_token_ids"] = [stop_id]
    ends = stop_id != EOS_ID or not ignore_eos
    before = paths.status(paths.decode).counters
    start = time.monotonic()
    plain, streamed, reason, usage = plain_and_streamed(path, prompt=make_prompt(40, seed=9), **body)
    paths.disaggregated.wait_until_idle()
    assert time.monotonic() - start < AT_ONCE_S
    assert plain == streamed == ""
    assert (reason, usage["completion_tokens"]) == (("stop", 1) if ends else ("length", max_tokens))
    after = paths.status(paths.decode).counters
    if path is paths.disaggregated and ends:
        assert after["generated_tokens"] == before["generated_tokens"], "the decode node had nothing to generate"
        assert after["requests_failed"] == before["requests_failed"]


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_very_short_outputs(models, paths, path, max_tokens):  # B73
    prompt = make_prompt(40, seed=10)
    before = paths.status(paths.decode).counters
    output = paths.run(path, prompt, max_tokens=max_tokens)
    assert output.token_ids == models.expected("llama", prompt)[:max_tokens]
    assert output.finish_reason == "length"
    assert output.usage == {"prompt_tokens": 40, "completion_tokens": max_tokens}
    assert output.text == paths.tokenizer.decode(output.token_ids)
    plain, streamed, _, usage = plain_and_streamed(path, prompt=prompt, max_tokens=max_tokens, ignore_eos=True)
    assert plain == streamed == output.text
    assert usage["completion_tokens"] == max_tokens
    if path is paths.disaggregated and max_tokens == 1:
        assert output.proof["mode"] == "prefill_only"
        assert paths.status(paths.decode).counters["steps"] == before["steps"]


@pytest.mark.parametrize(("min_tokens", "max_tokens", "expected"), [(0, 50, 1), (1, 50, 2), (10, 50, 11), (12, 12, 12)])
def test_min_tokens(paths, path, min_tokens, max_tokens, expected):  # B74
    """The end id is by far the most probable token: it comes as soon as it may."""
    body = {"min_tokens": min_tokens, "max_tokens": max_tokens, "ignore_eos": False}
    output = paths.run(path, make_prompt(40, seed=11), logit_bias={str(EOS_ID): 100}, **body)
    assert output.usage["completion_tokens"] == expected
    assert output.finish_reason == ("length" if expected == max_tokens else "stop")


def test_min_tokens_above_max_tokens_is_refused(path):  # B74
    status, answer = path.post("/v1/completions", {"prompt": [5], "min_tokens": 9, "max_tokens": 8})
    assert status == 400
    assert answer["error"]["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_completion_tokens": 100}, 100),
        ({"max_tokens": 60}, 60),
        ({"max_completion_tokens": 30, "max_tokens": 60}, 30),
        ({}, None),
    ],
)
def test_limits_of_a_chat(paths, path, limits, expected):  # B75
    messages = [{"role": "user", "content": "0" * (MAX_MODEL_LEN - 130)}]
    before = paths.status(paths.prefill).counters["generated_tokens"]
    status, answer = path.post(
        "/v1/chat/completions", {"messages": messages, "temperature": 0, "ignore_eos": True, **limits}
    )
    assert status == 200, answer
    usage = answer["usage"]
    assert usage["completion_tokens"] == (expected or MAX_MODEL_LEN - usage["prompt_tokens"]) >= 30
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"]
    generated = paths.status(paths.prefill).counters["generated_tokens"] - before
    assert generated == (1 if path is paths.disaggregated else 0)


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_logprobs_of_every_token(paths, max_tokens):  # B79
    prompt = make_prompt(CHUNK + 1, seed=12)
    disaggregated, aggregated = paths.run_both(prompt, max_tokens=max_tokens, logprobs=3)
    assert disaggregated == aggregated
    for values in disaggregated.logprobs.values():
        assert len(values) == max_tokens
    for value, top in zip(
        disaggregated.logprobs["token_logprobs"], disaggregated.logprobs["top_logprobs"], strict=True
    ):
        # Greedy: the chosen token is the most probable of the three.
        assert len(top) == 3
        assert value == max(top.values()) < 0


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_logprobs_of_every_token_of_a_chat(paths, max_tokens):  # B79
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 3,
    }
    contents = []
    for path in (paths.disaggregated, paths.aggregated):
        paths.reset(paths.prefill, paths.decode)
        status, answer = path.post("/v1/chat/completions", body)
        assert status == 200, answer
        contents.append(answer["choices"][0]["logprobs"]["content"])
    assert contents[0] == contents[1]
    assert [len(entry["top_logprobs"]) for entry in contents[0]] == [3] * max_tokens


# ---- in the long run -------------------------------------------------------------------------------------------------

ROUNDS = 100


def test_preempted_on_decode(paths):
    """Eight outputs grow until the decode node has no block left: what is preempted goes on as if nothing had been."""
    paths.reset(paths.prefill, paths.decode)
    requests = [(make_prompt(200, seed=20 + i), {"max_tokens": 150, "logprobs": 1}) for i in range(8)]
    before = paths.status(paths.decode).counters["preemptions"]
    together = paths.run_all(paths.disaggregated, requests)
    assert paths.status(paths.decode).counters["preemptions"] > before
    alone = paths.run_all(paths.aggregated, requests, at_once=4)
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    paths.disaggregated.wait_until_idle()


def test_answers_do_not_decay(models, paths):  # B16
    """The prompts of a round and what is aborted beside them need more blocks than there are."""
    prompts = [make_prompt(length, seed=13) for length in (1, BLOCK, 33, CHUNK, 129, 200, 600, 800)]
    expected = [models.expected("llama", prompt) for prompt in prompts]
    aborted = [make_prompt(length, seed=14) for length in (400, 700)]
    before = paths.status(paths.prefill).counters

    def abort(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        with closing(paths.disaggregated.stream("/v1/completions", body)) as events:
            next(events)

    def answer(prompt: list[int]) -> list[int]:
        return paths.run(paths.disaggregated, prompt, max_tokens=NUM_TOKENS).token_ids

    with ThreadPoolExecutor(len(prompts) + len(aborted)) as pool:
        for number in range(ROUNDS):
            shift = number % len(prompts)
            order = [*range(shift, len(prompts)), *range(shift)]
            gone = [pool.submit(abort, prompt) for prompt in aborted[: 1 + number % 2]]
            answers = {i: pool.submit(answer, prompts[i]) for i in order}
            for future in gone:
                future.result()
            assert [answers[i].result() for i in range(len(prompts))] == expected, f"round {number}"
    paths.disaggregated.wait_until_idle()
    computed = paths.status(paths.prefill).counters["prompt_tokens_computed"] - before["prompt_tokens_computed"]
    assert computed > 3 * sum(map(len, [*prompts, *aborted])), "nothing was ever evicted"
