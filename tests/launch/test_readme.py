"""The README's example runs as it is printed, and its commands are what the launcher's tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 18
    exec(compile(example, "README.md", "exec"), {})
    assert "64 Q heads, 8 KV heads of 128, 80 layers" in capsys.readouterr().out


def test_commands_are_one_line_each() -> None:
    commands = re.findall(r"```\n(pip install .*)\n```", README)
    assert commands == [
        'pip install -e ".[launch]" && torchrun --nproc-per-node 4 launch/kvp_prefill.py',
        'pip install -e ".[test]" && pytest -n 2',
    ]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
