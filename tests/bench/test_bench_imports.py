"""What is imported when: commands that compute nothing do without torch; flags are a decision."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
from pdserve_cli.args import build_parser

# A new flag is a decision: it is added here as well.
FLAGS = {
    "serve": {
        *("--url", "--model", "--endpoint", "--concurrency", "--request-rate", "--arrivals", "--burstiness"),
        *("--num-prompts", "--warmup", "--input-len", "--output-len", "--prompts", "--tokenizer-vocab"),
        *("--temperature", "--extra-body", "--seed", "--timeout", "--slo", "--watch-pid", "--beside"),
        *("--label", "--json", "--plot"),
    },
    "router": {
        "--model",
        "--router-core",
        "--concurrency",
        "--output-len",
        "--step-ms",
        "--seconds",
        "--label",
        "--json",
    },
    "kv": {
        *("--connectors", "--block-bytes", "--blocks", "--concurrency", "--wire-dtypes", "--repetitions", "--listen"),
        *("--connect", "--cluster-key", "--insecure", "--mooncake", "--csv", "--label", "--json", "--plot"),
    },
    "handoff": {
        *("--model", "--measures", "--num-prompts", "--input-len", "--output-len", "--concurrency", "--repetitions"),
        *("--kv-connector", "--label", "--json"),
    },
    "kernels": {
        *(
            "--model",
            "--dtype",
            "--kv-cache-dtype",
            "--backend",
            "--baseline",
            "--threads",
            "--batch-sizes",
            "--context",
        ),
        *("--prefill-lens", "--repetitions", "--label", "--json", "--plot"),
    },
}


def _sub(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [action] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return action.choices


def test_flags_are_frozen() -> None:
    benchmarks = _sub(_sub(build_parser())["bench"])
    flags = {
        name: {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
        for name, parser in benchmarks.items()
    }
    assert flags == {name: own | {"--help"} for name, own in FLAGS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("pdserve_cli.main", ("torch", "numpy", "aiohttp", "matplotlib", "pdserve_engine")),
        ("pdserve_bench.serve.run, pdserve_bench.serve.options", ("torch", "pdserve_engine", "pdserve_protocol")),
    ],
)
def test_what_is_not_imported(modules: str, absent: tuple[str, ...]) -> None:
    program = f"import sys, {modules}; print(*[name for name in {absent!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == ""
