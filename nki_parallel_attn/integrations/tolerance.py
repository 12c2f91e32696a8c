"""How far two evaluations of one decoder may lie apart when each rounds its own way.

Rounding model: rounding errors have random signs, so a reduction of n terms is off by about sqrt(n) unit roundoffs
relative to the size of its result (Higham & Mary 2019, "A new approach to probabilistic rounding error analysis").
The reductions of a layer follow each other (norm, Q/K/V, scores, softmax, output projection, norm, gate and up, down),
the residual stream adds the layers, the final norm and projection come on top; their errors add in quadrature, as if
the chain were one reduction of the summed length. Both sides round, hence the factor 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nki_parallel_attn.integrations.decoder import DecoderConfig


def relative_tolerance(config: DecoderConfig, sequence_length: int, dtype: torch.dtype = torch.float32) -> float:
    """2 * unit roundoff * sqrt(terms summed along the longest chain of one forward)."""
    attention = 2 * config.hidden + config.head_dim + sequence_length + config.q_heads * config.head_dim
    feed_forward = 2 * config.hidden + config.intermediate if config.intermediate else 0
    chain = config.layers * (attention + feed_forward) + 2 * config.hidden
    return torch.finfo(dtype).eps * math.sqrt(chain)  # eps is two unit roundoffs


def logits_tolerance(config: DecoderConfig, reference: Tensor) -> float:
    """Largest accepted |logit - reference logit|: `relative_tolerance`, float32, of the largest |reference logit|."""
    return relative_tolerance(config, len(reference)) * reference.abs().max().item()
