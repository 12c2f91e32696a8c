"""What a decoding step allocates: nothing that grows with the context, and scratch that outlives it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nki_parallel_attn import attention_block_tkg
from nki_parallel_attn.kernels import decode_cache_torch
from nki_parallel_attn.testing import run_ranks
from tests.tkg.case import Case
from tests.tkg.compare import check_rank

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONTEXTS = (2048, 8192)
# int64, int32 and bool copies of the block table, which has one entry for 64 KiB of K and V.
TABLE_BYTES = 32


def peaks(blocks: bool) -> list[int]:
    """Bytes of tensors that the benchmark's step holds at once, for each context; several pieces in all of them."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        # Under a name of its own: launch/ has a decode.py too.
        spec = importlib.util.spec_from_file_location("decode_benchmark", BENCHMARKS / "decode.py")
        assert spec is not None and spec.loader is not None
        benchmark: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = benchmark
        spec.loader.exec_module(benchmark)
        found = []
        with patch.object(decode_cache_torch, "PIECE_SLOTS", 512):
            for context in CONTEXTS:
                actions = benchmark.set_up(context, blocks)
                actions["run"]()
                decode_cache_torch._kept.by_dtype.clear()  # scratch counts too
                found.append(actions["tensors"]())
        return found
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("blocks", [False, True])
def test_memory_does_not_grow_with_the_context(blocks: bool) -> None:
    for short, long in run_ranks(peaks, 2, args=(blocks,)):
        entries = 8 * (CONTEXTS[1] - CONTEXTS[0]) // 128 // 2 if blocks else 0
        assert 0 < short <= long <= short + TABLE_BYTES * entries


def test_scratch_made_in_inference_mode_serves_outside_of_it() -> None:
    case = Case(cache="block4", longest=60)
    decode_cache_torch._kept.by_dtype.clear()
    with torch.inference_mode():
        attention_block_tkg(**case.arguments(0))
    arguments = case.arguments(0)
    check_rank(case, 0, arguments, attention_block_tkg(**arguments))
