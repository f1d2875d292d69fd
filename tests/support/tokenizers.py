"""A small byte-level BPE tokenizer with a ChatML template; tests need neither network nor a real model for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

END_OF_TEXT_ID = 0
BOS_ID = 1
EOS_ID = 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_WORDS = (
    "the and ing user system assistant question answer What is of to in a it that was for on are with as his they at be"
    " this from have or by one had not but what all were when we there can an your which their said if do will each"
)
_LETTERS = "etaoinsrhldcumfpgwybvkxjqz"


def _byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (Radford et al., GPT-2, 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def _pieces() -> list[tuple[str, str]]:
    """Merges in order of rank: parts of characters, some words, then pairs and triples of letters."""
    by_byte = _byte_characters()

    def spell(text: str) -> str:
        return "".join(by_byte[b] for b in text.encode())

    chains = [spell("\U0001f468")[:2], spell("é"), spell("東")[:2], spell("\u200d")]
    chains += [spell(" " + word) for word in _WORDS.split()] + [spell(word) for word in _WORDS.split()]
    merges = [(chain[:i], chain[i]) for chain in chains for i in range(1, len(chain))]
    pairs = [(a, b) for a in _LETTERS for b in _LETTERS]
    return merges + pairs + [(a + b, c) for a, b in pairs for c in _LETTERS]


def tiny_tokenizer_files(vocab_size: int = 384, **generation: object) -> dict[str, bytes]:
    """Files of a Hugging Face tokenizer folder with exactly ``vocab_size`` ids, each of which decodes.

    Ids 0, 1, 2 are <|endoftext|>, <|im_start|> (bos), <|im_end|> (eos), 3 to 258 the single bytes (so >= 259 in all).
    Some tokens are parts of characters, as in real vocabularies. No bos is added to a prompt. ``generation`` goes into
    generation_config.json.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size {vocab_size} is below {MIN_VOCAB_SIZE}")
    by_byte = _byte_characters()
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *(by_byte[b] for b in range(256))])}
    merges: list[tuple[str, str]] = []
    for left, right in _pieces():
        if len(vocab) == vocab_size:
            break
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    if len(vocab) != vocab_size:
        raise ValueError(f"vocab_size {vocab_size} is more than the {len(vocab)} tokens this helper can make")
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, **generation}).encode(),
    }


def write_tokenizer(folder: Path, vocab_size: int = 384, **generation: object) -> None:
    """Write ``tiny_tokenizer_files`` into ``folder``, made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in tiny_tokenizer_files(vocab_size, **generation).items():
        (folder / name).write_bytes(data)
