"""decode.py with one fault on rank 1, for torchrun: `faulty_decode.py FAULT [options]`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

import decode
from nki_parallel_attn.integrations.kv_parallel_decode import KVParallelDecode
from rank_process import run_as_rank

fault = sys.argv.pop(1)


def fail_in_third_step(self: KVParallelDecode, token_ids: object) -> object:
    steps.append(token_ids)
    if len(steps) == 3:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("a bug on rank 1")
    return step(self, token_ids)  # type: ignore[arg-type]


steps: list[object] = []
step = KVParallelDecode.step
if os.environ.get("RANK") == "1":
    KVParallelDecode.step = fail_in_third_step  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    run_as_rank(decode.main, "decode")
