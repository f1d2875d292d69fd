"""A tokenizer from the metadata of a GGUF file, as the files a Hugging Face folder would have.

Owns the meaning of the ``tokenizer.*`` fields for byte-level BPE. Does not read GGUF files, the metadata comes as a
plain mapping.
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pdserve_text import files as folder_files
from pdserve_text.errors import TokenizerFilesError, UnsupportedTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

_T = TypeVar("_T")

_MODEL = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_TEMPLATE = "tokenizer.chat_template"
_END_FIELDS = ("eos", "eot", "eom")
_TOKEN_FIELDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# Word patterns as the models were trained with, from their own tokenizer.json: Llama 3 and Qwen2 differ in how many
# digits make a word.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = _WORDS % r"\p{N}{1,3}"
_QWEN2_WORDS = _WORDS % r"\p{N}"

_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_SUPPORTED = ("gpt-2", "smollm", "qwen2", *_LLAMA3)


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_files_from_gguf(fields: Mapping[str, object]) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json from GGUF metadata by field name.

    Raises UnsupportedTokenizer, which names the field, for other models than byte-level BPE and other word splitting
    than that of GPT-2, SmolLM, Llama 3 and Qwen2; TokenizerFilesError for fields that are missing or do not fit.
    """
    model = _get(fields, _MODEL, str)
    if model != "gpt2":
        raise UnsupportedTokenizer(_MODEL, repr(model), "'gpt2', which is byte-level BPE")
    pre = fields.get(_PRE)
    if pre not in _SUPPORTED:
        raise UnsupportedTokenizer(_PRE, "a GGUF without it" if pre is None else repr(pre), ", ".join(_SUPPORTED))
    pre = str(pre)
    tokens = _get_list(fields, _TOKENS)
    ids = {name: _token_id(fields, f"tokenizer.ggml.{field}_token_id", tokens) for name, field in _TOKEN_FIELDS.items()}
    names = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3)) and ids["bos_token"] is not None

    backend = _backend(fields, pre, tokens)
    if add_bos:
        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, ids["bos_token"])]
        )
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    if fields.get(_TEMPLATE) is not None:
        config["chat_template"] = _get(fields, _TEMPLATE, str)
    end_ids = [_token_id(fields, f"tokenizer.ggml.{field}_token_id", tokens) for field in _END_FIELDS]
    generation = {
        "bos_token_id": ids["bos_token"],
        "eos_token_id": sorted({token_id for token_id in end_ids if token_id is not None}),
    }
    return {
        folder_files.TOKENIZER: backend.to_str().encode(),
        folder_files.TOKENIZER_CONFIG: json.dumps(config, ensure_ascii=False).encode(),
        folder_files.GENERATION_CONFIG: json.dumps(generation).encode(),
    }


def _backend(fields: Mapping[str, object], pre: str, tokens: list[str]) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerFilesError(_TOKENS, f"{len(tokens) - len(vocab)} tokens occur twice")
    types = _get(fields, _TYPES, list)
    if len(types) != len(tokens):
        raise TokenizerFilesError(_TYPES, f"{len(types)} types for {len(tokens)} tokens")
    merges = [_merge(text) for text in _get_list(fields, _MERGES)]
    try:
        bpe = models.BPE(vocab, merges, ignore_merges=pre in _LLAMA3)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerFilesError(_MERGES, str(error)) from error
    backend = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind != _TokenType.USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_TokenType.CONTROL, _TokenType.USER_DEFINED, _TokenType.UNKNOWN)
    ]
    backend.add_tokens(added)
    return backend


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    match pre:
        case "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        case "smollm":
            words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        case _:
            pattern = Regex(_QWEN2_WORDS if pre == "qwen2" else _LLAMA3_WORDS)
            letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), letters])


def _merge(text: str) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not (left and space and right):
        raise TokenizerFilesError(_MERGES, f"{text!r} is not two tokens")
    return left, right


def _get(fields: Mapping[str, object], name: str, kind: type[_T]) -> _T:
    if name not in fields:
        raise TokenizerFilesError(name, "missing")
    value = fields[name]
    if not isinstance(value, kind):
        raise TokenizerFilesError(name, f"{kind.__name__} is expected, not {type(value).__name__}")
    return value


def _get_list(fields: Mapping[str, object], name: str) -> list[str]:
    values = _get(fields, name, list)
    if not all(isinstance(value, str) for value in values):
        raise TokenizerFilesError(name, "a list of texts is expected")
    return values


def _token_id(fields: Mapping[str, object], name: str, tokens: list[str]) -> int | None:
    if fields.get(name) is None:
        return None
    token_id = int(_get(fields, name, int))
    if not 0 <= token_id < len(tokens):
        raise TokenizerFilesError(name, f"{token_id} is not one of {len(tokens)} tokens")
    return token_id
