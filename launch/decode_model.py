"""What decode.py runs: a decoder, the prompts it continues, and the unsharded model whose tokens are compared."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode_options import DEFAULT_SYNTHETIC_LENGTH
from nki_parallel_attn.errors import ArgumentError, BackendUnavailableError
from nki_parallel_attn.integrations.decoder import Decoder, Dense
from nki_parallel_attn.integrations.glassllm import GlassLLM, load_glassllm
from nki_parallel_attn.integrations.huggingface import load_checkpoint
from nki_parallel_attn.integrations.synthetic import synthetic_decoder
from prefill_model import PASSAGE

Greedy = Callable[[Tensor, list[int]], list[int]]
"""(prompt, our tokens) to the unsharded model's greedy tokens, as many as ours.

Those after the first difference may be what it would choose after ours instead.
"""
RAGGED = 8
"""Prompts of the passage have lengths that differ by up to one less than this, for a batch whose rows differ."""


@dataclass(frozen=True)
class DecodeModel:
    """One model with its input.

    Attributes:
        name: for people.
        decoder: the weights, float32.
        prompts: of each sequence, token ids [S] int64.
        greedy_name: what `greedy` is.
        greedy: the unsharded model.
        decode: token ids to text.
    """

    name: str
    decoder: Decoder
    prompts: list[Tensor]
    greedy_name: str
    greedy: Greedy
    decode: Callable[[list[int]], str]


def load_model(options: argparse.Namespace, batch: int) -> DecodeModel:
    """The model and `batch` prompts, as the options ask.

    Raises:
        ArgumentError: a prompt without tokens, prompt and steps beyond the model's context, a broken checkpoint.
        BackendUnavailableError: a package is missing.
    """
    if options.synthetic:
        decoder = synthetic_decoder(options.synthetic)
        generator = torch.Generator().manual_seed(0)
        length = options.seq_len or DEFAULT_SYNTHETIC_LENGTH
        random = torch.randint(decoder.config.vocab_size, (batch, length), generator=generator)
        _check_context(options.steps, length, decoder, "--seq-len")
        name = f"{options.synthetic} attention shape (one layer, random weights)"
        dense = DenseGreedy(decoder)
        return DecodeModel(name, decoder, list(random), dense.name, dense, lambda ids: " ".join(map(str, ids)))
    if options.model:
        checkpoint = load_checkpoint(options.model)
        prompts = _prompts(options, batch, checkpoint.encode, checkpoint.decoder)
        transformers = _Transformers(options.model)
        return DecodeModel(
            str(options.model), checkpoint.decoder, prompts, transformers.name, transformers, checkpoint.decode
        )
    glassllm = load_glassllm()
    prompts = _prompts(options, batch, glassllm.encode, glassllm.decoder)
    name = "glassllm (trained, 0.85M parameters)"
    own = "glassllm's own generation"
    return DecodeModel(name, glassllm.decoder, prompts, own, _glassllm_greedy(glassllm), glassllm.decode)


class DenseGreedy:
    """The dense decoder on one process; `fp8_kv` rounds K and V to float8 and back as the cache does.

    It reads prompt and tokens at once and chooses after each prefix: up to the first difference that is decoding.
    """

    def __init__(self, decoder: Decoder, fp8_kv: bool = False) -> None:
        self.decoder, self.fp8_kv = decoder, fp8_kv
        self.name = "the dense decoder" + (" with K and V rounded to float8" if fp8_kv else "")

    def __call__(self, prompt: Tensor, tokens: list[int]) -> list[int]:
        ids = torch.cat((prompt, torch.tensor(tokens[:-1], dtype=torch.int64)))
        blocks = Dense(self.decoder.config, len(ids), ids.device, fp8_kv=self.fp8_kv)
        with torch.no_grad():
            hidden = self.decoder.run_layers(ids, blocks)[len(prompt) - 1 :]
            return [int(token) for token in self.decoder.logits(hidden).argmax(-1)]


class _Transformers:
    """transformers' own generation from the same checkpoint, in float32; it never stops before its time."""

    name = "transformers' own generation"

    def __init__(self, directory: Path) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise BackendUnavailableError("transformers is not installed; pip install transformers")
        self.directory = directory

    @cached_property
    def _model(self) -> Any:
        """Loaded when the first reference is wanted, and by the rank that compares alone."""
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        return model

    def __call__(self, prompt: Tensor, tokens: list[int]) -> list[int]:
        made = self._model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=len(tokens),
            do_sample=False,
            pad_token_id=0,
        )
        return [int(token) for token in made[0, len(prompt) :]]


def _glassllm_greedy(glassllm: GlassLLM) -> Greedy:
    def greedy(prompt: Tensor, tokens: list[int]) -> list[int]:
        return [int(step.token) for step in glassllm.original.generate(prompt.tolist(), len(tokens), greedy=True)]

    return greedy


def _prompts(
    options: argparse.Namespace, batch: int, encode: Callable[[str], list[int]], decoder: Decoder
) -> list[Tensor]:
    """The texts of --prompt, or the passage from different lines on, cut so that the steps fit in the context."""
    if options.prompt:
        prompts = [encode(text) for text in options.prompt]
        for prompt in prompts:
            if not prompt:
                raise ArgumentError("--prompt", "no tokens", "a text of at least one token")
            _check_context(options.steps, len(prompt), decoder, "--prompt")
        return [torch.tensor(prompt) for prompt in prompts]
    _check_context(options.steps, 1, decoder, "prompt")
    room, lines = decoder.config.max_positions - options.steps, PASSAGE.splitlines()
    texts = ["\n".join(lines[row % len(lines) :]) for row in range(batch)]
    return [torch.tensor(encode(text)[: max(1, room - row % RAGGED)]) for row, text in enumerate(texts)]


def _check_context(steps: int, prompt: int, decoder: Decoder, argument: str) -> None:
    context = decoder.config.max_positions
    if prompt + steps > context:
        got = f"{steps} steps after {prompt} tokens of {argument}"
        raise ArgumentError("--steps", got, f"at most the model's context of {context} in all")
