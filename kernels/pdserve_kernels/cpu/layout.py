"""The structs that C reads: the fields of csrc/kernels.h, in its order, and its numbers."""

from __future__ import annotations

import ctypes
from enum import IntEnum

PANEL = 64
"""Outputs of a panel of weights."""

CHUNK = 32
"""Inputs of bfloat16 weights come in multiples of this."""


class DType(IntEnum):
    BF16 = 0
    F32 = 1


class Weights(IntEnum):
    BF16 = 0
    F32 = 1
    INT8 = 2


class Epilogue(IntEnum):
    STORE = 0
    STORE_F32 = 1
    ADD_F32 = 2
    SILU_MUL = 3


def _integers(names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(name, ctypes.c_int64) for name in names.split()]


class Linear(ctypes.Structure):
    _fields_ = _integers("weights inputs outputs panels bias scales")


class Layer(ctypes.Structure):
    _fields_ = [
        *_integers("input_norm q_norm k_norm mlp_norm"),
        *[(name, Linear) for name in ("qkv", "output", "gate_up", "down")],
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *_integers("dtype num_layers hidden inner vocab num_heads num_kv_heads head_dim window num_positions cos sin"),
        ("scale", ctypes.c_double),
        ("eps", ctypes.c_double),
        *_integers("embedding final_norm layers"),
        ("head", Linear),
    ]


class Step(ctypes.Structure):
    _fields_ = _integers(
        "num_tokens num_requests num_logits token_ids positions slots query_start seq_lens block_tables block_stride"
        " kv_cache num_blocks block_size kv_head_rows kv_layer_rows kv_number block_bytes scales_at logits_rows logits"
        " scratch scratch_tokens"
    )
