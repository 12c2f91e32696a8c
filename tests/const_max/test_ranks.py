"""Among ranks the operation is local: one may call it while the others do not."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nki_parallel_attn import attention_const_max
from nki_parallel_attn.testing import run_ranks
from tests.const_max.case import HEAD_DIM, Case
from tests.tolerance import attention_tolerance


def on_one_rank() -> None:
    if dist.get_rank() == 0:
        return
    case = Case(1, 10, 20)
    got = attention_const_max(softmax_max=4.0, backend="sim", **case.arguments())
    tolerance = attention_tolerance(torch.bfloat16, case.tensors()[2], HEAD_DIM)
    torch.testing.assert_close(got.double(), case.expected(), rtol=0, atol=tolerance)


def test_a_rank_calls_it_alone():
    run_ranks(on_one_rank, 2)
