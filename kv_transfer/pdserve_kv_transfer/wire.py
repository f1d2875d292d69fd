"""What travels over one link: the sender's blocks, how their numbers are stored on the way, how each is verified.

A pure value, worked out by both ends from the two identities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_kernels.kv_blocks import Number, Rows
from pdserve_protocol.node import kv_block_bytes

if TYPE_CHECKING:
    from pdserve_protocol.node import KVLayout, NodeIdentity

NUMBERS = {"bfloat16": Number.BF16, "float32": Number.F32, "int8": Number.INT8, "fp8": Number.FP8}

AXES = "GL2S"
"""The axes of rows, in the order of kv_blocks.Rows.strides: KV heads, layers, K|V, tokens."""


@dataclass(frozen=True, slots=True)
class Wire:
    """One block on the wire: rows in the order of the sender, then the scales of the rows where the numbers have any.

    Attributes:
        source, target: layouts of the sender's and the receiver's blocks.
        number: of what travels.
        digest: name of the digest; what is sealed has none.
        sealed: blocks are encrypted, and authenticated by the seal's tag.
        context: both processes; with the name of the region, which no other link has, part of the seal's key.
    """

    source: KVLayout
    target: KVLayout
    number: Number
    digest: str
    sealed: bool
    context: bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block on the wire."""
        return block_bytes(self.source, self.number)

    @property
    def source_rows(self) -> Rows:
        return rows_of(self.source, NUMBERS[self.source.dtype])

    @property
    def wire_rows(self) -> Rows:
        return rows_of(self.source, self.number)

    @property
    def target_rows(self) -> Rows:
        return rows_of(self.target, NUMBERS[self.target.dtype])

    @property
    def extents(self) -> tuple[int, int, int]:
        return self.source.num_kv_heads, self.source.num_layers, 2

    @property
    def is_packed(self) -> bool:
        """Whether the sender's numbers are converted before they travel."""
        return self.number != NUMBERS[self.source.dtype]

    @property
    def is_converted(self) -> bool:
        """Whether the receiver stores other bytes than travel."""
        return self.wire_rows != self.target_rows or self.source.block_size != self.target.block_size

    @property
    def is_lossy(self) -> bool:
        """Whether what arrives is less than what was sent."""
        return self.is_packed

    @property
    def name(self) -> str:
        """For operators and for names of blocks."""
        return _name_of(self.number)


def agree(sender: NodeIdentity, receiver: NodeIdentity) -> Wire:
    """The wire of a link between two nodes that do not mismatch."""
    chosen = sender.kv_wire_dtype
    return Wire(
        source=sender.layout,
        target=receiver.layout,
        number=NUMBERS[sender.layout.dtype if chosen == "auto" else chosen],
        digest=sender.digest,
        sealed=sender.kv_encrypt,
        context=f"{sender.boot_id}/{receiver.boot_id}".encode(),
    )


def rows_of(layout: KVLayout, number: Number) -> Rows:
    """Where the rows of a block of this layout lie, its numbers stored as ``number``."""
    strides = {axis: math.prod(layout.shape[index + 1 : -1]) for index, axis in enumerate(layout.order[:-1])}
    return Rows(
        number=number,
        dim=layout.head_dim,
        strides=(strides["G"], strides["L"], strides["2"], strides["S"]),
        scales_at=block_bytes(layout, number) - 4 * num_rows(layout) if number.scaled else None,
    )


def num_rows(layout: KVLayout) -> int:
    """Rows of head_dim numbers in a block."""
    return layout.num_kv_heads * layout.num_layers * 2 * layout.block_size


def block_bytes(layout: KVLayout, number: Number) -> int:
    """Bytes of a block of this layout, its numbers stored as ``number``, with their scales."""
    return kv_block_bytes(num_rows(layout), layout.head_dim, _name_of(number))


def _name_of(number: Number) -> str:
    return next(name for name, known in NUMBERS.items() if known == number)
