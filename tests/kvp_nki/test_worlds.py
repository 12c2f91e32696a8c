"""The kernel on worlds of 1 to 8 ranks at LNC 1 and 2; the riskiest combinations first."""

from __future__ import annotations

import pytest
import torch

from tests.kvp.case import Case
from tests.kvp_nki.world import check, run

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def case(**changes) -> Case:
    """A small case; 2 heads per rank unless `heads` says otherwise."""
    settings = {"ranks": 4, "rows": 256, "block_size": 16, "head_dim": 64, "dtype": BF16} | changes
    return Case(**({"heads": 2 * settings["ranks"]} | settings))


CASES = {
    "everything": case(prior=37, kv_heads=2, window=100, padding=9),
    "everything, contiguous": case(layout="contiguous", prior=50, kv_heads=2, window=70, padding=3),
    "run-time prefix and window": case(apc=True, prior=75, window=30, padding=5),
    "run-time prefix with absent blocks": case(apc=True, prior=160, absent=(0, 1, 9)),
    "8 ranks": case(ranks=8, rows=128),
    "8 ranks, one head each": case(ranks=8, heads=8, rows=128, head_dim=128),
    "4 heads per rank": case(ranks=2, heads=8, kv_heads=2),
    "one head in all": case(ranks=1, heads=1),
    "one head each": case(ranks=2, heads=2, prior=19),
    "head_dim 128": case(ranks=2, head_dim=128, prior=64),
    "head_dim 32": case(ranks=2, head_dim=32),
    "head_dim 33": case(ranks=2, head_dim=33, dtype=FP32),
    "odd in all: 3 ranks, head_dim 17, blocks of 65": case(
        ranks=3, heads=3, head_dim=17, block_size=65, rows=65, prior=900
    ),
    "float32": case(ranks=2, dtype=FP32, prior=11),
    "float16": case(ranks=2, dtype=FP16, kv_heads=2, prior=21),
    "blocks of 128": case(ranks=2, block_size=128, rows=512),
    "blocks of 64": case(ranks=2, block_size=64, prior=100),
    "blocks of 32": case(block_size=32, prior=7),
    "blocks of 48": case(ranks=2, block_size=48, rows=192, prior=50),
    "blocks of 256": case(ranks=2, block_size=256, rows=512, prior=256),
    "transposed output": case(ranks=2, tp_out=True),
    "transposed output, float32": case(ranks=2, tp_out=True, dtype=FP32, layout="contiguous"),
    "contiguous": case(ranks=2, layout="contiguous"),
    "rows that 128 does not divide": case(ranks=2, rows=208, prior=3),
    "one tile, two cores": case(ranks=2, rows=96),
    "three tiles, two cores": case(ranks=2, rows=384),
    "window of one": case(ranks=2, window=1),
    "unscaled": case(ranks=2, scale=1.0, dtype=FP32),
    "negative scale": case(ranks=2, scale=-0.5),
    "scale of 0": case(ranks=2, scale=0.0),
    "64 heads": case(ranks=2, heads=64, head_dim=128, dtype=FP32, rows=384, block_size=128),
    "one block": case(ranks=1, rows=16, heads=2),
    "more than one segment": case(ranks=1, rows=128, prior=4300, heads=2, head_dim=32),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_oracle(name):
    """On two cores, the harder way; the long grid has both."""
    check(CASES[name], lnc=2)


@pytest.mark.parametrize("name", list(CASES)[:6])
def test_equals_oracle_on_one_core(name):
    check(CASES[name])


def test_trn3():
    check(case(ranks=2, prior=37, kv_heads=2, window=100, padding=9), target="trn3")


def test_segments_never_change_the_result():
    """They do change how many exchanges there are; a row's sums run over the same tiles in any case."""
    whole = case(rows=512, ranks=2, prior=20, heads=2)
    arguments = [whole.arguments(rank) for rank in range(2)]
    outs = [run([rank | {"seg_size": seg} for rank in arguments]) for seg in (16, 256, 512)]
    assert all(torch.equal(a, b) for others in outs[1:] for a, b in zip(outs[0], others, strict=True))
    check(whole, lnc=2, seg_size=256)
