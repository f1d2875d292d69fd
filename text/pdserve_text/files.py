"""The files that make a tokenizer, as they lie in a Hugging Face folder.

Owns which files are taken, their identity, and what their JSON says about special tokens, end ids and sampling
defaults. Does not know how text is tokenized.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from pdserve_text.errors import TokenizerFilesError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"

SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MODEL_CONFIG_KEYS = ("bos_token_id", "eos_token_id")
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Read from a Hugging Face folder what a tokenizer needs, by file name.

    ``config.json`` is cut down to its bos and end ids. Raises TokenizerFilesError where tokenizer.json is missing.
    """
    files = _read(folder)
    if TOKENIZER not in files:
        hint = " (a tokenizer.model alone is not enough)" if (folder / "tokenizer.model").exists() else ""
        raise TokenizerFilesError(TOKENIZER, f"not found in {folder}{hint}")
    config = read_json(files, MODEL_CONFIG)
    files.pop(MODEL_CONFIG, None)
    ids = {key: config[key] for key in _MODEL_CONFIG_KEYS if config.get(key) is not None}
    if ids:
        files[MODEL_CONFIG] = json.dumps(ids, sort_keys=True).encode()
    return files


def tokenizer_id(files: Mapping[str, bytes]) -> str:
    """Identity of the files: 32 hex digits of BLAKE2b over names and contents, whatever their order."""
    digest = blake2b(digest_size=16, person=b"pdserve-text")
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in ``name``, empty where there is no such file; TokenizerFilesError where it is no object."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except ValueError as error:
        raise TokenizerFilesError(name, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerFilesError(name, f"a JSON object is expected, not {type(value).__name__}")
    return value


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Text of bos_token, eos_token and the like that tokenizer_config.json names, as chat templates use them."""
    config = read_json(files, TOKENIZER_CONFIG)
    tokens: dict[str, str] = {}
    for key in SPECIAL_TOKEN_KEYS:
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise TokenizerFilesError(TOKENIZER_CONFIG, f"{key} is not a text: {value!r}")
        tokens[key] = value
    return tokens


def end_token_ids(files: Mapping[str, bytes]) -> frozenset[int]:
    """Every id that ends an output, by generation_config.json, config.json and tokenizer_config.json's eos_token."""
    ids: set[int] = set()
    for name in (GENERATION_CONFIG, MODEL_CONFIG):
        ids.update(_ids(read_json(files, name).get("eos_token_id"), name))
    eos = special_tokens(files).get("eos_token")
    eos_id = None if eos is None else _id_of(eos, read_json(files, TOKENIZER))
    return frozenset(ids if eos_id is None else ids | {eos_id})


def folder_end_token_ids(folder: Path) -> frozenset[int]:
    """``end_token_ids`` of what lies in a Hugging Face folder, with or without a tokenizer."""
    return end_token_ids(_read(folder))


def generation_defaults(files: Mapping[str, bytes]) -> dict[str, float]:
    """Sampling parameters that generation_config.json states, by the name a request uses.

    ``do_sample`` does not count, as in vLLM: a request without a temperature samples at the stated one.
    """
    config = read_json(files, GENERATION_CONFIG)
    defaults: dict[str, float] = {}
    for key in _SAMPLING_KEYS:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TokenizerFilesError(GENERATION_CONFIG, f"{key} is not a number: {value!r}")
        defaults[key] = value
    return defaults


def _ids(value: object, name: str) -> list[int]:
    values: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise TokenizerFilesError(name, f"eos_token_id is not a token id or a list of them: {value!r}")
    return values


def _read(folder: Path) -> dict[str, bytes]:
    names = (TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, GENERATION_CONFIG, MODEL_CONFIG)
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def _id_of(text: str, tokenizer: Mapping[str, Any]) -> int | None:
    """Id of a token by the contents of tokenizer.json."""
    for token in tokenizer.get("added_tokens") or []:
        if token["content"] == text:
            return int(token["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, list):  # of a Unigram model: pieces and their scores, by id
        return next((token_id for token_id, (piece, _) in enumerate(vocab) if piece == text), None)
    found: int | None = vocab.get(text)
    return found
