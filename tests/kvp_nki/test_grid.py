"""Layouts x ranks x LNC x dtypes x block sizes x head dims x masks; run with `pytest -m long tests/kvp_nki`."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.kvp.case import Case
from tests.kvp_nki.world import check

pytestmark = pytest.mark.long

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MASKS = {
    "causal": {},
    "prefix": {"prior": 45},
    "window": {"prior": 200, "window": 90},
    "padding": {"prior": 30, "padding": 7},
    "apc": {"prior": 100, "apc": True},
    "absent": {"prior": 160, "absent": (1, 4, 5)},
}


@pytest.mark.parametrize(
    ("layout", "mask"),
    # apc_mode exists in round-robin mode only.
    [("round_robin", mask) for mask in MASKS] + [("contiguous", mask) for mask in MASKS if mask != "apc"],
)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("lnc", [1, 2])
def test_masks(layout, lnc, ranks, mask):
    check(Case(ranks=ranks, rows=256, block_size=16, heads=ranks, dtype=BF16, layout=layout, **MASKS[mask]), lnc=lnc)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_shapes(dtype, block_size, head_dim):
    check(Case(ranks=2, rows=384, block_size=block_size, heads=4, head_dim=head_dim, dtype=dtype, prior=70), lnc=2)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(
    ("ranks", "per_rank", "kv_heads"),
    # KV heads divide the group's heads.
    [sizes for sizes in product([1, 2, 4], [1, 2, 4], [1, 2]) if sizes[0] * sizes[1] % sizes[2] == 0],
)
def test_heads(ranks, per_rank, kv_heads, lnc):
    heads = ranks * per_rank
    check(Case(ranks=ranks, rows=128, block_size=32, heads=heads, kv_heads=kv_heads, dtype=BF16, prior=33), lnc=lnc)


@pytest.mark.parametrize("tp_out", [False, True])
@pytest.mark.parametrize("rows", [16, 80, 144, 1024])
@pytest.mark.parametrize("lnc", [1, 2])
def test_lengths(lnc, rows, tp_out):
    check(Case(ranks=2, rows=rows, block_size=16, heads=2, dtype=BF16, prior=5, tp_out=tp_out), lnc=lnc, seg_size=16)
