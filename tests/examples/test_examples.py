"""The examples as users start them, and with a fault on one rank: they must notice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import JOB

ROOT = Path(__file__).parents[2]
EXAMPLES = ["sharded_decode.py", "context_parallel_training.py"]


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        command, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=JOB
    )


def test_every_example_is_here_and_in_the_readme() -> None:
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == sorted(EXAMPLES)
    assert all(f"examples/{name}" in (ROOT / "README.md").read_text() for name in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_equal_to_the_unsharded_module(example: str) -> None:
    run = torchrun(f"examples/{example}")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("PASS") == 1 and "FAIL" not in run.stdout and "2 ranks" in run.stdout


@pytest.mark.parametrize("example", EXAMPLES)
def test_fault_on_one_rank(example: str) -> None:
    run = torchrun("tests/examples/faulty_example.py", example)
    assert run.returncode != 0
    assert run.stdout.count("FAIL") == 1 and "PASS" not in run.stdout
