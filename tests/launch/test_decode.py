"""launch/decode.py as users start it: a torchrun job, its output, its report and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import messages, start

SCRIPT = "launch/decode.py"


def test_a_hundred_steps_without_arguments(tmp_path: Path) -> None:
    run = start(4, "--report", tmp_path / "report.json", script=SCRIPT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("PASS: 101 of 101 tokens equal to glassllm's own generation") == 1
    for expected in ("reads 1 x 28 tokens", "cp=4", "100/100", "tokens per second", "CP: all-to-all of partial"):
        assert expected in run.stdout, run.stdout
    assert "redistribute" not in run.stdout and "\x1b" not in run.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] and report["comparison"]["ours"] == report["comparison"]["theirs"]
    assert report["prefill_plan"]["kvp"] == report["decode_plan"]["cp"] == 4
    assert report["kv_cache_bytes_per_rank"] == {"measured": 65536, "planned": 65536}
    assert len(report["sent_bytes_per_step"]) == 4
    for sent in report["sent_bytes_per_step"].values():
        assert sent["measured"] == sent["planned"] > 0
    together = sum(sent["measured"] for sent in report["sent_bytes_per_step"].values())
    assert report["sent_bytes_per_token"] == {"measured": together, "planned": together}
    assert report["tokens_per_second"] > 0


def test_one_rank_without_torchrun() -> None:
    run = start(0, "--steps", "5", script=SCRIPT)
    assert run.returncode == 0, run.stderr
    assert "PASS" in run.stdout and "torchrun --nproc-per-node 4 launch/decode.py" in run.stdout


def test_a_bad_option_is_told_once() -> None:
    run = start(2, "--strategy", "kvdp", "--batch", "3", script=SCRIPT)
    assert run.returncode == 1 and run.stdout == ""
    assert len(messages(run, "decode")) == 1 and "kvdp divides batch" in messages(run, "decode")[0]
    assert 'decode.py", line' not in run.stderr


@pytest.mark.parametrize("fault", ["bug", "killed"])
def test_fault_on_one_rank(fault: str) -> None:
    run = start(2, fault, "--steps", "5", script="tests/launch/faulty_decode.py")
    assert run.returncode == 1 and "PASS" not in run.stdout
    if fault == "bug":
        assert len(messages(run, "decode")) == 1 and run.stderr.count("ZeroDivisionError: a bug on rank 1") == 1
    else:
        assert "Signal 9" in run.stderr and len(messages(run, "decode")) <= 1
