"""The corpus of several cores and ranks: LNC and collective rules, divergence, races on every schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_parallel_attn.sim.errors import RaceError

from .corpus import broken_cores, clean_cores
from .corpus.cases import f32
from .corpus.racy import PAIRS, SHAPE, Pair
from .corpus.run import check_broken, check_clean, run

SEEDS = 200


def inputs(pair: Pair) -> list[tuple[Any, ...]]:
    return [(f32(*SHAPE)(rank),) for rank in range(pair.world_size)]


@pytest.mark.parametrize("case", broken_cores.CASES, ids=lambda case: case.name)
def test_broken_kernels_report_rule_and_line(case):
    check_broken(case)


@pytest.mark.parametrize("case", clean_cores.CASES, ids=lambda case: case.name)
def test_clean_kernels_run_and_are_right(case):
    check_clean(case)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_races_are_found_whatever_the_schedule(pair):
    for seed in range(SEEDS):
        with pytest.raises(RaceError) as caught:
            run(pair.racy, inputs(pair), 2, "trn2", seed)
        assert caught.value.rule == "race"
        assert str(caught.value).count(".py:") == 2, "a race names both lines"


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_synchronised_twins_are_never_reported(pair):
    first: list[np.ndarray] = []
    for seed in range(SEEDS):
        results = [np.asarray(result) for result in run(pair.synchronised, inputs(pair), 2, "trn2", seed)]
        first = first or results
        for result, same in zip(results, first, strict=True):
            np.testing.assert_array_equal(result, same)
