"""launch/validate.py as users start it: on one machine and under torchrun, its reports, and what faults do to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import validate
from nki_parallel_attn.errors import ArgumentError, PeerError, UnsupportedFeatureError
from nki_parallel_attn.validation.case import Deviation
from nki_parallel_attn.validation.matrix import Selection, matrix, name_filter
from rank_process import Job
from tests.patience import JOB
from validate_options import parse, selection
from validate_outcome import RankResult, judge, of_exception
from validate_report import Record

ROOT = Path(__file__).parents[2]
ATTRIBUTES = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"name", "time", "tests", "failures", "errors", "skipped", "timestamp"},
    "testcase": {"name", "time", "classname"},
    "property": {"name", "value"},
    "failure": {"type", "message"},
    "skipped": {"message"},
    "properties": set(),
    "system-out": set(),
}
"""What Jenkins' junit-10.xsd knows; the first four need theirs."""
TWO_RANKS = [
    "--backend",
    "torch",
    "--kernel",
    "attention_kv_parallel_segmented_cte",
    "--layout",
    "round_robin",
    "--ranks",
    "2",
]


def start(
    folder: Path, ranks: int, *arguments: str, script: str = "launch/validate.py"
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run under torchrun with `ranks` ranks, or as a plain script with 0; the run and its JSON report."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    files = ["--json", str(folder / "report.json"), "--junit", str(folder / "report.xml")]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    run = subprocess.run(
        [sys.executable, *torchrun, script, *arguments, *files],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=JOB,
    )
    assert (folder / "report.json").exists(), run.stderr
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    check_junit(ET.parse(folder / "report.xml").getroot(), report)
    return run, report


def check_junit(root: ET.Element, report: dict[str, Any]) -> None:
    """The XML is what CI systems know, and says what the JSON says."""
    for element in root.iter():
        allowed = ATTRIBUTES[element.tag]
        assert set(element.attrib) <= allowed
        if element.tag in ("testsuites", "testsuite", "testcase", "property"):
            assert set(element.attrib) == allowed
    counts = report["counts"]
    assert int(root.attrib["tests"]) == len(report["cases"]) == len(list(root.iter("testcase")))
    assert int(root.attrib["failures"]) == counts.get("failed", 0) == len(list(root.iter("failure")))
    skipped = sum(int(suite.attrib["skipped"]) for suite in root)
    assert (
        skipped
        == len(list(root.iter("skipped")))
        == len(report["cases"]) - sum(counts.get(status, 0) for status in ("passed", "failed"))
    )


def status_by_scenario(report: dict[str, Any]) -> dict[str, str]:
    return {case["scenario"]: case["status"] for case in report["cases"]}


def test_simulator_on_one_machine(tmp_path: Path) -> None:
    expression = "ranks=2 and lnc=2 and (causal or two_groups or block/cp) or odd_heads"
    expression = f"({expression}) and bfloat16"
    run, report = start(tmp_path, 0, "--backend", "sim", "-k", expression)
    assert run.returncode == 0, run.stdout + run.stderr
    assert report["passed"] and report["counts"] == {"passed": 6, "not available": 1}
    for case in report["cases"]:
        assert f"  {case['name']}  " in run.stdout
        if case["kernel"] == "attention_block_tkg":
            assert case["status"] == "not available" and "no NKI kernel yet" in case["message"]
        else:
            assert 0 < case["error"] < case["tolerance"] and case["rank"] in range(4)
    assert "PASS: 6 passed, 1 not available" in run.stdout and "n/a" in run.stdout and "\x1b" not in run.stdout
    assert report["environment"]["torch"] and report["settings"]["seed"] == 0


def test_simulator_under_torchrun(tmp_path: Path) -> None:
    """Groups of two side by side; a case of three ranks does not fit into the world of four."""
    run, report = start(tmp_path, 4, "--ranks", "2", "3", "-k", "round_robin and lnc=2 and (float32 or two_groups)")
    assert run.returncode == 0, run.stdout + run.stderr
    assert [(case["ranks"], case["status"]) for case in report["cases"]] == [
        (2, "passed"),
        (3, "skipped"),
        (2, "passed"),
    ]
    assert run.stdout.count("PASS: 2 passed, 1 skipped") == 1 and "needs a multiple of 3 ranks" in run.stdout


