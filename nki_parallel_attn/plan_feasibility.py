"""Which plans are possible: the rules in order, and a search for the feasible values nearest to a plan that breaks one.

A rule names the parameters that could be changed to satisfy it. The search changes one of them, or as few as it takes,
and offers only what breaks no rule at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from nki_parallel_attn.errors import ArgumentTypeError, PlanError
from nki_parallel_attn.topology.kv_layout import Contiguous, Interleaved, KVLayout, RoundRobin
from nki_parallel_attn.topology.platforms import LNC_VALUES, TARGETS
from nki_parallel_attn.topology.types import AttentionShape

RANK_ORDERS = ("consecutive", "strided")
MAX_HEAD_DIM = 128


@dataclass(frozen=True)
class Request:
    """The parameters of a plan as they were asked for; None means the default that follows from the others."""

    shape: AttentionShape
    world_size: int
    tp: int | None
    kvdp: int
    cp: int
    kvp: int
    kv_layout: KVLayout
    block_size: int
    seg_size: int | None
    lnc: int
    target: str
    rank_order: str
    max_seq_len: int | None

    @property
    def tp_size(self) -> int:
        """tp, by default the whole world."""
        return self.world_size if self.tp is None else self.tp

    @property
    def group_size(self) -> int:
        """Ranks that share KV."""
        return self.kvp * self.kvdp * self.cp

    @property
    def segment(self) -> int:
        """seg_size, by default one block from each rank: what the kernel's apc_mode advances by."""
        return self.kvp * self.block_size if self.seg_size is None else self.seg_size


@dataclass(frozen=True)
class Rule:
    """One condition, the parameters that could be changed to meet it, and the test; earlier rules are known to hold."""

    text: str
    parameters: tuple[str, ...]
    holds: Callable[[Request], bool]


def _positive(name: str) -> Rule:
    return Rule(f"{name} >= 1", (name,), lambda r: getattr(r, name) is None or getattr(r, name) >= 1)


def _heads_fit(r: Request) -> bool:
    kv_groups = r.tp_size // r.group_size
    return r.shape.kv_heads % kv_groups == 0 or kv_groups % r.shape.kv_heads == 0


_SIZES = ("world_size", "tp", "kvdp", "cp", "kvp", "block_size", "seg_size", "max_seq_len")

RULES: tuple[Rule, ...] = (
    *(_positive(name) for name in _SIZES),
    Rule("lnc is 1 or 2", ("lnc",), lambda r: r.lnc in LNC_VALUES),
    Rule("target is trn2 or trn3", ("target",), lambda r: r.target in TARGETS),
    Rule("rank_order is consecutive or strided", ("rank_order",), lambda r: r.rank_order in RANK_ORDERS),
    Rule(f"head_dim <= {MAX_HEAD_DIM}", ("head_dim",), lambda r: r.shape.head_dim <= MAX_HEAD_DIM),
    Rule(
        "head_dim is even for decoding (kvdp*cp > 1)",
        ("head_dim", "kvdp", "cp"),
        lambda r: r.kvdp * r.cp == 1 or r.shape.head_dim % 2 == 0,
    ),
    Rule("lnc divides hidden", ("lnc", "hidden"), lambda r: r.shape.hidden is None or r.shape.hidden % r.lnc == 0),
    Rule("tp divides world_size", ("tp", "world_size"), lambda r: r.world_size % r.tp_size == 0),
    Rule("tp divides q_heads", ("tp", "world_size"), lambda r: r.shape.q_heads % r.tp_size == 0),
    Rule(
        "kvp == 1 or kvdp*cp == 1: a plan shares KV for prefill (kvp) or for decoding (kvdp*cp)",
        ("kvp", "kvdp", "cp"),
        lambda r: r.kvp == 1 or r.kvdp * r.cp == 1,
    ),
    Rule(
        "the KV-sharing group, kvp or kvdp*cp ranks, divides tp",
        ("kvp", "kvdp", "cp", "tp", "world_size"),
        lambda r: r.tp_size % r.group_size == 0,
    ),
    Rule(
        "the number of KV groups, tp/kvp or tp/(kvdp*cp), divides kv_heads or is a multiple of it",
        ("kvp", "kvdp", "cp", "tp", "world_size", "kv_heads"),
        _heads_fit,
    ),
    Rule(
        "kvp takes kv_layout Contiguous or RoundRobin",
        ("kv_layout", "kvp"),
        lambda r: r.kvp == 1 or not isinstance(r.kv_layout, Interleaved),
    ),
    Rule(
        "kv_layout's interleave divides block_size",
        ("kv_layout", "block_size"),
        lambda r: (
            not isinstance(r.kv_layout, Interleaved)
            or (r.kv_layout.interleave >= 1 and r.block_size % r.kv_layout.interleave == 0)
        ),
    ),
    Rule("block_size divides seg_size", ("block_size", "seg_size"), lambda r: r.segment % r.block_size == 0),
)


