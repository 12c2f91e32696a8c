"""Cases that cover every pair of values of every two switches, the arrangement of ranks among them, greedily."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch

from tests.tkg.case import Case

ARRANGEMENTS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (1, 3))  # kvdp, cp
SWITCHES: dict[str, tuple[object, ...]] = {
    "batch": (4, 8),
    "tokens": (1, 3, 4),
    "q_heads": (1, 2, 4),
    "kv_heads": (1, 2),
    "head_dim": (16, 6),
    "hidden": (128, 512),
    "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cache": ("flat", "flat_t", "block3", "block4", "packed3", "packed4"),
    "fp8": ("", "fp8", "opaque"),
    "dtype_mode": ("NON_OCP", "OCP", "AUTO"),
    "layout": ("round_robin", "contiguous", "interleaved 1", "interleaved 2"),
    "mask": ("pos_ids", "full", "swapped"),
    "window": (0, 7),
    "tree": (False, True),
    "sink": (False, True),
    "padding": ("", "row", "tail"),
    "rmsnorm_x": ("", "plain", "gamma"),
    "x_padding": (0, 20),
    "transposed_in": (False, True),
    "by_4": (False, True),
    "bias": (False, True),
    "pre": ("", "plain", "gamma"),
    "post": ("", "plain", "gamma"),
    "rope": ("", "contiguous", "interleaved", "contiguous partial", "interleaved partial"),
    "out": ("", "plain", "bias", "transposed"),
    "qkv_type": ("NONE", "STATIC", "ROW", "MX", "STATIC_MX", "ROW_MX"),
    "out_type": ("NONE", "STATIC", "ROW", "MX", "STATIC_MX", "ROW_MX"),
    "in_sb": (False, True),
    "lnc": (1, 2),
    "update": (True, False),
    "skip_some": (False, True),
    "skip_attention": (False, True),
    "scale": (False, True),
    "max_context_len": (False, True),
    "kvdp_mode": (None, "ALL_TO_ALL", "ALL_GATHER_SLICE"),
    "cp_mode": (None, "ALL_TO_ALL", "REDUCE_SCATTER"),
}


def valid(case: Case) -> bool:
    """Combinations that exist."""
    several_owners = case.layout in ("interleaved 1", "interleaved 2") and case.tokens > 1
    return not (
        (case.cache.endswith("3") and case.kv_heads > 1)
        or (case.cache.startswith("packed") and not case.fp8)
        or ("MX" in (case.qkv_type, case.out_type) and case.dtype.itemsize != 2)
        or ("MX" in case.qkv_type and not case.by_4)
        or ("MX" in case.out_type and case.q_heads * case.head_dim % 32)
        or (not case.fp8 and "STATIC" not in (case.qkv_type, case.out_type) and case.dtype_mode != "NON_OCP")
        or (not case.out and case.out_type != "NONE")
        or (not case.block and case.cp > 1 and (several_owners or case.tokens > 4))
        or (case.max_context_len and not (case.block and case.mask == "pos_ids"))
        or (case.padding == "tail" and case.tokens == 1)
        or (case.by_4 and case.hidden % 512)
        or (case.transposed_in and (case.hidden % (128 * case.lnc) or case.batch * case.tokens > 128))
        or (case.q_heads * case.ranks % case.kv_heads)
        or (case.skip_attention and (case.mask != "pos_ids" or case.window or case.tree or case.sink))
        or (case.skip_some and not case.update)
        or (case.kvdp == 1 and case.kvdp_mode)
        or (case.cp == 1 and (case.cp_mode or case.layout != "round_robin"))
    )


def pairwise_cases(at_least: int, seed: int = 0) -> list[Case]:
    """Every pair of values that some case of a large random pool has is in one of these, topped up to `at_least`."""
    rng = random.Random(seed)
    pool = []
    while len(pool) < 1200:
        case = _random_case(rng, len(pool))
        if valid(case):
            pool.append(case)
    # A set of pairs is the bits of one integer: a hundred times faster to compare than sets.
    bit: dict[object, int] = {}
    scored = [(case, sum(1 << bit.setdefault(pair, len(bit)) for pair in _pairs(case))) for case in pool]
    uncovered = (1 << len(bit)) - 1
    chosen = []
    while uncovered:
        best, pairs = max(scored, key=lambda entry: (entry[1] & uncovered).bit_count())
        uncovered &= ~pairs
        chosen.append(best)
    return chosen + rng.sample(pool, max(0, at_least - len(chosen)))


def _random_case(rng: random.Random, seed: int) -> Case:
    values = {name: rng.choice(options) for name, options in SWITCHES.items()}
    kvdp, cp = rng.choice(ARRANGEMENTS)
    # Values that exclude many others would starve those if they were drawn evenly.
    values["skip_attention"] = rng.random() < 0.1
    if rng.random() < 0.5:
        values["fp8"], values["dtype_mode"] = "", "NON_OCP"
    if not values["out"]:
        values["out_type"] = "NONE"
    if "MX" in str(values["qkv_type"]):
        values["hidden"], values["by_4"] = 512, True
    if cp == 1:
        values["layout"], values["cp_mode"] = "round_robin", None
    if kvdp == 1:
        values["kvdp_mode"] = None
    return Case(kvdp=kvdp, cp=cp, seed=seed, **values)  # type: ignore[arg-type]


def _pairs(case: Case) -> Iterator[tuple[object, ...]]:
    switches = [("ranks", (case.kvdp, case.cp)), *((name, getattr(case, name)) for name in SWITCHES)]
    return itertools.combinations(switches, 2)
