"""The trained decoder that the PyPI package glassllm ships (MIT): 0.85M parameters, 4 layers, context 128.

glassllm computes in NumPy; its own forward is the reference the launcher compares with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nki_parallel_attn.errors import BackendUnavailableError
from nki_parallel_attn.integrations.decoder import Decoder, DecoderConfig
from nki_parallel_attn.integrations.rope import Rope, RopeOrder


@dataclass(frozen=True)
class GlassLLM:
    """The shipped English model, in torch and as it came.

    Attributes:
        decoder: the same weights as a `Decoder`, float32 unless asked otherwise.
        original: glassllm's own GlassLM.
        tokenizer: glassllm's own Tokenizer, with encode(text) and decode(ids).
    """

    decoder: Decoder
    original: Any
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return [int(token) for token in self.tokenizer.encode(text)]

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`."""
        return str(self.tokenizer.decode(token_ids))

    def original_logits(self, token_ids: Tensor) -> Tensor:
        """Logits [S, vocab_size] of glassllm's own forward, float64: NumPy promotes its float32 weights there."""
        import glassllm

        with glassllm.no_grad():
            logits = self.original(token_ids.numpy()).data[0]
        return torch.from_numpy(np.ascontiguousarray(logits))


def load_glassllm(dtype: torch.dtype = torch.float32) -> GlassLLM:
    """Load weights, config and tokenizer from the installed package.

    Raises:
        BackendUnavailableError: glassllm is not installed.
    """
    try:
        import glassllm
    except ImportError as error:
        message = 'the package glassllm is not installed; pip install "nki-parallel-attn[launch]"'
        raise BackendUnavailableError(message) from error
    original, tokenizer = glassllm.load_pretrained("en")
    cfg = original.cfg
    head_dim = cfg.d_model // cfg.n_heads
    weights = {
        _parameter_name(name): torch.from_numpy(value.data).to(dtype)
        for name, value in original.named_parameters().items()
    }
    # glassllm multiplies x @ W, so its matrices are the transposes of torch's; the embedding is a table in both.
    weights = {
        name: weight.T.contiguous() if weight.ndim == 2 and name != "embed_tokens.weight" else weight
        for name, weight in weights.items()
    }
    config = DecoderConfig(
        vocab_size=cfg.vocab_size,
        hidden=cfg.d_model,
        layers=cfg.n_layers,
        q_heads=cfg.n_heads,
        kv_heads=cfg.n_kv_heads,
        head_dim=head_dim,
        intermediate=len(weights["layers.0.mlp.gate_proj.weight"]),
        max_positions=cfg.max_len,
        rope=Rope(head_dim, cfg.rope_base, RopeOrder.ADJACENT_PAIRS, dtype=torch.float64),
        sliding_window=(0,) * cfg.n_layers,
        rms_norm_eps=cfg.eps,
        tied_embeddings=True,
    )
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.load_state_dict(weights, assign=True)
    return GlassLLM(decoder.requires_grad_(False), original, tokenizer)


_PARTS = {
    "norm1.gamma": "input_layernorm.weight",
    "attn.W_Q": "self_attn.q_proj.weight",
    "attn.W_K": "self_attn.k_proj.weight",
    "attn.W_V": "self_attn.v_proj.weight",
    "attn.W_O": "self_attn.o_proj.weight",
    "norm2.gamma": "post_attention_layernorm.weight",
    "ffn.W1": "mlp.gate_proj.weight",
    "ffn.W3": "mlp.up_proj.weight",
    "ffn.W2": "mlp.down_proj.weight",
}


def _parameter_name(glassllm_name: str) -> str:
    """blocks.3.attn.W_Q -> layers.3.self_attn.q_proj.weight."""
    if not glassllm_name.startswith("blocks."):
        return {"E": "embed_tokens.weight", "norm_f.gamma": "norm.weight"}[glassllm_name]
    _, index, part = glassllm_name.split(".", 2)
    return f"layers.{index}.{_PARTS[part]}"