def check_feasible(request: Request) -> None:
    """Return when every rule holds.

    Raises:
        ArgumentTypeError: a parameter of the wrong type.
        PlanError: the first rule that is broken, with the feasible values nearest to the request.
    """
    _check_types(request)
    rule = broken_rule(request)
    if rule is not None:
        got = ", ".join(f"{name}={_shown(_get(request, name))}" for name in _reported(rule, request))
        raise PlanError(rule.text, got, nearest_feasible(request))


def broken_rule(request: Request) -> Rule | None:
    """The first rule that `request` breaks, None when it is feasible."""
    return next((rule for rule in RULES if not rule.holds(request)), None)


def nearest_feasible(request: Request) -> dict[str, list[int | str]]:
    """Feasible values nearest to an infeasible `request`.

    Returns:
        By parameter name, values that are feasible when that parameter alone is changed: for numbers the nearest below
        and above. Where no single change will do, one entry under the changed names joined by ", ", whose values list
        theirs in that order, e.g. {"tp, kvp": ["(4, 2)"]}.
    """
    for changes in (1, 2):
        repairs = sorted(_repairs(request, {}, changes), key=lambda repair: _distance(request, repair))
        if repairs:
            return _single(request, repairs) if changes == 1 else _joint(repairs)
    return _joint([_repair_one_by_one(request)])


def with_values(request: Request, values: dict[str, Any]) -> Request:
    """`request` with the named parameters changed; kv_heads and head_dim are changed in its shape."""
    shape = {name: value for name, value in values.items() if hasattr(request.shape, name)}
    plain = {name: value for name, value in values.items() if name not in shape}
    return replace(request, shape=replace(request.shape, **shape), **plain)


def _repairs(request: Request, changed: dict[str, Any], changes: int) -> Iterator[dict[str, Any]]:
    """Every feasible change of exactly `changes` further parameters, each needed by the first rule still broken."""
    if not changes:
        if broken_rule(request) is None:
            yield changed
        return
    for name, value, mended in _mendings(request):
        if name not in changed:
            yield from _repairs(mended, {**changed, name: value}, changes - 1)


def _repair_one_by_one(request: Request) -> dict[str, Any]:
    """Mend one rule after the other, each by the nearest value; where no one value does, share no KV at all."""
    changed: dict[str, Any] = {}
    while broken_rule(request) is not None:
        options = [({name: value}, mended) for name, value, mended in _mendings(request)]
        if not options:
            alone = {name: 1 for name in ("kvp", "kvdp", "cp") if _get(request, name) != 1}
            if not alone:
                return {}
            options = [(alone, with_values(request, alone))]
        asked = request
        change, request = min(options, key=lambda option: _distance(asked, option[0]))
        changed.update(change)
    return changed


def _mendings(request: Request) -> Iterator[tuple[str, Any, Request]]:
    """Every change of one parameter after which the first broken rule holds, and the rules before it still do."""
    rule = broken_rule(request)
    if rule is None:
        return
    later = RULES[RULES.index(rule) + 1 :]
    for name in rule.parameters:
        for value in _candidates(request, name):
            mended = with_values(request, {name: value})
            broken = broken_rule(mended)
            if broken is None or broken in later:
                yield name, value, mended


