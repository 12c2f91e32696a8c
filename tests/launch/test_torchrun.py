"""launch/kvp_prefill.py as users start it: a torchrun job, its output, its report and its exit status."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from jobs import ROOT

from tests.patience import JOB

SCRIPT = "launch/kvp_prefill.py"


def start(ranks: int, *arguments: str | Path, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    return jobs.start(ranks, *arguments, script=script)


def messages(run: subprocess.CompletedProcess[str]) -> list[str]:
    return jobs.messages(run, "kvp_prefill")


def free_port() -> int:
    """A free port below the ephemeral ones: a client that tries one of those too early can connect to itself."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def test_without_arguments(tmp_path: Path) -> None:
    run = start(4, "--report", tmp_path / "report.json")
    assert run.returncode == 0, run.stderr
    for expected in ("reads 128 tokens", "kvp=4", "K and V", "all-gather of Q", "glassllm's own forward", "next token"):
        assert run.stdout.count(expected) >= 1, run.stdout
    assert run.stdout.count("PASS") == 1 and "\x1b" not in run.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] and report["plan"]["kvp"] == 4
    assert report["kv_cache_bytes"]["per_rank"] * 4 == report["kv_cache_bytes"]["unsharded"]
    comparison = report["comparison"]
    assert 0 < comparison["deviation"] <= comparison["tolerance"] < 1e-3
    assert comparison["positions"] == comparison["same_choice"] == 128
    assert comparison["ours"][0]["token_id"] == comparison["theirs"][0]["token_id"]
    for sent in report["sent_bytes"].values():
        assert sent["least"] <= sent["sent"] <= 1.2 * sent["least"]


def test_prefix_known_at_run_time() -> None:
    run = start(4, "--apc")
    assert run.returncode == 0, run.stderr
    assert "8/8 layers" in run.stdout and "PASS" in run.stdout and "glassllm's own forward" in run.stdout


def test_contiguous_with_sliding_window() -> None:
    run = start(4, "--layout", "contiguous", "--sliding-window", "20")
    assert run.returncode == 0, run.stderr
    assert "Contiguous" in run.stdout and "the dense reference decoder" in run.stdout and "PASS" in run.stdout


def test_one_rank_without_torchrun() -> None:
    run = start(0)
    assert run.returncode == 0, run.stderr
    assert "PASS" in run.stdout and "torchrun --nproc-per-node 4 launch/kvp_prefill.py" in run.stdout


def test_world_size_that_does_not_fit() -> None:
    run = start(3)
    assert run.returncode == 1
    assert len(messages(run)) == 1 and "world_size: 1, 2, 4" in messages(run)[0]
    assert 'kvp_prefill.py", line' not in run.stderr and "PASS" not in run.stdout


def test_two_agents_that_meet_by_rendezvous() -> None:
    """Two torchrun agents, as on two hosts, each with one rank, over gloo."""
    endpoint = f"127.0.0.1:{free_port()}"
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--nproc-per-node", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, SCRIPT]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NKI_PARALLEL_ATTN_TRANSPORT": "gloo"}
    agents = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=JOB) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sum(out.count("PASS") for out, _ in outputs) == 1 and any("(gloo)" in out for out, _ in outputs)


@pytest.mark.parametrize("fault", ["weight", "bug", "killed"])
def test_fault_on_one_rank(fault: str) -> None:
    run = start(2, fault, script="tests/launch/faulty_prefill.py")
    assert run.returncode == 1 and "PASS" not in run.stdout
    if fault == "weight":
        assert "FAIL: largest deviation" in run.stdout and not messages(run)
    elif fault == "bug":
        assert len(messages(run)) == 1 and run.stderr.count("ZeroDivisionError: a bug on rank 1") == 1
    else:
        assert "Signal 9" in run.stderr and len(messages(run)) <= 1
