"""Which columns of a packed QKV projection and which rows of an output projection belong to a rank's heads.

The same indices cut the weight, its bias and its scales per channel, so that no quantisation format is special: columns
of an MX weight [H/4, I, 4] and of its scales [H/32, I] are columns of the weight they stand for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.topology.types import AttentionShape


def qkv_columns(shape: AttentionShape, q_heads: range, kv_heads: range) -> Tensor:
    """Columns of the model's W_qkv [H, d*(Q + 2*KV)] that a rank takes as its own: `W_qkv[:, columns]`.

    Args:
        shape: the model copy; its columns are ordered Q heads, K heads, V heads.
        q_heads, kv_heads: the rank's global heads (`RankView.q_heads`, `.kv_heads`). Ranks of a KV group have the
            same kv_heads, for each of them projects the K and V of every active token.

    Returns:
        int64 [d*(len(q_heads) + 2*len(kv_heads))], in the same order.

    Raises:
        ArgumentError: heads that the model does not have.
    """
    _check_heads("q_heads", q_heads, shape.q_heads)
    _check_heads("kv_heads", kv_heads, shape.kv_heads)
    heads = [*q_heads, *(shape.q_heads + h for h in kv_heads), *(shape.q_heads + shape.kv_heads + h for h in kv_heads)]
    return (torch.tensor(heads)[:, None] * shape.head_dim + torch.arange(shape.head_dim)).reshape(-1)


def out_rows(shape: AttentionShape, q_heads: range, rows_per_entry: int = 1) -> slice:
    """Rows of the model's output projection [Q*d, H] that a rank multiplies with its heads: `W_out[rows]`.

    The ranks' products add up to the model's; a bias goes in once, so one rank of the copy
    passes it and the others zeros.

    Args:
        rows_per_entry: rows that an entry of the tensor's first dim stands for: 4 for a packed MX weight
            [Q*d/4, H, 4], 32 for its scales [Q*d/32, H].

    Raises:
        ArgumentError: heads that the model does not have; heads that end within an entry.
    """
    _check_heads("q_heads", q_heads, shape.q_heads)
    start, stop = q_heads.start * shape.head_dim, q_heads.stop * shape.head_dim
    if start % rows_per_entry or stop % rows_per_entry:
        raise ArgumentError("rows_per_entry", rows_per_entry, f"a divisor of the heads' bounds {start} and {stop}")
    return slice(start // rows_per_entry, stop // rows_per_entry)


def _check_heads(argument: str, heads: range, count: int) -> None:
    if heads.step != 1 or not len(heads) or heads.start < 0 or heads.stop > count:
        raise ArgumentError(argument, heads, f"consecutive heads out of 0 to {count - 1}")
