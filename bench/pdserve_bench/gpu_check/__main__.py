"""`python -m pdserve_bench.gpu_check`: the whole check, and its verdict.

Exit codes: 0 all is right; 1 something is wrong; 3 there is no CUDA device, and nothing was checked; 4 the kernels are
right, and the rest was not checked, because a package is missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

RIGHT, WRONG, NO_DEVICE, NOT_ALL = 0, 1, 3, 4

NEEDED = ("msgspec", "zmq", "numpy", "safetensors", "tokenizers", "xxhash", "tqdm")
"""What a node imports beside torch; NIXL is used where it is there, else blocks travel over plain sockets."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu tries the course of the check with a tiny model, and checks no kernel (default: %(default)s)",
    )
    device = parser.parse_args(argv).device
    if device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was checked")
        return NO_DEVICE
    began = time.perf_counter()
    wrong, bandwidth = check_kernels() if device == "cuda" else ([], None)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        # Not before it is known that what it imports is there.
        from pdserve_bench.gpu_check.whole import check_whole

        wrong += check_whole(device, bandwidth)
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    if missing:
        print(f"steps and nodes were not checked: {', '.join(missing)} not installed")
    if wrong:
        print("\n".join(f"WRONG: {what}" for what in wrong))
        return WRONG
    print("all that was checked is right")
    return NOT_ALL if missing else RIGHT


def check_kernels() -> tuple[list[str], float | None]:
    """What is wrong, and the bandwidth of the device in bytes a second, as far as there is Triton to measure it."""
    if find_spec("triton") is None:
        return ["triton is not installed: no kernel was checked"], None
    from pdserve_kernels.triton_gpu import check

    bandwidth = check.device_bandwidth(torch.device("cuda"))
    return ["a kernel is off its reference"] if check.main() != 0 else [], bandwidth


if __name__ == "__main__":
    sys.exit(main())
