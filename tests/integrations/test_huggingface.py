"""Random checkpoints saved by transformers, read back here: equal logits, or a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nki_parallel_attn.errors import ArgumentError, UnsupportedFeatureError
from nki_parallel_attn.integrations.huggingface import load_checkpoint, read_config
from nki_parallel_attn.integrations.tolerance import logits_tolerance

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {}),
    "multi-head": ("llama", {"num_key_value_heads": 6}),
    "multi-query": ("llama", {"num_key_value_heads": 1}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "head-dim": ("llama", {"head_dim": 16}),
    "theta": ("llama", {"rope_theta": 500000.0}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama3": ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}}),
    "yarn": ("llama", {"rope_scaling": YARN}),
    "yarn-untruncated": ("llama", {"rope_scaling": {**YARN, "truncate": False, "beta_fast": 16.0}}),
    "yarn-mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "window": ("mistral", {"sliding_window": 9}),
    "no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}


def save_random(kind: str, changes: dict[str, Any], folder: Path) -> Any:
    """A random model of this kind, saved by transformers and returned; norms and biases are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **changes}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    model = save_random(kind, changes, tmp_path)
    decoder = load_checkpoint(tmp_path).decoder
    length = 100 if case == "dynamic" else 60
    token_ids = torch.randint(97, (length,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(token_ids[None], use_cache=False).logits[0]
    deviation = (decoder(token_ids) - expected).abs().max().item()
    assert deviation <= logits_tolerance(decoder.config, expected), deviation


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llama3", "factor", 8.5),
        ("llama3", "high_freq_factor", 4.5),
        ("yarn", "factor", 4.1),
        ("linear", "factor", 4.1),
    ],
)
def test_scaling_parameters_matter(case: str, key: str, value: float, tmp_path: Path) -> None:
    """The comparison above would notice a scaling rule that is read slightly wrong."""
    model = save_random(*CASES[case], tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["rope_parameters"][key] = value
    path.write_text(json.dumps(raw))
    decoder = load_checkpoint(tmp_path).decoder
    token_ids = torch.arange(60)
    with torch.no_grad():
        expected = model(token_ids[None]).logits[0]
    assert (decoder(token_ids) - expected).abs().max().item() > logits_tolerance(decoder.config, expected)


def test_old_spelling_of_rope_equals_the_new() -> None:
    common = {**SMALL, "model_type": "llama"}
    scaling = {**LLAMA3, "original_max_position_embeddings": 16}
    old = {**common, "rope_theta": 5e5, "rope_scaling": {**scaling, "type": "llama3"}}
    new = {**common, "rope_parameters": {**scaling, "rope_theta": 5e5}}
    assert read_config(old) == read_config(new)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "mixtral"}, UnsupportedFeatureError, "supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, UnsupportedFeatureError, "model_type None"),
        ({"rope_scaling": {"rope_type": "longrope"}}, UnsupportedFeatureError, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, ArgumentError, "factor"),
        ({"partial_rotary_factor": 0.5}, UnsupportedFeatureError, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, UnsupportedFeatureError, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedFeatureError, "quantised"),
        ({"vocab_size": None}, ArgumentError, "vocab_size"),
    ],
)
def test_unsupported_config(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_config({**SMALL, "model_type": "llama", **changes})


def test_incomplete_folder(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(ArgumentError, match=r"config\.json"):
        load_checkpoint(tmp_path / "nowhere")
    save_random("llama", {}, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    removed = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, file)
    with pytest.raises(ArgumentError, match=r"layers\.1\.mlp\.up_proj"):
        load_checkpoint(tmp_path)
    save_file({**weights, "model.layers.1.mlp.up_proj.weight": removed[:-1]}, file)
    with pytest.raises(ArgumentError, match=r"up_proj.*shape"):
        load_checkpoint(tmp_path)
    file.unlink()
    with pytest.raises(ArgumentError, match=r"no model\.safetensors"):
        load_checkpoint(tmp_path)


def test_text_without_tokenizer(tmp_path: Path) -> None:
    save_random("llama", {}, tmp_path)
    with pytest.raises(UnsupportedFeatureError, match=r"tokenizer\.json"):
        load_checkpoint(tmp_path).encode("text")