def _candidates(r: Request, name: str) -> list[Any]:
    """Values to try for one parameter: all that its rules could accept, or the nearest where those abound."""
    shape = r.shape
    if name == "world_size":
        # tp follows the world unless it was given.
        return _divisors(shape.q_heads) if r.tp is None else _multiples_near(r.world_size, r.tp)
    if name in ("tp", "kvdp", "cp", "kvp", "kv_heads"):
        return _divisors(shape.q_heads)
    if name == "block_size":
        unit = r.kv_layout.interleave if isinstance(r.kv_layout, Interleaved) else 1
        return [*_multiples_near(r.block_size, unit), *_divisors(r.seg_size or 0)]
    if name == "seg_size":
        return [] if r.seg_size is None else _multiples_near(r.seg_size, r.block_size)
    if name == "kv_layout":
        return [RoundRobin(), *(Interleaved(i) for i in _divisors(r.block_size))]
    if name == "head_dim":
        return [d for d in (shape.head_dim - 1, shape.head_dim + 1, MAX_HEAD_DIM) if 1 <= d <= MAX_HEAD_DIM]
    choices: dict[str, list[Any]] = {"lnc": [*LNC_VALUES], "target": [*TARGETS], "rank_order": [*RANK_ORDERS]}
    return choices.get(name, [1] if name == "max_seq_len" else [])


def _single(request: Request, repairs: list[dict[str, Any]]) -> dict[str, list[int | str]]:
    """Repairs of one parameter each, nearest first, as the nearest values below and above."""
    nearest: dict[str, list[int | str]] = {}
    for name in dict.fromkeys(name for repair in repairs for name in repair):
        values = [repair[name] for repair in repairs if name in repair and repair[name] != _get(request, name)]
        if isinstance(values[0], int):
            asked = _get(request, name)
            below, above = [v for v in values if v < asked], [v for v in values if v > asked]
            nearest[name] = [*([max(below)] if below else []), *([min(above)] if above else [])]
        else:
            nearest[name] = [_shown(value) for value in values[:2]]
    return nearest


def _joint(repairs: list[dict[str, Any]]) -> dict[str, list[int | str]]:
    """The two nearest repairs of several parameters."""
    nearest: dict[str, list[int | str]] = {}
    for repair in repairs:
        values = nearest.setdefault(", ".join(sorted(repair)), [])
        text = f"({', '.join(_shown(repair[name]) for name in sorted(repair))})"
        if text not in values and sum(map(len, nearest.values())) < 2:
            values.append(text)
    return {names: values for names, values in nearest.items() if names and values}


def _distance(request: Request, repair: dict[str, Any]) -> float:
    """How far a repair is from the request: octaves for numbers, one for anything else."""
    total = 0.0
    for name, value in repair.items():
        new, asked = (getattr(v, "interleave", v) for v in (value, _get(request, name)))
        numbers = isinstance(new, int) and isinstance(asked, int)
        total += abs(math.log2(new / max(asked, 0.5))) if numbers else 1.0
    return total


def _get(request: Request, name: str) -> Any:
    value = getattr(request.shape if hasattr(request.shape, name) else request, name)
    return request.tp_size if name == "tp" and value is None else value


def _reported(rule: Rule, request: Request) -> list[str]:
    """Parameters of `rule` worth repeating in the message: all but sharing degrees that are 1."""
    names = [*rule.parameters, *(["q_heads"] if "q_heads" in rule.text else [])]
    names += [name for name in ("tp", "world_size") if name in rule.text and name not in names]
    shown = [n for n in names if n not in ("kvp", "kvdp", "cp") or len(names) == 1 or _get(request, n) != 1]
    return shown or names


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (RoundRobin, Contiguous, Interleaved)) else str(value)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(max(number, 0)) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _multiples_near(number: int, unit: int) -> list[int]:
    """The multiples of `unit` around `number`, the one above and the one below that is at least `unit`."""
    unit = max(unit, 1)
    below = max(number // unit, 1) * unit
    return [below, below + unit]


def _check_types(request: Request) -> None:
    if not isinstance(request.shape, AttentionShape):
        raise ArgumentTypeError("shape", repr(request.shape), "an AttentionShape")
    for name in (*_SIZES, "lnc"):
        value = getattr(request, name)
        if value is None and name in ("tp", "seg_size", "max_seq_len"):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentTypeError(name, repr(value), "an integer")
    if not isinstance(request.kv_layout, (Contiguous, RoundRobin, Interleaved)):
        raise ArgumentTypeError("kv_layout", repr(request.kv_layout), "Contiguous(), RoundRobin() or Interleaved(i)")
    run = getattr(request.kv_layout, "interleave", 1)
    if isinstance(run, bool) or not isinstance(run, int):
        raise ArgumentTypeError("kv_layout", repr(request.kv_layout), "Interleaved(i) with an integer i")
    for name in ("target", "rank_order"):
        if not isinstance(getattr(request, name), str):
            raise ArgumentTypeError(name, repr(getattr(request, name)), "a string")
