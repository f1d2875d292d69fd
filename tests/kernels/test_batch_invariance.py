"""Bits of a row do not depend on the rows beside it: not on their number, their order, the chunks of a prompt, the
blocks its KV lies in, or the number of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from pdserve_kernels import cpu
from pdserve_kernels.interface import AttentionMetadata, AttentionSpec, DecoderWeights, LayerWeights
from pdserve_kernels.quantized_cache import codes_of, scales_of
from support.backends import families, make_backend

pytestmark = pytest.mark.skipif(not cpu.is_built(), reason="the C kernels are not built")

DTYPES = [torch.bfloat16, torch.float32]
BLOCK = 16
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 96, 72, 80, 6, 2, 24, 3


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [40, 192])
def test_a_row_of_a_product_does_not_depend_on_the_others(family, dtype, inputs):
    backend = make_backend(f"cpu-{family}")
    x, weight = random(70, inputs).to(dtype), random(130, inputs, seed=1).to(dtype)
    for packed, apply in (
        (backend.pack_linear(weight), backend.linear),
        (backend.pack_linear(weight, float32_output=True), backend.linear),
        (backend.pack_gate_up(weight), backend.gated_linear),
    ):
        together = apply(x, packed)
        for rows in (1, 2, 3, 4, 5, 6, 7, 13, 33):
            for start in (0, 1, 37):
                assert torch.equal(apply(x[start : start + rows], packed), together[start : start + rows])


class Model:
    """A small decoder with random weights, on one backend; computes requests by hand."""

    def __init__(self, family: str, dtype: torch.dtype, window: int | None, codes: torch.dtype | None = None) -> None:
        backend = make_backend(f"cpu-{family}")
        seeds = iter(range(1000))

        def weight(*shape: int) -> torch.Tensor:
            return (random(*shape, seed=next(seeds)) * 1.5 * shape[-1] ** -0.5).to(dtype)

        layers = [
            LayerWeights(
                input_norm_E=1 + weight(HIDDEN),
                qkv=backend.pack_linear(weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)),
                q_norm_D=1 + weight(DIM),
                k_norm_D=1 + weight(DIM),
                output=backend.pack_linear(weight(HIDDEN, HEADS * DIM)),
                mlp_norm_E=1 + weight(HIDDEN),
                gate_up=backend.pack_gate_up(weight(2 * INNER, HIDDEN)),
                down=backend.pack_linear(weight(HIDDEN, INNER)),
            )
            for _ in range(LAYERS)
        ]
        head = backend.pack_linear(weight(VOCAB, HIDDEN), float32_output=True)
        weights = DecoderWeights(
            embedding_VE=weight(VOCAB, HIDDEN) * 8, layers=layers, norm_E=1 + weight(HIDDEN), head=head
        )
        angles = torch.arange(300.0).unsqueeze(1) * torch.logspace(0, -3, DIM // 2)
        spec = AttentionSpec(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            scale=DIM**-0.5,
            sliding_window=window,
            cos_MD=angles.cos(),
            sin_MD=angles.sin(),
            norm_eps=1e-6,
        )
        self.backend = backend
        self.forward = backend.decoder(weights, spec)
        self.dtype = dtype
        self.codes = codes

    def run(
        self,
        prompts: list[list[int]],
        steps: list[list[tuple[int, int]]],
        blocks: list[int],
        *,
        heads_first: bool = False,
    ) -> list[torch.Tensor]:
        """Logits [len(prompt), V] of each prompt; a step is a list of (prompt, tokens to compute), in batch order."""
        axes = (KV_HEADS, LAYERS) if heads_first else (LAYERS, KV_HEADS)
        shape = (*axes, 2, BLOCK, DIM)
        kv_cache = torch.full((len(blocks), *shape), float("nan"), dtype=self.dtype)
        if self.codes is not None:
            bytes_NB = torch.full((len(blocks), KV_HEADS * LAYERS * 2 * BLOCK * (DIM + 4)), 255, dtype=torch.uint8)
            kv_cache = codes_of(bytes_NB, self.codes, shape)
        if not heads_first:
            kv_cache = kv_cache.transpose(1, 2)
        self.kv_cache = kv_cache
        tables, free = [], list(blocks)
        for prompt in prompts:
            tables.append([free.pop() for _ in range(-(-len(prompt) // BLOCK))])
        done = [0] * len(prompts)
        logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        as_int = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
        for step in steps:
            spans = [(index, done[index], min(done[index] + count, len(prompts[index]))) for index, count in step]
            spans = [span for span in spans if span[1] < span[2]]
            if not spans:
                continue
            where = [(index, p) for index, start, end in spans for p in range(start, end)]
            lens = [end - start for _, start, end in spans]
            width = max(len(table) for table in tables)
            out = self.forward(
                as_int([prompts[index][p] for index, p in where]),
                AttentionMetadata(
                    positions_T=as_int([p for _, p in where]),
                    slots_T=as_int([tables[index][p // BLOCK] * BLOCK + p % BLOCK for index, p in where]),
                    query_start_R1=as_int([sum(lens[:i]) for i in range(len(lens) + 1)]),
                    seq_lens_R=as_int([end for _, _, end in spans]),
                    block_tables_RP=as_int([tables[i] + [-5] * (width - len(tables[i])) for i, _, _ in spans]),
                    query_lens=lens,
                    seq_lens=[end for _, _, end in spans],
                ),
                kv_cache,
                torch.arange(len(where)),
            ).clone()
            for row, (index, _) in zip(out, where, strict=True):
                logits[index].append(row)
            for index, _, end in spans:
                done[index] = end
        return [torch.stack(rows) for rows in logits]


PROMPTS = [[(7 * i * i + 3 * i + seed) % VOCAB for i in range(length)] for seed, length in enumerate([1, 150, 16, 77])]
NUM_BLOCKS = 24


KINDS = [(f, d, w) for f in families() for d in DTYPES for w in (None, 50)]
KINDS += [(f, torch.bfloat16, None, codes) for f in families() for codes in (torch.int8, torch.float8_e4m3fn)]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def model_and_alone(request):
    """A model, and the logits of each prompt when it is computed whole and alone."""
    model = Model(*request.param)
    blocks = list(range(NUM_BLOCKS))
    return model, [model.run([prompt], [[(0, len(prompt))]], blocks)[0] for prompt in PROMPTS]


@st.composite
def schedules(draw):
    """Steps in which all prompts are computed to their ends, in chunks and orders of all kinds."""
    left = [len(prompt) for prompt in PROMPTS]
    steps = []
    while any(left):
        order = draw(st.permutations(range(len(PROMPTS))))
        chunks = draw(st.lists(st.sampled_from([0, 1, 5, 16, 31, 64, 70, 150]), min_size=4, max_size=4))
        step = [(i, chunk) for i, chunk in zip(order, chunks, strict=True) if left[i] and chunk] or [
            (next(i for i in order if left[i]), 29)
        ]
        for i, chunk in step:
            left[i] = max(0, left[i] - chunk)
        steps.append(step)
    return steps


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(steps=schedules(), blocks=st.permutations(range(NUM_BLOCKS)), threads=st.sampled_from([1, 2, 3]))
def test_logits_are_the_same_in_any_batch_and_chunks(model_and_alone, steps, blocks, threads):
    model, alone = model_and_alone
    model.backend.set_threads(threads)
    try:
        found = model.run(PROMPTS, steps, blocks)
    finally:
        model.backend.set_threads(1)
    for index, (expected, logits) in enumerate(zip(alone, found, strict=True)):
        assert torch.equal(logits, expected), f"prompt {index}"
        assert logits.isfinite().all()


def test_keys_and_values_are_the_same_with_heads_before_layers(model_and_alone):
    model, alone = model_and_alone
    prompt, caches = PROMPTS[1], []
    for heads_first in (False, True):
        logits = model.run([prompt], [[(0, len(prompt))]], list(range(NUM_BLOCKS)), heads_first=heads_first)[0]
        assert torch.equal(logits, alone[1])
        caches.append(model.kv_cache)
    assert caches[0].stride() != caches[1].stride()
    written = [cache[-(len(prompt) // BLOCK) :].float() for cache in caches]
    assert torch.equal(*written)
    assert written[0].isfinite().all()
    if model.codes is not None:
        assert torch.equal(*(scales_of(cache)[-(len(prompt) // BLOCK) :] for cache in caches))


def test_logits_are_not_all_alike(model_and_alone):
    _, alone = model_and_alone
    assert len({int(row.argmax()) for logits in alone for row in logits}) > 20


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "block"), [(64, 9, 3, 16), (64, 4, 2, 48), (128, 8, 1, 32), (64, 6, 2, 8)]
)
@pytest.mark.parametrize("window", [None, 50])
def test_a_query_alone_sees_what_it_sees_in_a_chunk(family, dim, heads, kv_heads, block, window):
    """Single queries take keys as they lie in the cache, with a path of their own; what lies after them is garbage."""
    backend = make_backend(f"cpu-{family}")
    tokens, layer = 150, 1
    num_blocks = -(-tokens // block)
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        sliding_window=window,
        cos_MD=torch.ones(tokens, dim // 2),
        sin_MD=torch.zeros(tokens, dim // 2),
        norm_eps=1e-6,
    )
    cache = random(num_blocks, 2, kv_heads, 2, block, dim).bfloat16().transpose(1, 2)
    q = random(tokens, heads, dim, seed=1).bfloat16()
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).to(torch.int32).unsqueeze(0)

    def attend(first: int, last: int, kv_cache: torch.Tensor) -> torch.Tensor:
        metadata = AttentionMetadata(
            positions_T=torch.arange(first, last, dtype=torch.int32),
            slots_T=torch.zeros(last - first, dtype=torch.int32),
            query_start_R1=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens_R=torch.tensor([last], dtype=torch.int32),
            block_tables_RP=table,
            query_lens=[last - first],
            seq_lens=[last],
        )
        return backend.paged_attention(q[first:last], layer, backend.plan(metadata, spec, kv_cache))

    together = attend(0, tokens, cache)
    for position in (0, 1, 15, 16, 40, 63, 64, 79, 80, 127, 128, 149):
        forgotten = cache.clone()
        for index in range(position + 1, num_blocks * block):
            forgotten[int(table[0, index // block]), :, :, :, index % block] = float("nan")
        assert torch.equal(attend(position, position + 1, forgotten)[0], together[position]), position


@pytest.mark.parametrize("family", families())
def test_other_libraries_may_use_the_same_registers(family):
    """torch's products leave AMX tiles released, or of another shape."""
    backend = make_backend(f"cpu-{family}")
    packed = backend.pack_linear(random(64, 64).bfloat16())
    x = random(5, 64, seed=1).bfloat16()
    before = backend.linear(x, packed)
    for rows in (3, 128):
        torch.nn.functional.linear(random(rows, 256).bfloat16(), random(256, 256).bfloat16())
        assert torch.equal(backend.linear(x, packed), before)
