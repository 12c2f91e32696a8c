"""A damaged checkpoint given to the launcher: one error, on one rank's behalf for all, before anything is computed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from glassllm_checkpoint import save_as_huggingface

from nki_parallel_attn.integrations.glassllm import load_glassllm
from tests.patience import JOB


def test_truncated_weights(tmp_path: Path) -> None:
    save_as_huggingface(load_glassllm(), tmp_path / "model", shards=2)
    shard = tmp_path / "model" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, "launch/kvp_prefill.py", "--model", str(tmp_path / "model"), "--prompt", "Alice"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=JOB,
    )
    told = [line for line in run.stderr.splitlines() if line.startswith("kvp_prefill: error")]
    assert run.returncode == 1 and len(told) == 1, run.stderr
    assert shard.name in told[0] and 'kvp_prefill.py", line' not in run.stderr and not run.stdout.strip()
