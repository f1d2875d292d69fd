"""Tensors of a Hugging Face folder, and the identity of a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import xxhash
from safetensors import SafetensorError, safe_open

from pdserve_engine.weights.errors import BadWeightsFile, NoWeights

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CHUNK_BYTES = 8 << 20
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def load_weights(folder: Path, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
    """All tensors by name, as ``dtype``, in memory of their own on ``device``.

    Raises:
        NoWeights, BadWeightsFile
    """
    weights: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt", device=device) as file:
                for name in file.keys():  # noqa: SIM118  (the file is not a mapping)
                    weights[name] = file.get_tensor(name).to(dtype, copy=True)
        except SafetensorError as error:
            raise BadWeightsFile(path, str(error)) from error
    return weights


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order of their names.

    Raises:
        NoWeights, BadWeightsFile
    """
    index = folder / _INDEX
    names = [_SINGLE]
    if index.is_file() and not (folder / _SINGLE).is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadWeightsFile(index, f"no weight_map: {error}") from error
    for name in names:
        if not (folder / name).is_file():
            raise NoWeights(folder / name)
    return [folder / name for name in names]


def model_id(folder: Path) -> str:
    """Hash of configuration and weights: equal ids compute the same function.

    xxh3-128 over all bytes of the weights (10 GB/s and more from the page cache). It tells models apart; it does not
    defend against someone who makes a collision.

    Raises:
        NoWeights, BadWeightsFile
    """
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in _NOT_IDENTITY}
    digest = xxhash.xxh3_128(json.dumps(kept, sort_keys=True).encode())
    for path in weight_files(folder):
        hash_file(path, digest)
    return str(digest.hexdigest())


def hash_file(path: Path, digest: xxhash.xxh3_128) -> None:
    """Feeds all bytes of a file to ``digest``."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
