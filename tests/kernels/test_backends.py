from __future__ import annotations

import math

import pytest
import torch
from pdserve_kernels.errors import NoSuchFamily, NotBuilt, UnknownBackend
from pdserve_kernels.interface import AttentionMetadata, AttentionSpec
from pdserve_kernels.select import select_backend
from pdserve_kernels.torch_backend import TorchBackend
from support.backends import BACKENDS, families, make_backend

BLOCK, LAYERS, HEADS, KV_HEADS, DIM = 4, 2, 6, 2, 8
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return make_backend(request.param)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_spec(window: int | None = None) -> AttentionSpec:
    angles = torch.arange(64.0).unsqueeze(1) * torch.tensor([1.0, 0.3, 0.1, 0.01])
    return AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        scale=DIM**-0.5,
        sliding_window=window,
        cos_MD=angles.cos(),
        sin_MD=angles.sin(),
        norm_eps=1e-6,
    )


def make_metadata(spans: list[tuple[int, int]], tables: list[list[int]]) -> AttentionMetadata:
    """``spans``: first position and end of each request's queries."""
    positions = [p for start, end in spans for p in range(start, end)]
    slots = [
        table[p // BLOCK] * BLOCK + p % BLOCK
        for (start, end), table in zip(spans, tables, strict=True)
        for p in range(start, end)
    ]
    lens = [end - start for start, end in spans]
    width = max(len(table) for table in tables)
    as_int = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    return AttentionMetadata(
        positions_T=as_int(positions),
        slots_T=as_int(slots),
        query_start_R1=as_int([sum(lens[:i]) for i in range(len(lens) + 1)]),
        seq_lens_R=as_int([end for _, end in spans]),
        block_tables_RP=as_int([table + [999_999] * (width - len(table)) for table in tables]),
        query_lens=lens,
        seq_lens=[end for _, end in spans],
    )


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rms_norm(backend, dtype, tolerance):
    x, weight, residual = (
        random(3, 16, dtype=dtype),
        random(16, seed=1, dtype=dtype),
        random(3, 16, seed=2, dtype=dtype),
    )
    total = (x + residual).double()
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-3) * weight.double()
    normed, new_residual = backend.rms_norm(x.clone(), weight, 1e-3, residual.clone())
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=tolerance)
    # Triton's interpreter cuts numbers to bfloat16 where a GPU rounds them.
    cut = type(backend).__name__ == "TritonBackend" and dtype == torch.bfloat16
    torch.testing.assert_close(new_residual, x + residual, rtol=2**-7 if cut else 0, atol=0)
    alone, passed_on = backend.rms_norm(x.clone(), weight, 1e-3)
    assert torch.equal(passed_on, x)
    assert not torch.equal(alone, normed)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_linear(backend, dtype, tolerance, with_bias, rows):
    x, weight = random(rows, 24, dtype=dtype), random(40, 24, seed=1, dtype=dtype)
    bias = random(40, seed=2, dtype=dtype) if with_bias else None
    y = backend.linear(x, backend.pack_linear(weight, bias))
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def test_logits_of_bfloat16_weights_are_not_rounded(backend):
    x, weight = random(5, 64, dtype=torch.bfloat16), random(100, 64, seed=1, dtype=torch.bfloat16)
    logits = backend.linear(x, backend.pack_linear(weight, float32_output=True))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=1e-6, atol=1e-5)
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("width", [10, 64, 200])
def test_gated_linear(backend, dtype, tolerance, width):
    x, weight = random(5, 24, dtype=dtype), random(2 * width, 24, seed=1, dtype=dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    y = backend.gated_linear(x, backend.pack_gate_up(weight))
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), gate / (1 + (-gate).exp()) * up, rtol=tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_and_write_kv(backend, with_norm):
    spec = make_spec()
    cache = torch.full((6, KV_HEADS, LAYERS, 2, BLOCK, DIM), -7.0)
    metadata = make_metadata([(2, 6), (0, 1)], [[3, 1], [5]])
    plan = backend.plan(metadata, spec, cache)
    qkv = random(5, (HEADS + 2 * KV_HEADS) * DIM)
    norms = (random(DIM, seed=3), random(DIM, seed=4)) if with_norm else (None, None)
    q = backend.rope_and_write_kv(qkv, 1, plan, *norms)
    heads = qkv.view(5, -1, DIM)

    def rotated(x: torch.Tensor, position: int, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            x = x / (x.square().mean() + 1e-6).sqrt() * norm
        out = torch.empty(DIM)
        for i in range(DIM // 2):
            a, b = x[i], x[i + DIM // 2]
            cos, sin = spec.cos_MD[position, i], spec.sin_MD[position, i]
            out[i], out[i + DIM // 2] = a * cos - b * sin, b * cos + a * sin
        return out

    expected = torch.full_like(cache, -7.0)
    for token, (position, block, offset) in enumerate([(2, 3, 2), (3, 3, 3), (4, 1, 0), (5, 1, 1), (0, 5, 0)]):
        for head in range(HEADS):
            torch.testing.assert_close(q[token, head], rotated(heads[token, head], position, norms[0]))
        for head in range(KV_HEADS):
            expected[block, head, 1, 0, offset] = rotated(heads[token, HEADS + head], position, norms[1])
            expected[block, head, 1, 1, offset] = heads[token, HEADS + KV_HEADS + head]
    torch.testing.assert_close(cache, expected)


SPANS = [(8, 9), (0, 7), (5, 14), (0, 1), (3, 4)]
TABLES = [[7, 2, 9], [0, 4], [11, 3, 8, 1], [5], [6]]


def naive_attention(q: torch.Tensor, cache: torch.Tensor, layer: int, window: int | None) -> torch.Tensor:
    rows = []
    token = 0
    for (start, end), table in zip(SPANS, TABLES, strict=True):
        for position in range(start, end):
            first = 0 if window is None else max(0, position - window + 1)
            slots = [(table[p // BLOCK], p % BLOCK) for p in range(first, position + 1)]
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                keys = torch.stack([cache[b, group, layer, 0, o] for b, o in slots]).double()
                values = torch.stack([cache[b, group, layer, 1, o] for b, o in slots]).double()
                scores = keys @ q[token, head].double() / math.sqrt(DIM)
                rows.append(torch.softmax(scores, 0) @ values)
            token += 1
    return torch.stack(rows).view(token, HEADS * DIM)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_paged_attention(backend, dtype, tolerance, window):
    cache = random(12, KV_HEADS, LAYERS, 2, BLOCK, DIM, dtype=dtype)
    q = random(sum(end - start for start, end in SPANS), HEADS, DIM, seed=1, dtype=dtype)
    plan = backend.plan(make_metadata(SPANS, TABLES), make_spec(window), cache)
    out = backend.paged_attention(q, 1, plan)
    expected = naive_attention(q, cache, 1, window)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_attention_of_a_request_does_not_depend_on_the_batch(backend):
    cache = random(12, KV_HEADS, LAYERS, 2, BLOCK, DIM, dtype=torch.bfloat16)
    q = random(sum(end - start for start, end in SPANS), HEADS, DIM, seed=1, dtype=torch.bfloat16)
    together = backend.paged_attention(q, 0, backend.plan(make_metadata(SPANS, TABLES), make_spec(), cache))
    token = 0
    for span, table in zip(SPANS, TABLES, strict=True):
        stop = token + span[1] - span[0]
        plan = backend.plan(make_metadata([span], [table]), make_spec(), cache)
        assert torch.equal(together[token:stop], backend.paged_attention(q[token:stop], 0, plan))
        token = stop


@pytest.mark.parametrize("family", families())
def test_int8_weights_are_near_the_others(family):
    from pdserve_kernels.cpu.backend import CpuBackend

    backend, exact = CpuBackend(family, int8=True), CpuBackend(family)
    x, weight = random(9, 96, dtype=torch.bfloat16), random(2 * 80, 96, seed=1, dtype=torch.bfloat16)
    weight[3] = 0
    y, expected = (b.linear(x, b.pack_linear(weight)).double() for b in (backend, exact))
    assert 0 < (y - expected).abs().max() < 0.02 * expected.abs().max()
    y, expected = (b.gated_linear(x, b.pack_gate_up(weight)).double() for b in (backend, exact))
    assert 0 < (y - expected).abs().max() < 0.02 * expected.abs().max()
    assert backend.fingerprint(torch.bfloat16) != exact.fingerprint(torch.bfloat16)


@pytest.mark.skipif(not families(), reason="the C kernels are not built")
def test_a_step_that_points_outside_its_tensors_is_refused():
    backend = select_backend("cpu")
    cache = torch.zeros(6, KV_HEADS, LAYERS, 2, BLOCK, DIM)
    for spans, table, reason in (
        ([(0, 4)], [6], "slot"),
        ([(4, 8)], [-1, 2], "block"),
        ([(60, 65)], [1] * 17, "position"),
    ):
        with pytest.raises(ValueError, match=reason):
            backend.plan(make_metadata(spans, [table]), make_spec(), cache)


def test_an_instruction_family_that_the_machine_lacks_is_refused(monkeypatch):
    if not families():
        pytest.skip("the C kernels are not built")
    monkeypatch.setenv("PDSERVE_CPU_ISA", "sparc")
    with pytest.raises(NoSuchFamily, match=r"'sparc'.*portable"):
        select_backend("cpu")
    monkeypatch.setenv("PDSERVE_CPU_ISA", "portable")
    assert "/portable/" in select_backend("auto").fingerprint(torch.float32)


def test_without_the_c_kernels_torch_serves_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("pdserve_kernels.cpu.is_built", lambda: False)
    assert isinstance(select_backend("auto"), TorchBackend)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(NotBuilt):
        select_backend("cpu")


def test_fingerprint_names_all_that_decides_bits():
    prints = [make_backend(name).fingerprint(dtype) for name in BACKENDS for dtype in (torch.bfloat16, torch.float32)]
    assert len(set(prints)) == len(prints)
    assert f"threads{torch.get_num_threads()}" in select_backend("torch").fingerprint(torch.float32)


def test_unknown_backend_is_refused_by_name():
    with pytest.raises(UnknownBackend, match=r"'cuda'.*auto, cpu, flash_attn, torch"):
        select_backend("cuda")
