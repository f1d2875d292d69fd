"""The command line that both kinds of node share. Flag names follow vLLM's where vLLM has the same thing."""

from __future__ import annotations

import argparse
import os
import re
from importlib.metadata import version
from typing import TYPE_CHECKING

from pdserve_kv_transfer.digest import DIGEST_NAME, NO_DIGEST
from pdserve_protocol.door import CLUSTER_KEY_VARIABLE, cluster_key
from pdserve_protocol.timing import DRAIN_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def memory_size(text: str) -> int:
    """Bytes of ``512MiB``, ``4GiB``, ``4G`` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 4GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def port(text: str) -> int:
    """0 to 65535."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def seconds(text: str) -> float:
    """A duration >= 0."""
    return _duration(text, "seconds")


def milliseconds(text: str) -> float:
    """A duration >= 0."""
    return _duration(text, "milliseconds")


def _duration(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit}")
    return value


def parse_node_args(
    prog: str,
    description: str,
    *,
    default_port: int,
    max_num_batched_tokens: int,
    argv: Sequence[str] | None = None,
    add_own: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """Reads the command line of a node; exits with 2 and one line where it is wrong.

    ``add_own`` adds the flags that only this kind of node has.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"pdserve {version('pdserve')}")

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        required=True,
        help="a Hugging Face folder (config.json, safetensors, tokenizer), a GGUF file, or smollm2, the demo model",
    )
    model.add_argument("--served-model-name", default=None, help="name in the API; by default the model's own")
    model.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of weights and what is computed (default: %(default)s)",
    )
    model.add_argument(
        "--quantization",
        choices=["int8"],
        default=None,
        help="int8: weights of the layers in 8 bits, on CPUs; by default they are of --dtype",
    )
    model.add_argument(
        "--max-model-len", type=positive, default=None, help="prompt and output tokens at most; by default the model's"
    )

    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--max-num-seqs", type=positive, default=64, help="requests that run at the same time (default: %(default)s)"
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        default=max_num_batched_tokens,
        help="tokens computed in one step; longer prompts are computed in chunks of this (default: %(default)s)",
    )
    engine.add_argument(
        "--block-size",
        type=positive,
        default=16,
        help="tokens in a KV block; nodes may differ (default: %(default)s)",
    )
    engine.add_argument(
        "--kv-cache-memory",
        type=memory_size,
        default=None,
        metavar="SIZE",
        help="for example 2GiB; by default a quarter of the free memory, 4 GiB at most; of a GPU 85 %% of what is free",
    )
    engine.add_argument(
        "--kv-cache-dtype",
        choices=["auto", "int8", "fp8"],
        default="auto",
        help="int8 and fp8 hold nearly twice the tokens and lose digits; nodes may differ (default: %(default)s, as "
        "--dtype)",
    )
    engine.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where weights and KV cache lie; auto is the GPU where there is one (default: %(default)s)",
    )
    engine.add_argument(
        "--enforce-eager", action="store_true", help="on a GPU: no CUDA graphs of decode steps, for debugging"
    )
    engine.add_argument(
        "--threads", type=positive, default=None, help="compute threads; by default one per core this process may use"
    )

    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    network.add_argument(
        "--port", type=port, default=default_port, help="0 picks a free one and prints it (default: %(default)s)"
    )
    network.add_argument(
        "--advertise-host", default=None, help="address under which peers reach this node, where --host does not say it"
    )
    network.add_argument(
        "--cluster-key",
        help=f"secret shared by all nodes and routers (default: ${CLUSTER_KEY_VARIABLE}, which ps does not show)",
    )
    network.add_argument(
        "--insecure", action="store_true", help="listen off loopback without a cluster key: anyone may use the node"
    )
    network.add_argument(
        "--kv-trusted-network",
        action="store_true",
        help="KV blocks may travel off loopback, where they are not encrypted, and with NIXL not authenticated",
    )
    network.add_argument(
        "--kv-connector",
        default=None,
        metavar="NAME,...",
        help="what carries KV blocks, best first: nixl, tcp, or another that is installed (default: nixl,tcp; "
        "tcp where NIXL is not installed)",
    )
    network.add_argument(
        "--kv-wire-dtype",
        choices=["auto", "bfloat16", "int8", "fp8"],
        default="auto",
        help="how numbers of KV blocks travel, the same on all nodes; int8 and fp8 halve the bytes and lose digits "
        "(default: %(default)s, as they are cached)",
    )
    network.add_argument(
        "--kv-encrypt",
        action="store_true",
        help="KV blocks are encrypted and authenticated by the cluster key on their way; on all nodes or on none",
    )
    network.add_argument(
        "--kv-digest",
        choices=[DIGEST_NAME, NO_DIGEST],
        default=DIGEST_NAME,
        help="of KV blocks on their way; none, for measurements, lets damaged blocks pass (default: %(default)s)",
    )

    operation = parser.add_argument_group("operation")
    operation.add_argument(
        "--drain-timeout",
        type=seconds,
        default=DRAIN_TIMEOUT_S,
        metavar="SECONDS",
        help="how long running requests may take to finish after SIGTERM (default: %(default)g)",
    )
    operation.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], default="info", help="default: %(default)s"
    )
    add_own(parser)
    args = parser.parse_args(argv)
    args.cluster_key = cluster_key(args.cluster_key, os.environ)
    return args
