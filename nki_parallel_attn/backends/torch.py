"""Backend "torch": the twins in kernels/*_torch.py, with the collectives of the rank list's process group."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from nki_parallel_attn.backends.process_groups import process_group_for
from nki_parallel_attn.kernels.attention_block_tkg_arguments import BlockArguments, BlockSizes
from nki_parallel_attn.kernels.attention_block_tkg_torch import Output
from nki_parallel_attn.kernels.attention_block_tkg_torch import attention_block_tkg as decode
from nki_parallel_attn.kernels.attention_const_max_torch import attention_const_max as const_max
from nki_parallel_attn.kernels.attention_kv_parallel_segmented_cte_torch import (
    PrefillCall,
)
from nki_parallel_attn.kernels.attention_kv_parallel_segmented_cte_torch import (
    attention_kv_parallel_segmented_cte as prefill,
)
from nki_parallel_attn.kernels.collectives_torch import exchange_for, exchanges_for
from nki_parallel_attn.kernels.output_projection_cte_arguments import ProjectionArguments
from nki_parallel_attn.kernels.output_projection_cte_torch import output_projection_cte as project
from nki_parallel_attn.kernels.paged_kv_torch import contiguous_slots, round_robin_slots
from nki_parallel_attn.topology.platforms import platform_for
from nki_parallel_attn.topology.types import AttentionLayout


def attention_kv_parallel_segmented_cte(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kvp_q_offset: Tensor,
    *,
    ranks: tuple[int, ...],
    index: int,
    block_size: int,
    scale: float,
    tp_out: bool,
    sliding_window: int,
    kvp_group_size: int,
    fp8_packed: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    group: dist.ProcessGroup | None,
    **_: object,
) -> Tensor:
    """Checked arguments; `ranks` is this rank's list and `index` its place there. The others concern devices only."""
    rows, offset = q.shape[1], int(kvp_q_offset)
    if kvp_group_size:
        visible = round_robin_slots(rows, offset, index, kvp_group_size, block_size, sliding_window)
    else:
        visible = contiguous_slots(rows, offset, block_tables.shape[1] * block_size, sliding_window)
    call = PrefillCall(
        block_table=block_tables,
        visible=visible,
        scale=scale,
        block_size=block_size,
        exchange=exchange_for(group or process_group_for(ranks), q.device),
        tp_out=tp_out,
        fp8_packed=fp8_packed,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    with without_autocast(q.device):
        return prefill(q, k_cache, v_cache, call)


def attention_const_max(
    q_hbm: Tensor,
    k_hbm: Tensor,
    v_hbm: Tensor,
    softmax_max: float | Tensor,
    softmax_scale: float,
    q_layout: AttentionLayout,
    k_layout: AttentionLayout,
    **_: object,
) -> Tensor:
    """Checked arguments, the scale resolved."""
    q, k = (
        t if layout is AttentionLayout.SEQ_MAJOR else t.transpose(1, 2).contiguous()
        for t, layout in ((q_hbm, q_layout), (k_hbm, k_layout))
    )
    top = softmax_max[0, 0] if isinstance(softmax_max, Tensor) else softmax_max
    with without_autocast(q.device):
        return const_max(q, k, v_hbm, top, softmax_scale)


def output_projection_cte(args: ProjectionArguments) -> Tensor:
    """Checked arguments; target and lnc only bear on which float8 is meant."""
    with without_autocast(args.attention.device):
        return project(args)


def attention_block_tkg(
    args: BlockArguments,
    sizes: BlockSizes,
    *,
    kvdp_ranks: tuple[int, ...],
    cp_ranks: tuple[int, ...],
    KVDP_group: dist.ProcessGroup | None,
    CP_group: dist.ProcessGroup | None,
) -> tuple[Output, Tensor, Tensor]:
    """Checked arguments; the ranks are this rank's lists, alone where the degree is 1."""
    if sizes.kvdp > 1 and args.KVDP_collective_mode is None:
        platform = platform_for(args.target, dist.get_world_size(), args.lnc)
        args = replace(args, KVDP_collective_mode=platform.kvdp_collective_modes(sizes.kvdp, args.lnc)[0])
    groups = [
        given or process_group_for(ranks)
        for given, ranks, degree in ((KVDP_group, kvdp_ranks, sizes.kvdp), (CP_group, cp_ranks, sizes.cp))
        if degree > 1
    ]
    exchanges = iter(exchanges_for(groups, args.X.device))
    kvdp_exchange = next(exchanges) if sizes.kvdp > 1 else None
    cp_exchange = next(exchanges) if sizes.cp > 1 else None
    with without_autocast(args.X.device):
        return decode(args, sizes, kvdp_exchange, cp_exchange)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Off, a torch.autocast region around the call does not round the twins' float32 products to 16 bits."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