def test_faults_cost_their_cases(tmp_path: Path) -> None:
    """A wrong result, a death, a hang and an exception on rank 1; ranks that are started here are replaced."""
    faults = "window=wrong,padding=killed,causal=hangs,one_head=bug"
    options = ["--dtype", "bfloat16", "--timeout", "12", "-k", "window or padding or causal or one_head or shared"]
    run, report = start(tmp_path, 0, faults, *TWO_RANKS, *options, script="tests/launch/faulty_validate.py")
    assert run.returncode == 1
    statuses = status_by_scenario(report)
    assert statuses.pop("shared_blocks") == "passed" and set(statuses.values()) == {"failed"} and len(statuses) == 4
    message = {case["scenario"]: case["message"] for case in report["cases"]}
    assert message["window"].startswith("rank 1: output is off by")
    assert "rank 1: died of SIGKILL" in message["padding"]
    assert "did not finish within" in message["causal"] and "faults.py" in message["causal"]
    assert "ZeroDivisionError: a bug on rank 1" in message["one_head"]
    assert "FAIL: 1 passed, 4 failed" in run.stdout


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ("causal=wrong,window=bug", "ZeroDivisionError: a bug on rank 1"),
        ("causal=wrong,window=killed", "had not finished"),
    ],
)
def test_faults_under_torchrun(tmp_path: Path, faults: str, said: str) -> None:
    """A wrong result fails its case; ranks that are lost or out of step end the run, with what was done written."""
    options = ["--dtype", "bfloat16", "-k", "prefix or causal or window or padding"]
    run, report = start(tmp_path, 2, faults, *TWO_RANKS, *options, script="tests/launch/faulty_validate.py")
    assert run.returncode == 1
    assert status_by_scenario(report) == {
        "prefix": "passed",
        "causal": "failed",
        "window": "failed",
        "padding": "not run",
        "run_time_prefix": "not run",
    }
    assert said in report["cases"][2]["message"] and report["ended"]
    assert run.stdout.count("FAIL: 1 passed, 2 failed, 2 not run") == 1


def test_a_hang_under_torchrun(tmp_path: Path) -> None:
    options = ["--dtype", "bfloat16", "--timeout", "4", "-k", "causal or window"]
    run, report = start(tmp_path, 2, "causal=hangs", *TWO_RANKS, *options, script="tests/launch/faulty_validate.py")
    assert run.returncode == 1 and status_by_scenario(report) == {"causal": "failed", "window": "not run"}
    assert "did not finish within" in report["cases"][0]["message"] and "hang since" in report["ended"]


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["validate.py", *arguments])
    monkeypatch.setenv("NKI_PARALLEL_ATTN_BACKEND", "")
    return validate.main(Job(0, 1, under_torchrun=False, store=dist.HashStore()))


def test_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "--list", "--ranks", "2", "--lnc", "1", "-k", "contiguous and prefix") == 0
    names = capsys.readouterr().out.split()
    assert len(names) == 5 and names[0] == (
        "attention_kv_parallel_segmented_cte/contiguous/prefix/bfloat16/ranks=2/lnc=1"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--backend tpu", "--backend"),
        ("--kernel softmax", "attention_const_max"),
        ("--ranks 0", "positive integer"),
        ("--lnc 3", "--lnc"),
        ("--timeout nan", "positive number of seconds"),
        ("--seed -1", "seed"),
        ("-k nothing_is_called_so", "no case"),
        ("-k not", "words of case names"),
        ("--json /no/such/folder/report.json", "--json"),
        ("--junit .", "--junit"),
        ("--json same --junit same", "another file"),
        ("--backend neuron", "nki package"),
    ],
)
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: str, said: str) -> None:
    monkeypatch.setattr(validate, "run_here", lambda *_: pytest.fail("ran"))
    with pytest.raises((ArgumentError, ImportError), match=said):
        main(monkeypatch, *arguments.split())


