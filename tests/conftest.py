"""Triton's kernels run in its interpreter here; it reads this when it is first imported, by whichever test that is."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
