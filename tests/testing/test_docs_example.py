"""The example in docs/testing.md runs as it stands there."""

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def test_the_example_passes(pytester: pytest.Pytester) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    pytester.makepyfile(example)
    pytester.runpytest_inprocess("--strict-markers", "-p", "no:cacheprovider").assert_outcomes(passed=2)
