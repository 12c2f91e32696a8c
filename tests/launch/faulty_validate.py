"""validate.py with faults on rank 1: `faulty_validate.py SCENARIO=FAULT,... [options]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from faults import install

import validate
import validate_here
import validate_world
from rank_process import run_as_rank

faults = dict(pair.split("=") for pair in sys.argv.pop(1).split(","))
run_case = validate_here.run_case


def run_faulty_case(*arguments: Any) -> Any:
    """On a rank that validate.py started."""
    install(faults)
    return run_case(*arguments)


if __name__ == "__main__":
    if "RANK" in os.environ:
        install(faults)
    validate_world.GRACE = 2.0  # nobody needs longer here
    validate_here.run_case = run_faulty_case
    run_as_rank(validate.main, "validate", process_group=False)
