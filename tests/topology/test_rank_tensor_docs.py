"""docs/rank_tensors.md names things that exist, and every parameter of the operations there are."""

from __future__ import annotations

import importlib
import inspect
import re
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path

import pytest

from nki_parallel_attn.plan import ShardingPlan
from nki_parallel_attn.plan_rank import RankView

TEXT = (Path(__file__).parents[2] / "docs" / "rank_tensors.md").read_text()


def cells(column: int) -> set[str]:
    """Names in backticks in one column of all tables."""
    rows = [line.split("|") for line in TEXT.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[column])}


def test_methods_exist() -> None:
    methods = cells(4)
    assert len(methods) > 25
    owners = {"view": RankView, "plan": ShardingPlan}
    for owner, name in (method.split(".") for method in methods):
        assert hasattr(owners[owner], name) or name in owners[owner].__annotations__, f"{owner}.{name}"


def test_functions_exist() -> None:
    functions = cells(5)
    assert len(functions) > 18
    for module, name in (function.split(".") for function in functions):
        assert hasattr(importlib.import_module(f"nki_parallel_attn.topology.{module}"), name), f"{module}.{name}"


@pytest.mark.parametrize("name", ["attention_kv_parallel_segmented_cte", "attention_block_tkg"])
def test_every_parameter_is_listed(name: str) -> None:
    operation = getattr(importlib.import_module(f"nki_parallel_attn.ops.{name}"), name)
    ours = {"backend", "lnc", "target", "group", "KVDP_group", "CP_group", "check_ranks", "is_qk_swapped"}
    section = TEXT.split(f"## {name}\n")[1].split("\n## ")[0]
    listed = {word for cell in re.findall(r"`([^`]+)`", section) for word in cell.split(", ")}
    parameters = set(inspect.signature(operation).parameters) - ours
    assert not [name for name in parameters if not any(fnmatch(name, pattern) for pattern in listed)]
