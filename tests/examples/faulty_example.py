"""Runs an example with an operation whose result on rank 1 is off by a thousandth."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

import nki_parallel_attn
from nki_parallel_attn import attention_kv_parallel_segmented_cte


def faulty(*args: Any, **kwargs: Any) -> Tensor:
    out = attention_kv_parallel_segmented_cte(*args, **kwargs)
    return out * 1.001 if dist.get_rank() == 1 else out


if __name__ == "__main__":
    nki_parallel_attn.attention_kv_parallel_segmented_cte = faulty
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / sys.argv[1]), run_name="__main__")
