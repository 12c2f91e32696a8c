"""Kernels are built with one NKI in a process: a backend that stands for the other one says so.

A stand-in for the nki package, whose kernels say that they ran, shows which one was called.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import JOB

STAND_IN = {
    "__init__": """
class Kernel:
    def __getitem__(self, lnc):
        return lambda *arguments: print(f"device ran with LNC {lnc}")

def jit(function):
    return Kernel()
""",
    "language": "class NKIObject: pass\ndef __getattr__(name): return name\n",
    "isa": "def __getattr__(name): return name\n",
    "collectives": "def __getattr__(name): return name\n",
}
SCRIPT = """
import torch
from nki_parallel_attn import attention_const_max
ones = torch.ones(1, 128, 128, dtype=torch.bfloat16)
for backend, lnc in (("sim", 1), ("neuron", 1), ("neuron", 2)):
    try:
        out = attention_const_max(ones, ones, ones, 4.0, backend=backend, lnc=lnc)
        print(backend, lnc, "ran")
    except Exception as error:
        print(backend, lnc, type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {},
            [
                "sim 1 BackendUnavailableError the kernels of this process are built with the installed nki package",
                "neuron 1 ArgumentError lnc: got 1, expected 2",
                "device ran with LNC 2",
                "neuron 2 ran",
            ],
        ),
        (
            {"NKI_PARALLEL_ATTN_BACKEND": "sim"},
            [
                "sim 1 ran",
                "neuron 1 BackendUnavailableError the kernels of this process are built with the simulator",
                "neuron 2 BackendUnavailableError the kernels of this process are built with the simulator",
            ],
        ),
        (
            {"NKI_PARALLEL_ATTN_BACKEND": "neuron", "NEURON_LOGICAL_NC_CONFIG": "1"},
            [
                "sim 1 BackendUnavailableError the kernels of this process are built with the installed nki package",
                "device ran with LNC 1",
                "neuron 1 ran",
                "neuron 2 ArgumentError lnc: got 2, expected 1",
            ],
        ),
    ],
    ids=["nki installed", "told to simulate", "told to use the device"],
)
def test_a_backend_runs_its_own_kernels(tmp_path: Path, environment: dict[str, str], expected: list[str]) -> None:
    package = tmp_path / "nki"
    package.mkdir()
    for name, source in STAND_IN.items():
        (package / f"{name}.py").write_text(source)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=JOB,
    )
    lines = run.stdout.splitlines()
    assert len(lines) == len(expected), run.stdout + run.stderr
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)
