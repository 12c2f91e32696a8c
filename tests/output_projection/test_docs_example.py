"""The example in docs/quantization.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"


def test_the_example_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(example, PAGE.name, "exec"), {})
