"""The parts that need a whole engine: decode steps, and a pair of nodes. Each returns what is wrong, in words."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve_kernels import flash_attn

from pdserve_bench.errors import NodeFailed
from pdserve_bench.gpu_check.model import QWEN3_0_6B, TINY, Shape, write_model
from pdserve_bench.gpu_check.pair import PairConfig, run_pair
from pdserve_bench.gpu_check.steps import StepsConfig, run_decodes

if TYPE_CHECKING:
    from pdserve_engine.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Attributes:
    prompt_len, num_steps, batch_sizes: of the decode steps.
    prompt_lens, concurrency: of the requests to the pair of nodes.
    kv_cache_memory: of each node.
    """

    shape: Shape
    prompt_len: int
    num_steps: int
    batch_sizes: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    concurrency: int
    kv_cache_memory: str


FULL = Sizes(
    shape=QWEN3_0_6B,
    prompt_len=1024,
    num_steps=48,
    batch_sizes=(1, 16, 64),
    prompt_lens=(17, 500, 2000),
    concurrency=16,
    kv_cache_memory="5GiB",
)
DRY = Sizes(
    shape=TINY,
    prompt_len=20,
    num_steps=4,
    batch_sizes=(1, 3),
    prompt_lens=(5, 70),
    concurrency=3,
    kv_cache_memory="16MiB",
)


def check_whole(device: Device, bandwidth: float | None) -> list[str]:
    """``bandwidth``: bytes a second of the device's memory; None prints no floor."""
    sizes = FULL if device == "cuda" else DRY
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        write_model(folder, sizes.shape, max_model_len=max(*sizes.prompt_lens, sizes.prompt_len) + 200)
        return [*check_steps(folder, device, sizes, bandwidth), *check_pair(folder, device, sizes)]


def check_steps(folder: Path, device: Device, sizes: Sizes, bandwidth: float | None) -> list[str]:
    """Decode steps launch by launch and, on a GPU, with graphs, for each block size that a backend wants."""
    wrong = []
    block_sizes = [16, *([256] if device == "cuda" and flash_attn.is_installed() else [])]
    print(f"\n{'decode step':<40} {'eager ms':>9} {'graph ms':>9} {'floor ms':>9} {'ratio':>6}")
    for block_size in block_sizes:
        config = StepsConfig(
            folder=folder,
            device=device,
            prompt_len=sizes.prompt_len,
            num_steps=sizes.num_steps,
            batch_sizes=sizes.batch_sizes,
            block_size=block_size,
        )
        eager = run_decodes(config, enforce_eager=True)
        graphs = run_decodes(config, enforce_eager=False)
        for size in sizes.batch_sizes:
            name = f"batch {size}, {sizes.prompt_len} tokens, blocks of {block_size}"
            floor = ""
            if bandwidth is not None:
                kv_bytes = size * (sizes.prompt_len + sizes.num_steps // 2) * sizes.shape.kv_bytes_per_token
                floor_s = (sizes.shape.weight_bytes + kv_bytes) / bandwidth
                floor = f"{floor_s * 1e3:>9.3f} {graphs[size].step_s / floor_s:>6.2f}"
            print(f"{name:<40} {eager[size].step_s * 1e3:>9.3f} {graphs[size].step_s * 1e3:>9.3f} {floor}")
            if eager[size].tokens != graphs[size].tokens:
                wrong.append(f"graphs give other tokens than launches: {name}")
    return wrong


def check_pair(folder: Path, device: Device, sizes: Sizes) -> list[str]:
    """A prefill node and a decode node, both on the one device."""
    threads = ["--threads", "1"] if device == "cpu" else []
    config = PairConfig(
        folder=folder,
        vocab_size=sizes.shape.vocab_size,
        prompt_lens=sizes.prompt_lens,
        num_tokens=16,
        concurrency=sizes.concurrency,
        node_arguments=["--device", device, "--kv-cache-memory", sizes.kv_cache_memory, *threads],
    )
    print("\nprefill node and decode node")
    try:
        result = run_pair(config)
    except NodeFailed as error:
        return [str(error)]
    seconds = result.transfer_s + result.landing_s
    print(
        f"  KV over {result.transport}, exact: {result.exact}\n"
        f"  {max(sizes.prompt_lens)} tokens: {result.moved_bytes / 1e6:.1f} MB, {result.transfer_s * 1e3:.1f} ms from "
        f"grant to arrival (beside the prompt's computation), {result.landing_s * 1e3:.1f} ms landing, "
        f"{result.moved_bytes / seconds / 1e9:.2f} GB/s over both\n"
        f"  {sizes.concurrency} together: {result.tokens_per_s:.1f} tokens/s, {result.unlike_together} of them with "
        "other tokens than alone (batches change the order of sums)"
    )
    wrong = [f"a prompt of {length} tokens has other tokens disaggregated" for length in result.unlike]
    if result.recomputed_tokens:
        wrong.append(f"{result.recomputed_tokens} tokens were computed again after their transfer")
    return wrong
