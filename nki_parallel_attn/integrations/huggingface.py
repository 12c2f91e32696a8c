"""Llama-family checkpoints in Hugging Face format: config.json, safetensors (one file or sharded), tokenizer.json.

Supported model_type: llama, mistral, qwen2, qwen3; dense weights in float32, bfloat16 or float16. Everything else
raises UnsupportedFeatureError, which names what is missing. transformers itself is not needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, BackendUnavailableError, UnsupportedFeatureError
from nki_parallel_attn.integrations.decoder import Decoder, DecoderConfig
from nki_parallel_attn.integrations.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint; `tokenizer` is a tokenizers.Tokenizer, or None when the folder has no tokenizer.json."""

    decoder: Decoder
    tokenizer: Any | None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens the tokenizer adds to a prompt.

        Raises:
            UnsupportedFeatureError: the checkpoint has no tokenizer.json.
        """
        if self.tokenizer is None:
            raise UnsupportedFeatureError("the checkpoint has no tokenizer.json, so text cannot be read")
        return [int(token) for token in self.tokenizer.encode(text).ids]

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, special tokens included."""
        if self.tokenizer is None:
            return " ".join(map(str, token_ids))
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))


def load_checkpoint(directory: str | Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Load a checkpoint folder; weights are converted to `dtype`.

    Raises:
        ArgumentError: a missing folder or file, missing or superfluous weights, a weight of the wrong shape.
        UnsupportedFeatureError: a model_type, RoPE type, activation or quantisation outside this module's list.
        BackendUnavailableError: safetensors or tokenizers is not installed.
    """
    folder = Path(directory)
    if not (folder / "config.json").is_file():
        raise ArgumentError("model", folder, "a folder with config.json and safetensors files")
    config = read_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.load_state_dict(_read_weights(folder, decoder, dtype), assign=True)
    return Checkpoint(decoder.requires_grad_(False), _read_tokenizer(folder))


def read_config(raw: dict[str, Any]) -> DecoderConfig:
    """A DecoderConfig from the contents of config.json, in the old (rope_theta, rope_scaling) or new spelling.

    Raises:
        ArgumentError: an entry is missing.
        UnsupportedFeatureError: the model needs something the decoder does not have.
    """
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:
        raise UnsupportedFeatureError(f"model_type {kind!r} is not supported; supported are {', '.join(MODEL_TYPES)}")
    if raw.get("quantization_config"):
        raise UnsupportedFeatureError("quantised checkpoints are not supported; use the float weights")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedFeatureError(f"hidden_act {raw['hidden_act']!r} is not supported; only silu is")
    required = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    for name in (*required, "max_position_embeddings"):
        if not isinstance(raw.get(name), int):
            raise ArgumentError(name, repr(raw.get(name)), "an integer in config.json")
    layers, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or (128 if kind == "qwen3" else raw["hidden_size"] // heads)
    return DecoderConfig(
        vocab_size=raw["vocab_size"],
        hidden=raw["hidden_size"],
        layers=layers,
        q_heads=heads,
        kv_heads=raw.get("num_key_value_heads") or (8 if kind == "mistral" else heads),
        head_dim=head_dim,
        intermediate=raw["intermediate_size"],
        max_positions=raw["max_position_embeddings"],
        rope=_read_rope(raw, head_dim),
        sliding_window=_sliding_window(raw, kind, layers),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2" or bool(raw.get("attention_bias", False)),
        output_bias=kind != "qwen2" and bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
    )


def _read_rope(raw: dict[str, Any], head_dim: int) -> Rope:
    entries = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    theta = entries.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if entries.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise UnsupportedFeatureError("partial_rotary_factor other than 1 is not supported")
    return Rope(head_dim, float(theta), scaling=_read_scaling(entries, raw["max_position_embeddings"]))


def _read_scaling(entries: dict[str, Any], max_positions: int) -> RopeScaling | None:
    kind = entries.get("rope_type") or entries.get("type") or "default"
    if kind == "default":
        return None
    original = entries.get("original_max_position_embeddings") or max_positions

    def entry(name: str) -> float:
        value = entries.get(name)
        if not isinstance(value, (int, float)):
            raise ArgumentError(f"rope_scaling[{name!r}]", repr(value), f"a number, for rope type {kind!r}")
        return float(value)

    if kind == "linear":
        return LinearScaling(entry("factor"))
    if kind == "dynamic":
        return DynamicScaling(entry("factor"), max_positions)
    if kind == "llama3":
        return Llama3Scaling(entry("factor"), entry("low_freq_factor"), entry("high_freq_factor"), original)
    if kind == "yarn":
        factor = entries.get("factor") or max_positions / original
        attention_factor = entries.get("attention_factor")
        if attention_factor is None:
            attention_factor = yarn_attention_factor(factor, entries.get("mscale"), entries.get("mscale_all_dim"))
        return YarnScaling(
            factor,
            original,
            attention_factor,
            beta_fast=entries.get("beta_fast") or 32.0,
            beta_slow=entries.get("beta_slow") or 1.0,
            truncate=entries.get("truncate", True),
        )
    raise UnsupportedFeatureError(f"rope type {kind!r} is not supported; supported: linear, dynamic, llama3, yarn")


def _sliding_window(raw: dict[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """Tokens each layer sees, 0 for all. Mistral windows every layer; Qwen only with use_sliding_window."""
    if kind == "mistral":
        return (raw.get("sliding_window", 4096) or 0,) * layers
    window = raw.get("sliding_window") or 0
    if kind == "llama" or not raw.get("use_sliding_window") or not window:
        return (0,) * layers
    first = raw.get("max_window_layers", 28)
    types = raw.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(window if kind_of_layer == "sliding_attention" else 0 for kind_of_layer in types)


def _read_weights(folder: Path, decoder: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        message = 'safetensors is not installed; pip install "nki-parallel-attn[models]"'
        raise BackendUnavailableError(message) from error
    expected = decoder.state_dict()
    weights: dict[str, Tensor] = {}
    unknown: list[str] = []
    # Old checkpoints store RoPE's frequencies, tied ones sometimes the projection that repeats the embedding.
    ignored = ("rotary_emb.inv_freq", "lm_head.weight") if decoder.config.tied_embeddings else ("rotary_emb.inv_freq",)
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for full_name in file.keys():  # noqa: SIM118 (not a dict)
                name = full_name.removeprefix("model.")
                if name in expected:
                    weights[name] = file.get_tensor(full_name).to(dtype)
                elif not name.endswith(ignored):
                    unknown.append(full_name)
    missing = sorted(expected.keys() - weights.keys())
    if missing or unknown:
        got = f"missing {missing[:5]} ({len(missing)}), unknown {unknown[:5]} ({len(unknown)})"
        raise ArgumentError("model", got, "exactly the weights that config.json describes")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise ArgumentError(name, list(weight.shape), f"shape {list(expected[name].shape)} as in config.json")
    return weights


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise ArgumentError("model", f"no {file.name} in {folder}", "model.safetensors, or all files of its index")
    return files


def _read_tokenizer(folder: Path) -> Any | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BackendUnavailableError('tokenizers is not installed; pip install "nki-parallel-attn[models]"') from error
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
