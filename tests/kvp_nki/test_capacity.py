"""What fits on chip, by the instruction stream alone: a call that does not fit raises CapacityError."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn.kernels.attention_kv_parallel_segmented_cte import attention_kv_parallel_segmented_cte
from nki_parallel_attn.sim import ReplicaGroup, profile


@pytest.mark.parametrize(("own_heads", "dtype"), [(4, torch.bfloat16), (8, torch.bfloat16), (8, torch.float32)])
def test_many_heads_fit(own_heads, dtype):
    """32 and 64 heads of 128 over 8 ranks, in many short exchanges."""
    ranks, rows, block = 8, 2048, 128
    q = torch.empty(own_heads, rows, 128, dtype=dtype, device="meta")
    cache = torch.empty(rows // ranks // block, 1, block, 128, dtype=dtype, device="meta")
    table = torch.empty(1, rows // ranks // block, dtype=torch.int32, device="meta")
    number = torch.empty(1, 1, dtype=torch.int32, device="meta")
    run = profile(attention_kv_parallel_segmented_cte, world_size=ranks, representative=0)
    group = ReplicaGroup([list(range(ranks))])
    report = run(q, cache, cache, table, number, group, ranks, block, rows, kvp_rank_id=number, kvp_group_size=ranks)
    assert all(core.sbuf_peak_bytes <= report.sbuf_capacity for core in report.cores)
