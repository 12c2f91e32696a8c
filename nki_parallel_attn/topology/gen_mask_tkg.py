"""The full attention mask of a decoding step: gen_mask_tkg makes it, is_qk_swapped says which of two layouts it has.

The reference kernel wants one layout or the other by a rule that is not public, so attention_block_tkg takes the layout
as an argument of that name and never infers it. Whoever makes a mask knows it; whoever is handed one can ask here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.topology.masks import swap_qk


def is_qk_swapped(attention_mask: Tensor, *, S_ctx: int, B_attn: int, q_heads_attn: int, S_tkg: int) -> bool:
    """Whether a full mask is Q-stationary: the `is_qk_swapped` that goes with it to attention_block_tkg.

    Args:
        attention_mask: [S_ctx, B_attn, q_heads_attn, S_tkg], or swapped [B_attn, q_heads_attn, S_tkg, S_ctx].
        S_ctx: keys of the mask, the active tokens' S_tkg included.
        B_attn, q_heads_attn, S_tkg: as in attention_block_tkg.

    Raises:
        ArgumentError: the mask has neither shape, or both are the same, as only happens when all four sizes are equal.
    """
    plain, swapped = (S_ctx, B_attn, q_heads_attn, S_tkg), (B_attn, q_heads_attn, S_tkg, S_ctx)
    shape = tuple(attention_mask.shape)
    if shape not in (plain, swapped):
        raise ArgumentError("attention_mask", f"shape {list(shape)}", f"{list(plain)}, or swapped {list(swapped)}")
    if plain == swapped:
        raise ArgumentError("attention_mask", f"shape {list(shape)}", "a shape that differs between the two layouts")
    return shape == swapped


def gen_mask_tkg(
    pos_ids: Tensor,
    S_ctx: int,
    q_heads_attn: int,
    *,
    swa_start_pos_ids: Tensor | None = None,
    active_mask: Tensor | None = None,
    is_qk_swapped: bool = False,
) -> Tensor:
    """`attention_mask` of attention_block_tkg without pos_ids, equal in meaning to the call with them.

    The prior of sequence b is slots [swa_start_pos_ids[b, s] or 0, pos_ids[b, 0]); the last S_tkg keys are the active
    tokens. Keys are in sequence order, for block caches too.

    Args:
        pos_ids: [B_attn, S_tkg] integers, local slots under CP.
        S_ctx: keys of the mask, the active tokens' S_tkg included.
        q_heads_attn: Q heads after the gathers, q_heads*KVDP*CP.
        swa_start_pos_ids: [B_attn, S_tkg] integers.
        active_mask: [S_tkg, B_attn, 1 or q_heads_attn, S_tkg], 1 = visible; None for causal, which suits CP=1 only:
            under CP the ones belong on the token's owner alone.
        is_qk_swapped: the layout of the result. Which of the two the reference kernel wants follows a rule that is
            not public; ours takes either and the same argument.

    Returns:
        uint8 [S_ctx, B_attn, q_heads_attn, S_tkg], swapped [B_attn, q_heads_attn, S_tkg, S_ctx].

    Raises:
        ArgumentTypeError, ArgumentError: not integers; shapes that do not fit; a negative position; a prior that leaves
            no row for the active tokens.
    """
    for name, value in (("pos_ids", pos_ids), ("swa_start_pos_ids", swa_start_pos_ids)):
        if value is None:
            continue
        if value.is_floating_point() or value.dtype == torch.bool:
            raise ArgumentTypeError(name, value.dtype, "an integer dtype")
        if value.ndim != 2 or value.shape != pos_ids.shape or not value.numel():
            raise ArgumentError(name, tuple(value.shape), "[B_attn, S_tkg]")
        if int(value.min()) < 0:
            raise ArgumentError(name, int(value.min()), "at least 0")
    batch, tokens = pos_ids.shape
    if int(pos_ids[:, 0].max()) + tokens > S_ctx:
        raise ArgumentError(
            "S_ctx", S_ctx, f"at least {int(pos_ids[:, 0].max()) + tokens}: the longest prior and S_tkg={tokens}"
        )
    slots = torch.arange(S_ctx - tokens, device=pos_ids.device)[:, None, None]
    prior = (slots < pos_ids[:, :1]).expand(-1, -1, tokens)
    if swa_start_pos_ids is not None:
        prior = prior & (slots >= swa_start_pos_ids)
    if active_mask is None:
        active_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=pos_ids.device).triu()[:, None, None, :]
        active_mask = active_mask.expand(-1, batch, -1, -1)
    expected = (tokens, batch, active_mask.shape[2] if active_mask.ndim == 4 else 1, tokens)
    if tuple(active_mask.shape) != expected or expected[2] not in (1, q_heads_attn):
        raise ArgumentError(
            "active_mask", tuple(active_mask.shape), f"[{tokens}, {batch}, 1 or {q_heads_attn}, {tokens}]"
        )
    parts = [prior[:, :, None, :], active_mask != 0]
    mask = torch.cat([part.expand(-1, -1, q_heads_attn, -1) for part in parts]).to(torch.uint8)
    return swap_qk(mask) if is_qk_swapped else mask
