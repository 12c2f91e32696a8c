"""The dense decoder against models written by others: glassllm's own forward and transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from glassllm_checkpoint import save_as_huggingface

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.integrations.decoder import Decoder
from nki_parallel_attn.integrations.glassllm import load_glassllm
from nki_parallel_attn.integrations.huggingface import load_checkpoint
from nki_parallel_attn.integrations.tolerance import logits_tolerance

TEXT = "Alice looked at the tall clock on the wall, and it looked back at her as if it had a question of its own."


def assert_same_logits(got: torch.Tensor, expected: torch.Tensor, decoder: Decoder) -> None:
    assert got.shape == expected.shape and expected.isfinite().all()
    deviation = (got - expected).abs().max().item()
    assert deviation <= logits_tolerance(decoder.config, expected), deviation


def test_glassllm_logits_equal_its_own_forward() -> None:
    model = load_glassllm()
    token_ids = torch.randint(1024, (128,), generator=torch.Generator().manual_seed(0))
    assert_same_logits(model.decoder(token_ids), model.original_logits(token_ids), model.decoder)
    assert model.decode(model.encode(TEXT)) == TEXT


def test_tolerance_notices_small_damage() -> None:
    model = load_glassllm()
    token_ids = torch.tensor(model.encode(TEXT))
    model.decoder.layers[2].self_attn.k_proj.weight[:, 5] *= 1.01
    with pytest.raises(AssertionError):
        assert_same_logits(model.decoder(token_ids), model.original_logits(token_ids), model.decoder)


@pytest.mark.parametrize("shards", [1, 3])
def test_glassllm_weights_in_huggingface_format(tmp_path: Path, shards: int) -> None:
    from transformers import AutoModelForCausalLM

    model = load_glassllm()
    save_as_huggingface(model, tmp_path, shards)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.encode(TEXT) == model.encode(TEXT)
    token_ids = torch.tensor(model.encode(TEXT))
    expected = model.original_logits(token_ids)
    assert_same_logits(checkpoint.decoder(token_ids), expected, model.decoder)
    transformers_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert_same_logits(transformers_model(token_ids[None]).logits[0], expected, model.decoder)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        (torch.tensor([[1, 2]]), "int64 tensor"),
        (torch.tensor([], dtype=torch.int64), "non-empty"),
        (torch.tensor([0.5]), "float32"),
        (torch.tensor([3, 1024]), "1024"),
        (torch.tensor([-1]), "-1"),
    ],
)
def test_bad_token_ids(token_ids: torch.Tensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load_glassllm().decoder(token_ids)
