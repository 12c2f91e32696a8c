"""The NKI kernel on the simulator, strict checks on, against the float64 oracle and the twin."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn import attention_const_max
from nki_parallel_attn.kernels import attention_const_max as kernel_module
from nki_parallel_attn.kernels.tiling import interleaved_tiles, share_of_core
from nki_parallel_attn.sim import simulate
from tests.const_max.case import HEAD, HEAD_DIM, SEQ, Case, as_tensor
from tests.tolerance import attention_tolerance


def check(case, softmax_max=4.5, **options):
    got = attention_const_max(softmax_max=softmax_max, backend="sim", **case.arguments(), **options)
    assert got.dtype is torch.bfloat16
    tolerance = attention_tolerance(torch.bfloat16, case.tensors()[2], HEAD_DIM)
    torch.testing.assert_close(got.double(), case.expected(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("q_layout", [HEAD, SEQ])
@pytest.mark.parametrize("k_layout", [HEAD, SEQ])
@pytest.mark.parametrize("softmax_max", [4.5, as_tensor(4.5)], ids=["number", "tensor"])
def test_layouts_cores_targets(target, lnc, q_layout, k_layout, softmax_max):
    check(Case(2, 200, 300, q_layout=q_layout, k_layout=k_layout), softmax_max, lnc=lnc, target=target)


# Below, at and above the sizes of tiles (128), passes (512 queries), loads (1024 keys) and steps (2 tiles of keys).
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (1, 1),
        (1, 129),
        (127, 128),
        (128, 127),
        (129, 1),
        (512, 384),
        (513, 1024),
        (640, 1025),
        (1100, 1281),
        (64, 2200),
    ],
)
def test_remainders(queries, keys, lnc):
    check(Case(1, queries, keys, q_layout=SEQ, seed=queries + keys), lnc=lnc)


@pytest.mark.parametrize("heads", [1, 2, 3, 5])
@pytest.mark.parametrize("lnc", [1, 2])
def test_heads_over_cores(heads, lnc):
    check(Case(heads, 260, 130), lnc=lnc)


def test_more_keys_than_stay_in_sbuf():
    check(Case(1, 20, kernel_module.KEYS_PER_SECTION + 200, k_layout=SEQ))


@pytest.mark.parametrize(("queries", "keys"), [(700, 1300), (512, 1024), (513, 2049)])
@pytest.mark.parametrize("lnc", [1, 2])
def test_several_blocks_of_queries_and_sections_of_keys(monkeypatch, queries, keys, lnc):
    monkeypatch.setattr(kernel_module, "KEYS_PER_SECTION", 1024)
    monkeypatch.setattr(kernel_module, "QUERIES_PER_BLOCK", 512)
    check(Case(1, queries, keys), lnc=lnc, target="trn3")


@pytest.mark.parametrize("scale", [0.03, -0.1, 0.0])
def test_scale(scale):
    check(Case(1, 140, 140, scale=scale), softmax_max=3)


@pytest.mark.parametrize("softmax_max", [-60.0, 0.0, 60.0, as_tensor(60.0)])
def test_far_from_the_maximum(softmax_max):
    check(Case(1, 100, 200), softmax_max=softmax_max)


def test_views_are_taken_as_they_are():
    case = Case(2, 100, 200, q_layout=SEQ, k_layout=SEQ)
    arguments = case.arguments()
    for name in ("q_hbm", "k_hbm"):
        arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    got = attention_const_max(softmax_max=4.0, backend="sim", **arguments)
    assert torch.equal(got, attention_const_max(softmax_max=4.0, backend="sim", **case.arguments()))


def test_default_scale_and_layouts_of_the_kernel_itself():
    case = Case(1, 100, 100)
    q, k, v = (case.arguments()[name] for name in ("q_hbm", "k_hbm", "v_hbm"))
    got = simulate(kernel_module.attention_const_max, target="trn2")(q, k, v, 4.0)
    tolerance = attention_tolerance(torch.bfloat16, v, HEAD_DIM)
    torch.testing.assert_close(got.double(), case.expected(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_the_cores(seed):
    case = Case(1, 300, 200)
    q, k, v = (case.arguments()[name] for name in ("q_hbm", "k_hbm", "v_hbm"))
    runs = [
        simulate(kernel_module.attention_const_max, lnc=2, target="trn2", seed=s)(q, k, v, 4.0) for s in (None, seed)
    ]
    assert torch.equal(*runs)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("heads", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000])
def test_cores_share_the_work(heads, rows, cores):
    done = []
    for core in range(cores):
        (head, last_head), (row, last_row) = share_of_core(heads, rows, core, cores)
        done += [(h, r) for h in range(head, last_head) for r in range(row, last_row)]
    assert sorted(done) == [(h, r) for h in range(heads) for r in range(rows)]


@pytest.mark.parametrize("count", [1, 127, 128, 129, 512, 1000, 1024, 1500])
@pytest.mark.parametrize("tiles", [1, 4, 8])
def test_tiles_cover_every_row_once(count, tiles):
    rows = [
        first + tile + row * width
        for first, width, size in interleaved_tiles(5, count, tiles)
        for tile in range(width)
        for row in range(size)
    ]
    assert sorted(rows) == list(range(5, 5 + count))
