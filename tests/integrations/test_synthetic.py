"""Synthetic shapes: reproducible, and sensitive to what they are meant to check."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.integrations.synthetic import SHAPES, synthetic_decoder
from nki_parallel_attn.integrations.tolerance import logits_tolerance


def test_small_damage_to_one_head_is_noticed() -> None:
    decoder, same = synthetic_decoder("gpt-oss-120b"), synthetic_decoder("gpt-oss-120b")
    token_ids = torch.randint(1024, (200,), generator=torch.Generator().manual_seed(0))
    expected = decoder(token_ids)
    assert torch.equal(same(token_ids), expected)
    tolerance = logits_tolerance(decoder.config, expected)
    same.layers[0].self_attn.k_proj.weight[64:128].mul_(1.01)
    assert (same(token_ids) - expected).abs().max().item() > 3 * tolerance


def test_shapes_are_the_models() -> None:
    heads = {name: (c.hidden, c.q_heads, c.kv_heads, c.head_dim) for name, c in SHAPES.items()}
    assert heads == {
        "llama3-8b": (4096, 32, 8, 128),
        "llama3-70b": (8192, 64, 8, 128),
        "gpt-oss-120b": (2880, 64, 8, 64),
    }


def test_unknown_shape() -> None:
    with pytest.raises(ArgumentError, match="llama3-70b"):
        synthetic_decoder("llama4")
