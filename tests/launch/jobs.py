"""Launchers as users start them: torchrun jobs, and what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import JOB

ROOT = Path(__file__).parents[2]


def start(ranks: int, *arguments: str | Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run under torchrun with `ranks` ranks, or as a plain script with 0; never longer than JOB."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *torchrun, script, *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        command, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=JOB
    )


def messages(run: subprocess.CompletedProcess[str], program: str) -> list[str]:
    """Lines of stderr with an error that `program` tells."""
    return [line for line in run.stderr.splitlines() if f"{program}: error" in line]
