"""The corpus of one core: broken kernels report their rule at their line, clean ones run and are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .corpus.broken import BROKEN
from .corpus.clean import CLEAN
from .corpus.run import check_broken, check_clean

RULES_PAGE = Path(__file__).parents[2] / "docs" / "simulator_rules.md"


def test_the_corpus_is_as_large_as_it_claims_and_names_are_unique():
    assert len(BROKEN) >= 70 and len({case.rule for case in BROKEN}) >= 60
    assert len(CLEAN) >= 30
    for table in (BROKEN, CLEAN):
        assert len({case.name for case in table}) == len(table)


def test_every_rule_of_the_corpus_is_documented():
    documented = set(re.findall(r"^\| `([a-z0-9-]+)` \|", RULES_PAGE.read_text(), re.MULTILINE))
    assert {case.rule for case in BROKEN} <= documented


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_broken_kernels_report_rule_and_line(case):
    check_broken(case)


@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.name)
def test_clean_kernels_run_and_are_right(case):
    check_clean(case)
