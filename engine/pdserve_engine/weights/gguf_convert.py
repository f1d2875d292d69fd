"""A GGUF file -> a Hugging Face folder in bfloat16, made once and kept in the user's cache by the hash of the file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from pdserve_text.gguf_tokenizer import tokenizer_files_from_gguf
from safetensors.torch import save_file

from pdserve_engine.weights import gguf_names
from pdserve_engine.weights.errors import BadWeightsFile, UnsupportedGGUF
from pdserve_engine.weights.load import hash_file

if TYPE_CHECKING:
    import gguf

_CONVERTER_VERSION = 1


def converted(file: Path) -> Path:
    """The folder made of this file, now or before. Two processes may convert at the same time; one folder stays.

    Raises:
        BadWeightsFile: it is not a GGUF file, or is cut short.
        UnsupportedGGUF: the architecture, a tensor or a scaling is not known.
    """
    digest = xxhash.xxh3_128()
    hash_file(file, digest)
    folder = cache_folder() / f"{digest.hexdigest()}-{_CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        convert(file, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/pdserve, ~/.cache/pdserve where that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve"


def convert(file: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors (bfloat16) and the tokenizer's files. Raises as ``converted``."""
    reader = _open(file)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    arch = str(fields.get("general.architecture"))
    if arch not in gguf_names.ARCHITECTURES:
        raise UnsupportedGGUF(file, f"general.architecture {arch!r} (known: {', '.join(gguf_names.ARCHITECTURES)})")
    if fields.get(f"{arch}.expert_count"):
        raise UnsupportedGGUF(file, "a mixture of experts")
    names = {tensor.name: gguf_names.tensor_name(tensor.name) for tensor in reader.tensors}
    unknown = [name for name, known in names.items() if known is None]
    if unknown or "token_embd.weight" not in names:
        raise UnsupportedGGUF(file, f"tensor {unknown[0]}" if unknown else "a file without token_embd.weight")
    vocab_size = next(int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight")
    try:
        config = gguf_names.config_fields(fields, tied="output.weight" not in names, vocab_size=vocab_size)
    except KeyError as error:
        raise BadWeightsFile(file, f"it has no field {error}") from error
    tensors = {str(names[tensor.name]): _tensor(tensor, arch, config) for tensor in reader.tensors}
    for name, data in tokenizer_files_from_gguf(fields).items():
        (folder / name).write_bytes(data)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _open(file: Path) -> gguf.GGUFReader:
    import gguf

    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, OSError, UnicodeDecodeError) as error:
        raise BadWeightsFile(file, str(error)) from error


def _tensor(tensor: gguf.ReaderTensor, arch: str, config: dict[str, Any]) -> torch.Tensor:
    from gguf.quants import dequantize

    rows = dequantize(tensor.data, tensor.tensor_type)
    heads = gguf_names.heads_to_permute(arch, tensor.name, config)
    if heads is not None:
        rows = gguf_names.unpermute(rows, heads)
    return torch.tensor(rows, dtype=torch.bfloat16)
