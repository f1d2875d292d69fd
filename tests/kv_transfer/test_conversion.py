"""Blocks between unlike caches: block size, order of axes, dtype; and what a lossy wire keeps of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from pdserve_kernels import kv_blocks_reference as reference
from pdserve_kernels.kv_blocks import Conversion
from pdserve_kv_transfer.codec import Lander, Packer
from pdserve_kv_transfer.spans import copy_runs, positions_to_send
from pdserve_kv_transfer.wire import Wire, agree
from pdserve_protocol.node import SCALED_KV_DTYPES, KVLayout, kv_block_bytes, mismatch
from support.handoff_world import identity

HEADS, LAYERS, DIM = 2, 3, 8
HND, NHD = "GL2SD", "L2SGD"
SECRET = "secret"


def layout(block_size: int = 16, dtype: str = "float32", order: str = HND) -> KVLayout:
    return KVLayout(
        block_size=block_size,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=dtype,
        block_bytes=kv_block_bytes(2 * block_size * LAYERS * HEADS, DIM, dtype),
        order=order,
    )


def wire_between(source: KVLayout, target: KVLayout, wire_dtype: str = "auto", *, sealed: bool = False) -> Wire:
    common = {"kv_wire_dtype": wire_dtype, "kv_encrypt": sealed}
    sender, receiver = identity("p", layout=source, **common), identity("d", layout=target, **common)
    assert mismatch(sender, receiver) is None
    return agree(sender, receiver)


class Cache:
    """A KV cache whose entry of every token, head, layer, K|V and dimension is known."""

    def __init__(self, layout: KVLayout, num_blocks: int = 12) -> None:
        self.layout = layout
        self.blocks = np.zeros((num_blocks, layout.block_bytes), dtype=np.uint8)

    def tokens(self, table: list[int]) -> np.ndarray:
        """Float32 [tokens, heads, layers, 2, dim] of the blocks of a sequence."""
        sizes = {"G": HEADS, "L": LAYERS, "2": 2, "S": self.layout.block_size, "D": DIM}
        shape = [sizes[axis] for axis in self.layout.order]
        raw = self.blocks[table]
        if self.has_scales:
            num_codes = 2 * self.layout.block_size * LAYERS * HEADS * DIM
            codes, scales = raw[:, :num_codes], raw[:, num_codes:].copy().view(np.float32)
            numbers = reference.E4M3_VALUES[codes] if self.layout.dtype == "fp8" else codes.view(np.int8)
            values = numbers.astype(np.float32).reshape(*scales.shape, DIM) * scales[..., None]
        elif self.layout.dtype == "bfloat16":
            values = np.left_shift(raw.view(np.uint16).astype(np.uint32), 16).view(np.float32)
        else:
            values = raw.view(np.float32)
        values = values.reshape(len(table), *shape)
        axes = [0, *(1 + self.layout.order.index(axis) for axis in "SGL2D")]
        return values.transpose(axes).reshape(-1, HEADS, LAYERS, 2, DIM)

    def fill(self, table: list[int], seed: int) -> np.ndarray:
        """Random tokens; returns them as ``tokens`` does."""
        if self.has_scales:
            plain = Cache(layout(self.layout.block_size, order=self.layout.order), len(self.blocks))
            plain.fill(table, seed)
            to_codes = wire_between(plain.layout, self.layout)
            conversion = Conversion(to_codes.source_rows, to_codes.target_rows, to_codes.extents)
            for block in table:
                conversion.run(plain.blocks[block], self.blocks[block], 0, 0, self.layout.block_size)
            return self.tokens(table)
        values = np.random.default_rng(seed).standard_normal(self.blocks[table].size // (4 if self.is_f32 else 2))
        values = values.astype(np.float32)
        raw = values.view(np.uint8) if self.is_f32 else reference.to_bf16(values).view(np.uint8)
        self.blocks[table] = raw.reshape(len(table), -1)
        return self.tokens(table)

    @property
    def has_scales(self) -> bool:
        return self.layout.dtype in SCALED_KV_DTYPES

    @property
    def is_f32(self) -> bool:
        return self.layout.dtype == "float32"


def send(
    source: Cache,
    source_table: list[int],
    target: Cache,
    target_table: list[int],
    wire: Wire,
    num_tokens: int,
    num_cached: int = 0,
) -> None:
    """What the mover and the engine do for one prompt, without a mover and an engine."""
    packer = Packer(source.blocks, wire, "r", SECRET)
    lander = Lander(target.blocks, wire, "r", SECRET)
    assert packer.slot_bytes == lander.slot_bytes == wire.slot_bytes
    size = source.layout.block_size
    for position in positions_to_send(num_tokens, num_cached, size):
        block = source_table[position // size]
        staging = np.zeros(packer.slot_bytes, dtype=np.uint8) if packer.is_staged else None
        tag = packer.pack(block, "id", position, staging)
        slot = staging if staging is not None else source.blocks[block].copy()
        runs = copy_runs(position, size, target.layout.block_size, num_cached, num_tokens)
        placed = [run._replace(target=target_table[run.target]) for run in runs]
        whole = target_table[position // size] if size == target.layout.block_size else placed
        assert lander.land(slot, tag, "id", position, whole)


@settings(max_examples=300, deadline=None)
@given(
    source_size=st.integers(1, 48),
    target_size=st.integers(1, 48),
    num_tokens=st.integers(1, 200),
    num_cached_blocks=st.integers(0, 6),
)
def test_runs_cover_what_is_needed_once(
    source_size: int, target_size: int, num_tokens: int, num_cached_blocks: int
) -> None:
    first = min(num_cached_blocks * target_size, num_tokens)
    covered: list[tuple[int, int]] = []
    for position in positions_to_send(num_tokens, first, source_size):
        assert position % source_size == 0
        runs = copy_runs(position, source_size, target_size, first, num_tokens)
        assert runs, "a block is sent for nothing"
        for target, source_token, target_token, count in runs:
            assert count > 0
            assert target_token + count <= target_size
            assert source_token + count <= source_size
            assert target * target_size + target_token == position + source_token
            covered += [(target, target_token + offset) for offset in range(count)]
    assert covered == [divmod(token, target_size) for token in range(first, num_tokens)]


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 48), (48, 16), (16, 16)])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 96])
def test_block_sizes_may_differ(sizes: tuple[int, int], num_tokens: int) -> None:
    # B09
    source, target = Cache(layout(sizes[0])), Cache(layout(sizes[1]))
    source_table, target_table = [5, 2, 9, 0, 7, 3], [1, 8, 4, 6, 10, 0]
    sent = source.fill(source_table, seed=1)
    cached = target.fill(target_table[:1], seed=2).copy()
    hits = sizes[1] if num_tokens > sizes[1] else 0
    send(source, source_table, target, target_table, wire_between(source.layout, target.layout), num_tokens, hits)
    landed = target.tokens(target_table)
    assert np.array_equal(landed[hits:num_tokens], sent[hits:num_tokens])
    assert np.array_equal(landed[:hits], cached[:hits]), "a cached block is shared and must not change"
    if sizes[0] != sizes[1]:
        assert not landed[max(num_tokens, sizes[1]) :].any(), "tokens that do not exist are written"


@pytest.mark.parametrize("orders", list(product([HND, NHD, "L2GSD"], repeat=2)))
@pytest.mark.parametrize("dtypes", list(product(["float32", "bfloat16"], repeat=2)))
@pytest.mark.parametrize("sizes", [(16, 16), (16, 24)])
@pytest.mark.parametrize("sealed", [False, True])
def test_orders_and_dtypes_may_differ(
    orders: tuple[str, str], dtypes: tuple[str, str], sizes: tuple[int, int], sealed: bool
) -> None:
    source = Cache(layout(sizes[0], dtypes[0], orders[0]))
    target = Cache(layout(sizes[1], dtypes[1], orders[1]))
    wire = wire_between(source.layout, target.layout, sealed=sealed)
    assert not wire.is_lossy
    sent = source.fill([3, 1], seed=4)
    send(source, [3, 1], target, [2, 7], wire, 30)
    landed = target.tokens([2, 7])[:30]
    if dtypes == ("float32", "bfloat16"):
        rounded = reference.to_bf16(np.ascontiguousarray(sent)).astype(np.uint32)
        sent = np.left_shift(rounded, 16).view(np.float32)
    assert np.array_equal(landed, sent[:30])


@pytest.mark.parametrize(("wire_dtype", "error"), [("int8", 1 / 250), ("fp8", 1 / 14), ("bfloat16", 1 / 250)])
@pytest.mark.parametrize("orders", [(HND, HND), (NHD, HND)])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_lossy_wire_is_close(wire_dtype: str, error: float, orders: tuple[str, str], sealed: bool) -> None:
    source, target = Cache(layout(order=orders[0])), Cache(layout(32, order=orders[1]))
    wire = wire_between(source.layout, target.layout, wire_dtype, sealed=sealed)
    assert wire.is_lossy
    sent = source.fill([3, 1], seed=4)
    send(source, [3, 1], target, [2], wire, 32)
    landed = target.tokens([2])
    most = np.abs(sent).max(axis=-1, keepdims=True)
    assert (np.abs(landed - sent) <= most * error).all()
    assert not np.array_equal(landed, sent)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("orders", [(HND, HND), (NHD, HND)])
@pytest.mark.parametrize("sizes", [(16, 16), (16, 24), (24, 16)])
@pytest.mark.parametrize("wire_dtype", ["auto", "the same"])
def test_codes_land_as_they_are(dtype: str, orders: tuple[str, str], sizes: tuple[int, int], wire_dtype: str) -> None:
    source, target = (Cache(layout(size, dtype, order)) for size, order in zip(sizes, orders, strict=True))
    wire = wire_between(source.layout, target.layout, dtype if wire_dtype == "the same" else "auto")
    assert not wire.is_lossy
    assert not Packer(source.blocks, wire).is_staged
    sent = source.fill([3, 1], seed=4)
    send(source, [3, 1], target, [2, 7], wire, 30)
    assert np.array_equal(target.tokens([2, 7])[:30], sent[:30])
    if orders[0] == orders[1] and sizes[0] == sizes[1]:
        assert not wire.is_converted
        assert np.array_equal(target.blocks[2], source.blocks[3])


@pytest.mark.parametrize("dtypes", list(product(["bfloat16", "int8", "fp8"], repeat=2)), ids="-".join)
@pytest.mark.parametrize("wire_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("sealed", [False, True])
def test_unlike_caches_and_wires_are_close(dtypes: tuple[str, str], wire_dtype: str, sealed: bool) -> None:
    errors = {"bfloat16": 1 / 250, "int8": 1 / 250, "fp8": 1 / 14}
    source, target = Cache(layout(16, dtypes[0])), Cache(layout(16, dtypes[1]))
    wire = wire_between(source.layout, target.layout, wire_dtype, sealed=sealed)
    sent = source.fill([3, 1], seed=4)
    send(source, [3, 1], target, [2, 7], wire, 32)
    most = np.abs(sent).max(axis=-1, keepdims=True)
    assert (np.abs(target.tokens([2, 7]) - sent) <= most * (errors[wire.name] + errors[dtypes[1]])).all()
    # What is sent as the receiver caches it is copied; what the sender caches so is not packed.
    assert wire.is_lossy == (wire.name != dtypes[0])
    assert wire.is_converted == (wire.name != dtypes[1])


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_layouts_of_codes(dtype: str) -> None:
    """As many bytes as on the wire, which is 1.88 times the tokens of bfloat16 for the heads of SmolLM2."""
    rows = 16 * 30 * 3 * 2
    good = KVLayout(
        block_size=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype=dtype, block_bytes=rows * 64 + rows * 4
    )
    plain = KVLayout(block_size=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_bytes=368640)
    assert good.fault() is None
    assert plain.block_bytes / good.block_bytes == pytest.approx(1.88, abs=0.01)
    assert wire_between(plain, good, dtype).slot_bytes == good.block_bytes
    for wrong in (rows * 64, plain.block_bytes):
        values = {name: getattr(good, name) for name in KVLayout.__struct_fields__} | {"block_bytes": wrong}
        assert "bytes are not" in (KVLayout(**values).fault() or "")
    assert kv_block_bytes(3, 3, dtype) == 12 + 12, "scales begin at a multiple of four bytes"


def test_int8_takes_little_more_than_half_of_bfloat16() -> None:
    smollm2 = KVLayout(block_size=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_bytes=368640)
    for wire_dtype in ("int8", "fp8"):
        wire = wire_between(smollm2, smollm2, wire_dtype)
        assert wire.slot_bytes <= 0.55 * smollm2.block_bytes


def test_plain_blocks_are_not_copied_to_be_sent() -> None:
    cache = Cache(layout())
    assert not Packer(cache.blocks, wire_between(cache.layout, cache.layout)).is_staged
    # What the receiver converts costs the sender nothing either.
    assert not Packer(cache.blocks, wire_between(cache.layout, layout(32, "bfloat16", NHD))).is_staged


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("target_size", [16, 32])
@pytest.mark.parametrize("wire_dtype", ["auto", "int8"])
def test_a_damaged_block_leaves_nothing(sealed: bool, target_size: int, wire_dtype: str) -> None:
    source, target = Cache(layout()), Cache(layout(target_size))
    wire = wire_between(source.layout, target.layout, wire_dtype, sealed=sealed)
    source.fill([1], seed=1)
    packer, lander = Packer(source.blocks, wire, "r", SECRET), Lander(target.blocks, wire, "r", SECRET)
    staging = np.zeros(wire.slot_bytes, dtype=np.uint8)
    tag = packer.pack(1, "id", 0, staging if packer.is_staged else None)
    slot = staging if packer.is_staged else source.blocks[1].copy()
    slot[777] ^= 4
    where = 3 if target_size == 16 else [run._replace(target=3) for run in copy_runs(0, 16, target_size, 0, 16)]
    assert not lander.land(slot, tag, "id", 0, where)
    assert not target.blocks.any()
    slot[777] ^= 4
    assert lander.land(slot, tag, "id", 0, where)
    assert target.blocks[3].any()


def test_a_partly_cached_block_stays_when_its_rest_is_damaged() -> None:
    source, target = Cache(layout()), Cache(layout(32))
    before = target.fill([3], seed=9).copy()
    source.fill([1], seed=1)
    wire = wire_between(source.layout, target.layout)
    slot = source.blocks[1].copy()
    tag = Packer(source.blocks, wire).pack(1, "id", 16, None)
    slot[5] ^= 1
    runs = [run._replace(target=3) for run in copy_runs(16, 16, 32, 0, 32)]
    assert not Lander(target.blocks, wire).land(slot, tag, "id", 16, runs)
    assert np.array_equal(target.tokens([3]), before)


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"head_dim": 4096},
        {"dtype": "float64"},
        {"order": "GL2DS"},
        {"order": "GG2SD"},
        {"block_bytes": 1},
        {"num_layers": -3},
    ],
)
def test_a_layout_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    values = {name: getattr(layout(), name) for name in KVLayout.__struct_fields__} | change
    broken = KVLayout(**values)
    assert broken.fault() is not None
    assert "layout" in (mismatch(identity("p", layout=broken), identity("d", layout=broken)) or "")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model_id": "x"}, "rope"),
        ({"tokenizer_id": "x"}, "vocabulary"),
        ({"digest": "crc"}, "digest"),
        ({"kv_wire_dtype": "int8"}, "kv_wire_dtype"),
        ({"kv_encrypt": True}, "kv_encrypt"),
        ({"layout": KVLayout(16, 9, HEADS, DIM, "float32", 9)}, "num_layers"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(change: dict[str, object], name: str) -> None:
    sender = identity("p", layout=layout())
    receiver = identity("d", **({"layout": layout()} | change))
    assert name in (mismatch(sender, receiver) or "")
