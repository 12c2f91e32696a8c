"""Run a corpus kernel and hold the simulator to what its table entry says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nki_parallel_attn.sim import jit, simulate
from nki_parallel_attn.sim.errors import NkiValidationError

from .cases import Case, expected_of

# float32 engines, contractions of at most 512 terms of size about 1.
RTOL, ATOL = 1e-5, 1e-4


def run(
    kernel: Callable[..., Any], arguments: list[tuple[Any, ...]], lnc: int, target: str, seed: int = 0
) -> list[Any]:
    """Results of all ranks, one argument tuple per rank."""
    return simulate(jit(kernel), world_size=len(arguments), lnc=lnc, target=target, seed=seed)(arguments)


def run_case(case: Case) -> list[Any]:
    """Results of all ranks of a case."""
    return run(case.kernel, [case.arguments(rank) for rank in range(case.world_size)], case.lnc, case.target)


def check_broken(case: Case) -> None:
    """The kernel raises its error with its rule, located at its marked line, which the message shows."""
    assert case.error is not None
    with pytest.raises(case.error) as caught:
        run_case(case)
    message, line = str(caught.value), case.breaking_line()
    where = f"{case.kernel.__code__.co_filename}:{line}"
    if case.rule is None:
        assert type(caught.value) is case.error
        assert line is None or f":{line}" in message
    else:
        assert isinstance(caught.value, NkiValidationError)
        assert caught.value.rule == case.rule, message
        assert line is None or caught.value.location == where, message


def check_clean(case: Case) -> None:
    """Nothing is reported and every rank's results are right."""
    for rank, got in enumerate(run_case(case)):
        expected = expected_of(case, rank)
        pairs = zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]
        for result, right in pairs:
            assert result.shape == right.shape
            np.testing.assert_allclose(np.asarray(result, np.float64), right, rtol=RTOL, atol=ATOL)
