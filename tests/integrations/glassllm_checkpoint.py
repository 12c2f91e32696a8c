"""glassllm's weights and tokenizer written as a Hugging Face checkpoint, for tests that read one back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from nki_parallel_attn.integrations.glassllm import GlassLLM
from nki_parallel_attn.integrations.rope import half_split_order


def save_as_huggingface(model: GlassLLM, folder: Path, shards: int = 1) -> None:
    """config.json, safetensors (an index and `shards` files when more than one) and tokenizer.json."""
    config = model.decoder.config
    weights = {}
    for name, weight in model.decoder.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = weight.view(-1, config.head_dim, config.hidden)
            weight = heads[:, half_split_order(config.head_dim)].reshape(weight.shape)
        weights[f"model.{name}"] = weight.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    entries = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "architectures": ["LlamaForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(entries))
    _save_weights(weights, folder, shards)
    _tokenizer(model).save(str(folder / "tokenizer.json"))


def _save_weights(weights: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(weights.items())[shard::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _tokenizer(model: GlassLLM) -> Tokenizer:
    original = model.tokenizer
    tokenizer = Tokenizer(BPE(vocab=original.token_to_id, merges=original.merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\n|▁*[^▁\n]+|▁+"), behavior="isolated")
    return tokenizer
