"""The decode block's switches against the float64 oracle; all ranks in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from nki_parallel_attn import attention_block_tkg
from tests.tkg.case import Case
from tests.tkg.compare import check_rank
from tests.tkg.in_process import run_block
from tests.tkg.pairwise import SWITCHES, pairwise_cases, valid


def check(case: Case) -> None:
    arguments = [case.arguments(index) for index in range(case.ranks)]
    results = run_block(arguments, case.kvdp, case.cp)
    for index in range(case.ranks):
        check_rank(case, index, arguments[index], results[index])


PLAIN = Case(batch=4, tokens=2, q_heads=2, kv_heads=2)


def single_switches() -> list[Case]:
    """Each value of each switch alone, with what it needs to exist."""
    needs = {
        "by_4": {"hidden": 512},
        "max_context_len": {"cache": "block4"},
        "dtype_mode": {"fp8": "fp8"},
        "layout": {"cp": 2, "cache": "block4"},
        "out_type": {"out": "bias"},
        "kvdp_mode": {"kvdp": 2},
        "cp_mode": {"cp": 2, "cache": "block4"},
    }
    cases = []
    for name, values in SWITCHES.items():
        for value in values:
            extra = dict(needs.get(name, {}))
            if str(value).startswith("packed"):
                extra["fp8"] = "fp8"
            if str(value).endswith("3") and name == "cache":
                extra["kv_heads"] = 1
            if name == "q_heads" and value == 1:
                extra["kv_heads"] = 1
            if name == "in_sb" and value:
                cases += [replace(PLAIN, in_sb=True, out=out, lnc=lnc) for out in SWITCHES["out"] for lnc in (1, 2)]
            if name in ("qkv_type", "out_type") and "MX" in str(value):
                extra |= {"hidden": 512, "by_4": True, "dtype": torch.bfloat16}
            cases.append(replace(PLAIN, **{**extra, name: value}))
    return list(dict.fromkeys(cases))


def _name(case: Case) -> str:
    changed = [f"{n}={getattr(case, n)}" for n in SWITCHES if getattr(case, n) != getattr(PLAIN, n)]
    return ",".join(changed) or "plain"


@pytest.mark.parametrize("case", single_switches(), ids=_name)
def test_each_switch_alone(case):
    assert valid(case)
    check(case)


CHUNKS = 16


@lru_cache
def covering_cases() -> list[Case]:
    return pairwise_cases(at_least=256)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_pairs_of_switches(chunk):
    """Every pair of values of every two switches, over nine arrangements of 1 to 8 ranks."""
    cases = covering_cases()[chunk::CHUNKS]
    assert len(cases) >= 16
    for case in cases:
        try:
            check(case)
        except Exception as error:
            raise AssertionError(case) from error


def test_autocast_takes_no_precision():
    case = Case(dtype=torch.float32, bias=True, out="bias")
    arguments = case.arguments(0)
    with torch.autocast("cpu", torch.bfloat16):
        results = attention_block_tkg(**arguments)
    check_rank(case, 0, arguments, results)
