"""Llama-family checkpoints in Hugging Face format: config.json, safetensors (one file or sharded), tokenizer.json.

Supported model_type: llama, mistral, qwen2, qwen3; dense weights in float32, bfloat16 or float16. Everything else
raises UnsupportedFeatureError, which names what is missing. transformers itself is not needed.
"""

from __future__ import annotations

import json
import math
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
        ArgumentError: a missing or damaged file, an impossible entry of config.json, missing or superfluous weights,
            a weight of the wrong shape.
        UnsupportedFeatureError: a model_type, RoPE type, activation or quantisation outside this module's list.
        BackendUnavailableError: safetensors or tokenizers is not installed.
    """
    folder = Path(directory)
    if not (folder / "config.json").is_file():
        raise ArgumentError("model", folder, "a folder with config.json and safetensors files")
    config = read_config(_read_json(folder / "config.json"))
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
    heads = _integer(raw, "num_attention_heads")
    kv_heads = _integer(raw, "num_key_value_heads", 8 if kind == "mistral" else heads)
    if heads % kv_heads:
        raise ArgumentError("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads} in config.json")
    hidden, layers = _integer(raw, "hidden_size"), _integer(raw, "num_hidden_layers")
    head_dim = _integer(raw, "head_dim", 128 if kind == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise ArgumentError("head_dim", head_dim, "an even number in config.json, for RoPE turns pairs")
    biased = _flag(raw, "attention_bias")
    return DecoderConfig(
        vocab_size=_integer(raw, "vocab_size"),
        hidden=hidden,
        layers=layers,
        q_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_integer(raw, "intermediate_size"),
        max_positions=_integer(raw, "max_position_embeddings"),
        rope=_read_rope(raw, head_dim),
        sliding_window=_sliding_window(raw, kind, layers),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        tied_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=kind == "qwen2" or biased,
        output_bias=kind != "qwen2" and biased,
        mlp_bias=_flag(raw, "mlp_bias"),
        qk_norm=kind == "qwen3",
    )


def _integer(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer of config.json; `default` where the entry is missing or null."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(name, repr(value), "a positive integer in config.json")
    return value


def _number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    """A positive, finite number of config.json."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ArgumentError(name, repr(value), "a positive number in config.json")
    return float(value)


def _flag(raw: dict[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value not in (None, False, True):
        raise ArgumentError(name, repr(value), "true or false in config.json")
    return bool(value)


def _read_rope(raw: dict[str, Any], head_dim: int) -> Rope:
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    entries = raw.get(name) or {}
    if not isinstance(entries, dict):
        raise ArgumentError(name, repr(entries), "an object in config.json")
    theta = _number(entries if entries.get("rope_theta") is not None else raw, "rope_theta", 10000.0)
    if entries.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise UnsupportedFeatureError("partial_rotary_factor other than 1 is not supported")
    return Rope(head_dim, theta, scaling=_read_scaling(entries, _integer(raw, "max_position_embeddings")))


def _read_scaling(entries: dict[str, Any], max_positions: int) -> RopeScaling | None:
    kind = entries.get("rope_type") or entries.get("type") or "default"
    if kind == "default":
        return None
    original = _integer(entries, "original_max_position_embeddings", max_positions)
    if kind == "linear":
        return LinearScaling(_number(entries, "factor"))
    if kind == "dynamic":
        return DynamicScaling(_number(entries, "factor"), max_positions)
    if kind == "llama3":
        low, high = (_number(entries, f"{end}_freq_factor") for end in ("low", "high"))
        if low >= high:
            raise ArgumentError("high_freq_factor", high, f"more than low_freq_factor={low} in config.json")
        return Llama3Scaling(_number(entries, "factor"), low, high, original)
    if kind == "yarn":
        factor = _number(entries, "factor", max_positions / original)
        attention_factor = entries.get("attention_factor")
        if attention_factor is None:
            mscale, mscale_all_dim = (
                _number(entries, name) if entries.get(name) else None for name in ("mscale", "mscale_all_dim")
            )
            attention_factor = yarn_attention_factor(factor, mscale, mscale_all_dim)
        else:
            attention_factor = _number(entries, "attention_factor")
        return YarnScaling(
            factor,
            original,
            attention_factor,
            beta_fast=_number(entries, "beta_fast", 32.0),
            beta_slow=_number(entries, "beta_slow", 1.0),
            truncate=entries.get("truncate") is None or _flag(entries, "truncate"),
        )
    raise UnsupportedFeatureError(f"rope type {kind!r} is not supported; supported: linear, dynamic, llama3, yarn")


def _sliding_window(raw: dict[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """Tokens each layer sees, 0 for all. Mistral windows every layer; Qwen only with use_sliding_window."""
    if kind == "mistral" and "sliding_window" not in raw:
        return (4096,) * layers
    if not raw.get("sliding_window") or kind == "llama" or (kind != "mistral" and not _flag(raw, "use_sliding_window")):
        return (0,) * layers
    window = _integer(raw, "sliding_window")
    if kind == "mistral":
        return (window,) * layers
    first = 0 if raw.get("max_window_layers") == 0 else _integer(raw, "max_window_layers", 28)
    types = raw.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise ArgumentError("layer_types", repr(types), f"a list of {layers} in config.json, one for each layer")
    return tuple(window if kind_of_layer == "sliding_attention" else 0 for kind_of_layer in types)


def _read_weights(folder: Path, decoder: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        message = 'safetensors is not installed; pip install "nki-parallel-attn[models]"'
        raise BackendUnavailableError(message) from error
    expected = decoder.state_dict()
    weights: dict[str, Tensor] = {}
    unknown: list[str] = []
    # Old checkpoints store RoPE's frequencies, tied ones sometimes the projection that repeats the embedding.
    ignored = ("rotary_emb.inv_freq", "lm_head.weight") if decoder.config.tied_embeddings else ("rotary_emb.inv_freq",)
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for full_name in file.keys():  # noqa: SIM118 (not a dict)
                    name = full_name.removeprefix("model.")
                    if name in expected:
                        weights[name] = _float_weight(full_name, file.get_tensor(full_name)).to(dtype)
                    elif not name.endswith(ignored):
                        unknown.append(full_name)
        except SafetensorError as error:
            raise ArgumentError("model", path, "a whole safetensors file", str(error)) from error
    missing = sorted(expected.keys() - weights.keys())
    if missing or unknown:
        got = f"missing {missing[:5]} ({len(missing)}), unknown {unknown[:5]} ({len(unknown)})"
        raise ArgumentError("model", got, "exactly the weights that config.json describes")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise ArgumentError(name, list(weight.shape), f"shape {list(expected[name].shape)} as in config.json")
    return weights


def _float_weight(name: str, weight: Tensor) -> Tensor:
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise UnsupportedFeatureError(f"{name} is {weight.dtype}; weights are float32, bfloat16 or float16")
    return weight


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ArgumentError("model", f"{index} without weight_map", "weight_map, a file name for each weight")
        names = sorted(set(weight_map.values()))
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise ArgumentError("model", f"no {file.name} in {folder}", "model.safetensors, or all files of its index")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ArgumentError("model", path, "a JSON object", str(error)) from error
    if not isinstance(content, dict):
        raise ArgumentError("model", f"{path} with a {type(content).__name__}", "a JSON object")
    return content


def _read_tokenizer(folder: Path) -> Any | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BackendUnavailableError('tokenizers is not installed; pip install "nki-parallel-attn[models]"') from error
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ArgumentError("model", folder / "tokenizer.json", "a tokenizer of tokenizers", str(error)) from error