def test_refused_once_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, "launch/validate.py", "--json", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=JOB
    )
    assert run.returncode == 1 and run.stderr.count("validate: error") == 1 and "--json" in run.stderr


def test_lnc_on_device_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    assert parse(["--backend", "neuron"]).lnc == [2]
    with pytest.raises(ArgumentError, match="NEURON_LOGICAL_NC_CONFIG"):
        parse(["--backend", "neuron", "--lnc", "1", "2"])
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert parse(["--backend", "neuron"]).lnc == [1]
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "4")
    with pytest.raises(ArgumentError, match="1 or 2"):
        parse(["--backend", "neuron"])


def test_selection() -> None:
    assert selection(parse([]), None).ranks == (1, 2, 4, 8)
    assert set(selection(parse([]), 12).ranks) == {1, 2, 4, 12}
    names = [case.name for case in matrix((1, 2, 4, 8, 16))]
    assert len(set(names)) == len(names) > 150
    assert {case.lnc for case in Selection("torch").cases()} == {1}
    assert {case.lnc for case in Selection("sim").cases()} == {1, 2}
    for case in Selection("sim", kernels=("attention_const_max",)).cases():
        assert case.dtype == "bfloat16"
    matches = name_filter("prefix and not (float8 or contiguous)")
    assert matches("x/prefix/float16") and not matches("x/prefix/float8_packed") and not matches("causal")


def test_verdict() -> None:
    good, bad, nan = Deviation(0.1, 1.0), Deviation(2.0, 1.0), Deviation(float("nan"), 1.0)
    assert judge({0: RankResult(good), 1: RankResult(good)}, 1.0).status == "passed"
    assert judge({0: RankResult(good), 1: RankResult(bad)}, 1.0).rank == 1
    assert judge({0: RankResult(bad), 1: RankResult(nan)}, 1.0).rank == 1
    assert judge({0: RankResult(Deviation(0.0, 0.0))}, 1.0).status == "passed"
    assert judge({}, 1.0, "ranks [0] hang").status == "failed" == judge({0: RankResult(nan)}, 1.0).status
    assert RankResult.from_json(RankResult(nan).to_json()).deviation is not None
    (case, *_), decode = matrix((2,)), matrix((2,))[-1]
    peer, own = (of_exception(case, "sim", error) for error in (PeerError("rank 1 died"), ValueError("a bug")))
    assert judge({0: peer, 1: own}, 1.0).title == "rank 1: ValueError: a bug"
    missing = UnsupportedFeatureError("no kernel")
    assert judge({0: of_exception(decode, "sim", missing)}, 1.0).status == "not available"
    assert judge({0: of_exception(decode, "torch", missing)}, 1.0).status == "failed"
    assert judge({0: of_exception(case, "sim", missing)}, 1.0).status == "failed"


def test_record_is_complete_at_any_time(tmp_path: Path) -> None:
    """The case that runs has failed unless it ends; text that XML cannot hold is replaced."""
    cases = Selection("sim", expression="odd_heads or ragged").cases()
    record = Record(cases, {"seed": 0}, tmp_path / "r.xml", tmp_path / "r.json")
    record.start(cases[0])
    record.end(cases[0], judge({0: RankResult(Deviation(float("nan"), 1.0, "a\x00<&\x1b[0m]]>"))}, 1.0))
    record.start(cases[1])
    report = json.loads((tmp_path / "r.json").read_text())
    check_junit(ET.parse(tmp_path / "r.xml").getroot(), report)
    assert report["counts"] == {"failed": 2, "not run": 2} and not report["passed"]
    assert report["cases"][0]["error"] is None and sorted(path.name for path in tmp_path.iterdir()) == [
        "r.json",
        "r.xml",
    ]
    for case in cases:
        record.end(case, judge({0: RankResult(Deviation(0.0, 1.0))}, 1.0))
    assert record.passed
