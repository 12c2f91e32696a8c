"""Attention shapes of known models with random weights: one layer, no feed-forward, a small vocabulary.

For measuring and checking at real sizes without a checkpoint. Widths and RoPE are those of the models' published
config.json. gpt-oss's attention sinks are left out: attention_kv_parallel_segmented_cte has no such parameter.
"""

from __future__ import annotations

import torch

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.integrations.decoder import Decoder, DecoderConfig
from nki_parallel_attn.integrations.rope import Rope, YarnScaling, yarn_attention_factor

_VOCABULARY = 1024


def _shape(
    hidden: int, q_heads: int, head_dim: int, max_positions: int, rope: Rope, attention_bias: bool = False
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=_VOCABULARY,
        hidden=hidden,
        layers=1,
        q_heads=q_heads,
        kv_heads=8,
        head_dim=head_dim,
        intermediate=0,
        max_positions=max_positions,
        rope=rope,
        sliding_window=(0,),
        rms_norm_eps=1e-5,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )


_GPT_OSS_YARN = YarnScaling(32.0, 4096, yarn_attention_factor(32.0), truncate=False)

SHAPES = {
    "llama3-8b": _shape(4096, 32, 128, 8192, Rope(128, 500000.0)),
    "llama3-70b": _shape(8192, 64, 128, 8192, Rope(128, 500000.0)),
    "gpt-oss-120b": _shape(2880, 64, 64, 131072, Rope(64, 150000.0, scaling=_GPT_OSS_YARN), attention_bias=True),
}


def synthetic_decoder(name: str, seed: int = 0) -> Decoder:
    """One layer of the named shape in float32; the same seed gives the same weights everywhere.

    Weights are normal with variance 1/fan-in, so that scores have a standard deviation of about 1 and the softmax is
    neither flat nor a single spike; norm weights are 1. Embeddings are small (standard deviation 0.02), so that the
    logits speak of the attention rather than of the token itself.

    Raises:
        ArgumentError: an unknown name.
    """
    if name not in SHAPES:
        raise ArgumentError("synthetic", repr(name), f"one of {', '.join(SHAPES)}")
    with torch.device("meta"):
        decoder = Decoder(SHAPES[name])
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for key, parameter in decoder.named_parameters():
        if key.endswith("norm.weight"):
            weights[key] = torch.ones(parameter.shape)
        else:
            deviation = 0.02 if key == "embed_tokens.weight" else parameter.shape[-1] ** -0.5
            weights[key] = torch.randn(parameter.shape, generator=generator) * deviation
    decoder.load_state_dict(weights, assign=True)
    return decoder.requires_grad_(False)
