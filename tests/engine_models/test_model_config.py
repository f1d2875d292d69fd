from __future__ import annotations

import pytest
import torch
from pdserve_engine.models.config import parse_config
from pdserve_engine.models.decoder import Decoder
from pdserve_engine.models.errors import BadConfig, UnknownArchitecture, UnsupportedConfig, WeightsMismatch
from pdserve_engine.weights import load_weights
from pdserve_kernels.select import select_backend
from support.models import write_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def test_plain_llama():
    config = parse_config(LLAMA)
    assert (config.head_dim, config.rope.kind, config.rope.theta) == (16, "default", 10000.0)
    assert (config.qkv_bias, config.tied_embeddings, config.sliding_window) == (False, False, None)


def test_unknown_architecture_names_the_known_ones():
    with pytest.raises(UnknownArchitecture, match=r"MambaForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        parse_config(LLAMA | {"architectures": ["MambaForCausalLM"]})
    with pytest.raises(UnknownArchitecture, match="none"):
        parse_config({})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_what_is_not_built_is_refused_by_name(fields, named):
    with pytest.raises(UnsupportedConfig, match=named):
        parse_config(LLAMA | fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "high_freq_factor is missing"),
    ],
)
def test_bad_fields_are_named(fields, named):
    with pytest.raises(BadConfig, match=named):
        parse_config(LLAMA | fields)


def test_old_and_new_rope_fields_mean_the_same():
    old = parse_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = parse_config(LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}})
    assert old.rope == new.rope


def test_window_of_mistral_is_that_of_its_config_or_of_transformers():
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert parse_config(mistral | {"sliding_window": 8}).sliding_window == 8
    assert parse_config(mistral | {"sliding_window": None}).sliding_window is None
    assert parse_config(mistral).sliding_window == 4096
    assert parse_config(LLAMA | {"sliding_window": 8}).sliding_window is None


def test_weights_that_do_not_fit_the_config_are_named(tmp_path):
    write_model(tmp_path, "qwen3")
    config = parse_config(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "head_dim": 16})
    weights = load_weights(tmp_path, torch.float32)
    with pytest.raises(WeightsMismatch, match=r"lm_head.weight is missing"):
        Decoder(config, dict(weights), select_backend(), 512)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 4)
    with pytest.raises(WeightsMismatch, match=r"layers.1.mlp.up_proj.weight has shape \(3, 4\)"):
        Decoder(config, weights, select_backend(), 512)
