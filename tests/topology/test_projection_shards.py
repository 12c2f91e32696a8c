"""Ranks' shards of the projections, against the unsharded projection."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn import ShardingPlan
from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.topology.projection_shards import out_rows, qkv_columns
from nki_parallel_attn.topology.types import AttentionShape

SHAPE = AttentionShape(q_heads=6, kv_heads=3, head_dim=2, hidden=5)


def test_columns_project_exactly_the_rank_s_heads() -> None:
    weight = torch.randn(5, 2 * (6 + 3 + 3), dtype=torch.float64)
    x = torch.randn(4, 5, dtype=torch.float64)
    q, k, v = (x @ weight).reshape(4, 12, 2).split([6, 3, 3], dim=1)
    for q_heads, kv_heads in ((range(2), range(1)), (range(2, 6), range(1, 3)), (range(5, 6), range(2, 3))):
        columns = qkv_columns(SHAPE, q_heads, kv_heads)
        parts = (x @ weight[:, columns]).reshape(4, -1, 2).split([len(q_heads), len(kv_heads), len(kv_heads)], dim=1)
        for part, whole, heads in zip(parts, (q, k, v), (q_heads, kv_heads, kv_heads), strict=True):
            torch.testing.assert_close(part, whole[:, heads.start : heads.stop], rtol=0, atol=1e-14)


def test_out_rows_add_up_to_the_whole_projection() -> None:
    weight, attention = torch.randn(12, 5, dtype=torch.float64), torch.randn(4, 12, dtype=torch.float64)
    total = torch.zeros(4, 5, dtype=torch.float64)
    for start in range(0, 6, 2):
        rows = out_rows(SHAPE, range(start, start + 2))
        total += attention[:, rows] @ weight[rows]
    torch.testing.assert_close(total, attention @ weight, rtol=0, atol=1e-13)


def test_the_plan_cuts_every_form_of_the_projections() -> None:
    """Ranks of two KV groups: plain and MX weights, through the rank's view."""
    shape = AttentionShape(q_heads=8, kv_heads=2, head_dim=16)
    plan = ShardingPlan(shape, world_size=4, kvdp=2)
    packed, scales = torch.arange(8 * 16 // 4)[:, None], torch.arange(8 * 16 // 32)[:, None]
    for rank in range(4):
        view = plan.rank(rank)
        assert torch.equal(view.qkv_columns(), qkv_columns(shape, view.q_heads, view.kv_heads))
        rows = torch.arange(128)[view.out_rows()]
        assert len(rows) == 32 and int(rows[0]) == view.q_heads.start * 16
        assert torch.equal(packed[view.out_rows(4)][:, 0] * 4, rows[::4])
        assert torch.equal(scales[view.out_rows(32)][:, 0] * 32, rows[::32])


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: qkv_columns(SHAPE, range(5, 7), range(1)), "q_heads"),
        (lambda: qkv_columns(SHAPE, range(1), range(3, 4)), "kv_heads"),
        (lambda: qkv_columns(SHAPE, range(0), range(1)), "q_heads"),
        (lambda: out_rows(SHAPE, range(0, 6, 2)), "q_heads"),
        (lambda: out_rows(SHAPE, range(1, 2), 4), "rows_per_entry"),
    ],
)
def test_heads_the_model_lacks_are_named(call, argument: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError, match=rf"^{argument}: got "):
        call()
