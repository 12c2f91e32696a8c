"""Faults for rank 1 of validation cases: what a broken backend or machine does."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist

from nki_parallel_attn.validation import prefill_cases
from nki_parallel_attn.validation.case import Deviation, Place
from nki_parallel_attn.validation.prefill_cases import PrefillCase

_operation = prefill_cases.attention_kv_parallel_segmented_cte
_run = PrefillCase.run


def install(faults: dict[str, str]) -> None:
    """From now on prefill cases of these scenarios have these faults on rank 1."""

    def run(case: PrefillCase, place: Place) -> Deviation:
        fault = faults.get(case.scenario, "") if dist.get_rank() == 1 else ""
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hangs":
            time.sleep(1000)
        if fault == "bug":
            raise ZeroDivisionError("a bug on rank 1")
        prefill_cases.attention_kv_parallel_segmented_cte = _wrong if fault == "wrong" else _operation  # type: ignore
        return _run(case, place)

    PrefillCase.run = run  # type: ignore[method-assign]


def _wrong(**arguments: Any) -> Any:
    """One head of the output belongs to another one."""
    return _operation(**arguments).flip(0)
