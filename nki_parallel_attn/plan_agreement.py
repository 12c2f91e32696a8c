"""A plan as JSON, and the check that all ranks hold the same one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, RankMismatchError
from nki_parallel_attn.topology.kv_layout import Contiguous, Interleaved, RoundRobin
from nki_parallel_attn.topology.types import AttentionShape

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from nki_parallel_attn.plan import ShardingPlan

SCHEMA = 1
_LAYOUTS = {"contiguous": Contiguous, "round_robin": RoundRobin, "interleaved": Interleaved}
_FIELDS = (
    "schema",
    "shape",
    "world_size",
    "tp",
    "kvdp",
    "cp",
    "kvp",
    "kv_layout",
    "block_size",
    "seg_size",
    "lnc",
    "target",
    "rank_order",
    "max_seq_len",
)


def to_json(plan: ShardingPlan) -> str:
    """`plan` as a JSON object: "schema", then the constructor's parameters."""
    return json.dumps(as_dict(plan))


def as_dict(plan: ShardingPlan) -> dict[str, Any]:
    """`plan` as plain dicts, strings and numbers."""
    layout = plan.kv_layout
    kind = next(name for name, cls in _LAYOUTS.items() if isinstance(layout, cls))
    values: dict[str, Any] = {"schema": SCHEMA, **dataclasses.asdict(plan)}
    values["kv_layout"] = {"kind": kind, **dataclasses.asdict(layout)}
    return values


def from_json(text: str) -> dict[str, Any]:
    """The constructor's arguments from what `to_json` wrote.

    Raises:
        ArgumentError: not JSON, another schema version, an unknown or missing field.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError("text", type(text).__name__, "a plan as JSON")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ArgumentError("text", repr(text[:80]), "a plan as JSON", str(error)) from None
    if not isinstance(values, dict):
        raise ArgumentError("text", type(values).__name__, "a JSON object")
    if values.get("schema", SCHEMA) != SCHEMA:
        raise ArgumentError("schema", values["schema"], f"{SCHEMA}, the version that this release reads and writes")
    _check_fields("", values, _FIELDS)
    shape_fields = tuple(field.name for field in dataclasses.fields(AttentionShape))
    _check_fields("shape.", values["shape"], shape_fields)
    layout = values["kv_layout"]
    kind = layout.get("kind") if isinstance(layout, dict) else None
    if not isinstance(kind, str) or kind not in _LAYOUTS:
        raise ArgumentError("kv_layout.kind", repr(kind), f"one of {', '.join(_LAYOUTS)}")
    layout_fields = tuple(field.name for field in dataclasses.fields(_LAYOUTS[kind]))
    _check_fields("kv_layout.", layout, ("kind", *layout_fields))
    del values["schema"]
    values["shape"] = AttentionShape(**values["shape"])
    values["kv_layout"] = _LAYOUTS[kind](**{name: layout[name] for name in layout_fields})
    return values


def verify(plan: ShardingPlan, group: ProcessGroup | None) -> None:
    """Raise RankMismatchError on every rank of `group` unless all hold equal plans."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    texts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(texts, to_json(plan), group=group)
    plans = [json.loads(text) for text in texts]
    differences = describe_differences(ranks, [_flat(values) for values in plans])
    if differences:
        raise RankMismatchError(f"plans differ across ranks: {differences}")


def describe_differences(ranks: Sequence[int], plans: Sequence[dict[str, Any]]) -> str:
    """Each field that not all ranks agree on, the minority first: "kvp is 2 on ranks [1], 4 on ranks [0, 2, 3]"."""
    parts = []
    for name in dict.fromkeys(name for values in plans for name in values):
        holders: dict[str, list[int]] = {}
        for rank, values in zip(ranks, plans, strict=True):
            holders.setdefault(repr(values.get(name, "absent")), []).append(rank)
        if len(holders) > 1:
            fewest_first = sorted(holders.items(), key=lambda item: len(item[1]))
            parts.append(f"{name} is " + ", ".join(f"{value} on ranks {held}" for value, held in fewest_first))
    return "; ".join(parts)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields under dotted names: {"shape.q_heads": 32, ...}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return flat


def _check_fields(prefix: str, values: Any, expected: Sequence[str]) -> None:
    if not isinstance(values, dict):
        raise ArgumentError(prefix.rstrip("."), repr(values), "a JSON object")
    for name in values:
        if name not in expected:
            raise ArgumentError(f"{prefix}{name}", "an unknown field", f"one of {', '.join(expected)}")
    for name in expected:
        if name not in values:
            raise ArgumentError(f"{prefix}{name}", "no such field", "every field of a plan")
