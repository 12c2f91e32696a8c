"""All ranks of a prefill case in one process: each rank's stages in turn, the exchanges done by indexing.

The operation's own stages, as backends/torch.py and the twin chain them, without a process group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nki_parallel_attn.kernels.attention_kv_parallel_segmented_cte_torch import local_partials
from nki_parallel_attn.kernels.online_softmax_torch import merge, stat_dtype
from nki_parallel_attn.kernels.paged_kv_torch import contiguous_slots, read_local_kv, round_robin_slots


def prefill_in_process(arguments: list[dict[str, Any]]) -> list[Tensor]:
    """Each rank's output from each rank's arguments."""
    q_all = torch.cat([rank["q"] for rank in arguments])
    size = len(arguments)
    heads, rows, dim = arguments[0]["q"].shape
    sent = []
    for index, rank in enumerate(arguments):
        offset, block_size, window = int(rank["kvp_q_offset"]), rank["block_size"], rank["sliding_window"]
        if rank.get("kvp_group_size"):
            visible = round_robin_slots(rows, offset, index, size, block_size, window)
        else:
            visible = contiguous_slots(rows, offset, rank["block_tables"].shape[1] * block_size, window)
        local = read_local_kv(
            rank["k_cache"],
            rank["v_cache"],
            rank["block_tables"],
            visible,
            block_size,
            q_all.dtype,
            fp8_packed=rank.get("fp8_packed", False),
            k_scale=rank.get("k_scale"),
            v_scale=rank.get("v_scale"),
        )
        # What is not written must not be read: it is NaN here.
        outs = [torch.full((heads, rows, dim), torch.nan, dtype=q_all.dtype) for _ in arguments]
        lses = [torch.full((heads, rows), torch.nan, dtype=stat_dtype(q_all.dtype)) for _ in arguments]
        local_partials(q_all, local, rank["scale"], outs, lses)
        sent.append((outs, lses))
    merged = []
    for index in range(size):
        out = torch.empty(heads, rows, dim, dtype=q_all.dtype)
        merge([outs[index] for outs, _ in sent], [lses[index] for _, lses in sent], out)
        merged.append(out)
    return merged
