"""What the tests run on: CPUs, also where there is a GPU.

Triton's kernels run in its interpreter, which it learns when it is first imported, by whichever test that is.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
