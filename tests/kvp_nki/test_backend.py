"""backend="sim" on real rank processes: the public operation, equal to backend="torch"."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nki_parallel_attn import ReplicaGroup, attention_kv_parallel_segmented_cte
from nki_parallel_attn.errors import PeerError, RankMismatchError, UnsupportedFeatureError
from tests.kvp.case import Case
from tests.tolerance import attention_tolerance

BF16 = torch.bfloat16


def compare(case: Case, index: int, **overrides) -> None:
    arguments = case.arguments(index) | overrides
    options = {name: arguments.pop(name) for name in ("lnc", "target") if name in arguments}
    expected = attention_kv_parallel_segmented_cte(**arguments, backend="torch")
    out = attention_kv_parallel_segmented_cte(**arguments, **options, backend="sim")
    assert out.shape == expected.shape and out.dtype == expected.dtype
    real = slice(0, case.rows - case.padding)
    far = (out.double() - expected.double())[:, real].abs().max()
    # Each is within the tolerance of the exact result.
    assert far <= 2 * attention_tolerance(case.dtype, case.v, case.head_dim)


@pytest.mark.multirank(world_size=4)
def test_equals_torch_on_four_ranks(rank):
    compare(Case(ranks=4, rows=128, block_size=16, prior=37, kv_heads=2, dtype=BF16, window=100, padding=9), rank)
    compare(Case(ranks=4, rows=128, block_size=16, prior=64, apc=True), rank, lnc=2)
    # A plan gives every rank its id; contiguous shards need none.
    rank_id = torch.tensor([[rank]], dtype=torch.int32)
    compare(Case(ranks=4, rows=64, block_size=16, prior=37, layout="contiguous"), rank, kvp_rank_id=rank_id)
    groups = ReplicaGroup([[0, 2], [1, 3]])
    compare(Case(ranks=2, rows=64, block_size=16, seed=rank % 2), rank // 2, replica_groups=groups, target="trn3")


def test_equals_torch_alone():
    compare(Case(ranks=1, rows=64, block_size=16, heads=2), 0)


@pytest.mark.multirank(world_size=2)
def test_bad_arguments_raise_on_all_ranks(rank):
    """Before any collective; the ranks stay in step."""
    case = Case(ranks=2, rows=64, block_size=16)
    bad = {"seg_size": 17} if rank else {}
    with pytest.raises(ValueError if rank else PeerError):
        attention_kv_parallel_segmented_cte(**(case.arguments(rank) | bad), backend="sim")
    with pytest.raises(RankMismatchError, match="scale"):
        attention_kv_parallel_segmented_cte(**(case.arguments(rank) | {"scale": 1.0 + rank}), backend="sim")
    with pytest.raises(RankMismatchError, match="backend"):
        attention_kv_parallel_segmented_cte(**case.arguments(rank), backend="sim" if rank else "torch")
    dist.barrier()
    compare(case, rank)


def test_what_it_cannot_do():
    case = Case(ranks=1, rows=16, block_size=16, heads=1, dtype=torch.float64)
    with pytest.raises(UnsupportedFeatureError, match="float64"):
        attention_kv_parallel_segmented_cte(**case.arguments(0), backend="sim")
    arguments = Case(ranks=1, rows=16, block_size=16, heads=1).arguments(0)
    with pytest.raises(UnsupportedFeatureError, match="gradient"):
        attention_kv_parallel_segmented_cte(**(arguments | {"q": arguments["q"].requires_grad_()}), backend="sim")
