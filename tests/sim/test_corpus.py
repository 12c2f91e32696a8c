"""The corpus: broken kernels report their rule at their line, clean ones are right, races are found on every seed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nki_parallel_attn.sim.language", exc_type=ImportError)

from nki_parallel_attn.sim import jit, simulate
from nki_parallel_attn.sim.errors import NkiValidationError, RaceError

from .corpus.broken import BROKEN
from .corpus.cases import Case, expected_of, f32
from .corpus.clean import CLEAN
from .corpus.racy import PAIRS, SHAPE, Pair

# float32 engines, contractions of at most 512 terms of size about 1, outputs of at most bfloat16 precision where cast.
RTOL, ATOL = 1e-5, 1e-4
SEEDS = 200
RULES_PAGE = Path(__file__).parents[2] / "docs" / "simulator_rules.md"


def run(
    kernel: Callable[..., Any],
    arguments: list[tuple[Any, ...]],
    lnc: int,
    target: str,
    seed: int = 0,
) -> list[Any]:
    """Results of all ranks, one argument tuple per rank."""
    return simulate(jit(kernel), world_size=len(arguments), lnc=lnc, target=target, seed=seed)(arguments)


def names(cases: list[Case] | list[Pair]) -> list[str]:
    return [case.name for case in cases]


def test_the_corpus_is_as_large_as_it_claims_and_names_are_unique():
    assert len(BROKEN) >= 70 and len({case.rule for case in BROKEN}) >= 60
    assert len(CLEAN) >= 30 and len(PAIRS) >= 12
    for table in (BROKEN, CLEAN, PAIRS):
        assert len(set(names(table))) == len(table)


def test_every_rule_of_the_corpus_is_documented():
    documented = set(re.findall(r"^\| `([a-z0-9-]+)` \|", RULES_PAGE.read_text(), re.MULTILINE))
    assert {case.rule for case in BROKEN} - {None} <= documented


@pytest.mark.parametrize("case", BROKEN, ids=names(BROKEN))
def test_broken_kernels_report_rule_and_line(case):
    arguments = [case.arguments(rank) for rank in range(case.world_size)]
    with pytest.raises(case.error) as caught:
        run(case.kernel, arguments, case.lnc, case.target)
    line = case.breaking_line()
    if case.rule is None:
        assert type(caught.value) is case.error
    else:
        assert isinstance(caught.value, NkiValidationError)
        assert caught.value.rule == case.rule, str(caught.value)
        if line is not None:
            assert caught.value.location == f"{case.kernel.__code__.co_filename}:{line}", str(caught.value)
    if line is not None:
        assert f":{line}" in str(caught.value)


@pytest.mark.parametrize("case", CLEAN, ids=names(CLEAN))
def test_clean_kernels_run_and_are_right(case):
    arguments = [case.arguments(rank) for rank in range(case.world_size)]
    results = run(case.kernel, arguments, case.lnc, case.target)
    for rank in range(case.world_size):
        expected = expected_of(case, rank)
        got = results[rank]
        pairs = zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]
        for result, right in pairs:
            assert result.shape == right.shape
            np.testing.assert_allclose(np.asarray(result, np.float64), right, rtol=RTOL, atol=ATOL)


def race_inputs(pair: Pair) -> list[tuple[Any, ...]]:
    return [(f32(*SHAPE)(rank),) for rank in range(pair.world_size)]


@pytest.mark.parametrize("pair", PAIRS, ids=names(PAIRS))
def test_races_are_found_whatever_the_schedule(pair):
    for seed in range(SEEDS):
        with pytest.raises(RaceError) as caught:
            run(pair.racy, race_inputs(pair), 2, "trn2", seed)
        assert caught.value.rule == "race"
        assert str(caught.value).count("racy.py:") >= 2, "a race names both lines"


@pytest.mark.parametrize("pair", PAIRS, ids=names(PAIRS))
def test_synchronised_twins_are_never_reported(pair):
    first = None
    for seed in range(SEEDS):
        results = [np.asarray(r) for r in run(pair.synchronised, race_inputs(pair), 2, "trn2", seed)]
        first = first or results
        for result, same in zip(results, first, strict=True):
            np.testing.assert_array_equal(result, same)
