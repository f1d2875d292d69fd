"""Attention by the flash_attn package on GPUs, an optional dependency: importing this package does not import it.

backend.py      FlashAttnBackend
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_SIZE_UNIT = 256
"""Tokens of a block come in multiples of this."""


def is_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def suits(block_size: int, dtype: torch.dtype | None) -> bool:
    """Whether flash_attn can work on a cache of such blocks."""
    return block_size % BLOCK_SIZE_UNIT == 0 and str(dtype) in ("torch.bfloat16", "torch.float16")
