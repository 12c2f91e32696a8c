"""What kvp_prefill.py runs: a decoder, the tokens it reads, and the reference its logits are compared with."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.integrations.decoder import Decoder
from nki_parallel_attn.integrations.glassllm import load_glassllm
from nki_parallel_attn.integrations.huggingface import load_checkpoint
from nki_parallel_attn.integrations.rope import DynamicScaling
from nki_parallel_attn.integrations.synthetic import synthetic_decoder
from prefill_options import DEFAULT_SYNTHETIC_LENGTH

PASSAGE = """The clock in the hall had stopped at a quarter to four, and nobody in the house could say when it had.
Alice thought it very curious, for she was quite sure that she had heard it strike six that very morning.
'Perhaps it went to sleep,' said the Cat, 'and it is only the other clocks which go on without it.'
'But how can a clock go to sleep?' asked Alice, looking up at its large white face.
'In just the same way as you do,' the Cat replied, 'by waiting until there is nothing more to say.'
Alice did not know what to answer, so she sat down upon the stairs and began to count the minutes by herself."""
"""Written for this project; longer than glassllm's context of 128 tokens, to which it is cut."""


@dataclass(frozen=True)
class PrefillModel:
    """One model with its input.

    Attributes:
        name: for people.
        decoder: the weights, float32.
        token_ids: [S] int64.
        reference_name: what `reference` is.
        reference: logits [S, vocab_size] of the unsharded model.
        decode: token ids to text.
    """

    name: str
    decoder: Decoder
    token_ids: Tensor
    reference_name: str
    reference: Callable[[Tensor], Tensor]
    decode: Callable[[list[int]], str]


def load_model(options: argparse.Namespace) -> PrefillModel:
    """The model and the tokens that the options ask for.

    Raises:
        ArgumentError: a prompt file that cannot be read, a text that is not UTF-8, without tokens or longer than the
            model's context, a broken checkpoint.
    """
    if options.synthetic:
        return _synthetic(options)
    text = options.prompt
    if options.prompt_file:
        try:
            text = options.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError("--prompt-file", options.prompt_file, "a text in UTF-8", str(error)) from error
    if options.model:
        checkpoint = load_checkpoint(options.model)
        decoder = _with_window(checkpoint.decoder, options.sliding_window)
        token_ids = _fit(checkpoint.encode(PASSAGE if text is None else text), decoder, text is None)
        dense = "the dense reference decoder"
        return PrefillModel(str(options.model), decoder, token_ids, dense, decoder, checkpoint.decode)
    glassllm = load_glassllm()
    decoder = _with_window(glassllm.decoder, options.sliding_window)
    token_ids = _fit(glassllm.encode(PASSAGE if text is None else text), decoder, text is None)
    name = "glassllm (trained, 0.85M parameters)"
    if options.sliding_window:
        return PrefillModel(name, decoder, token_ids, "the dense reference decoder", decoder, glassllm.decode)
    own_forward = "glassllm's own forward"
    return PrefillModel(name, decoder, token_ids, own_forward, glassllm.original_logits, glassllm.decode)


def _synthetic(options: argparse.Namespace) -> PrefillModel:
    decoder = _with_window(synthetic_decoder(options.synthetic), options.sliding_window)
    length = options.seq_len or DEFAULT_SYNTHETIC_LENGTH
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(decoder.config.vocab_size, (length,), generator=generator)
    _fit(token_ids.tolist(), decoder, cut=False)
    name = f"{options.synthetic} attention shape (one layer, random weights)"
    dense = "the dense reference decoder"
    return PrefillModel(name, decoder, token_ids, dense, decoder, lambda ids: " ".join(map(str, ids)))


def _with_window(decoder: Decoder, window: int | None) -> Decoder:
    if window:
        decoder.config = dataclasses.replace(decoder.config, sliding_window=(window,) * decoder.config.layers)
    return decoder


def _fit(token_ids: list[int], decoder: Decoder, cut: bool) -> Tensor:
    """Tokens as a tensor; those beyond the model's context are cut off or refused."""
    context = decoder.config.max_positions
    if cut:
        token_ids = token_ids[:context]
    if not token_ids:
        raise ArgumentError("prompt", "no tokens", "a text of at least one token")
    if len(token_ids) > context and not isinstance(decoder.config.rope.scaling, DynamicScaling):
        raise ArgumentError("prompt", f"{len(token_ids)} tokens", f"at most the model's context of {context}")
    return torch.tensor(token_ids)
