"""kvp_prefill.py with one fault on rank 1, for torchrun: `faulty_prefill.py FAULT [options]`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

import kvp_prefill
from nki_parallel_attn.integrations.kv_parallel_prefill import _Chunk
from prefill_model import PrefillModel, load_model
from rank_process import run_as_rank

fault = sys.argv.pop(1)
on_rank_1 = os.environ.get("RANK") == "1"


def with_damaged_weight(options: object) -> PrefillModel:
    model = load_model(options)  # type: ignore[arg-type]
    model.decoder.layers[2].self_attn.k_proj.weight.mul_(1.01)
    return model


def fail_in_third_layer(self: _Chunk, layer: object, hidden: object) -> object:
    if layer.index == 2:  # type: ignore[attr-defined]
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("a bug on rank 1")
    return attention(self, layer, hidden)  # type: ignore[arg-type]


attention = _Chunk.attention
if on_rank_1 and fault == "weight":
    kvp_prefill.load_model = with_damaged_weight
elif on_rank_1:
    _Chunk.attention = fail_in_third_layer  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    run_as_rank(kvp_prefill.main, "kvp_prefill")
