"""Tests judge results, never the speed of the machine."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from nki_parallel_attn.testing import run
from tests.patience import SOON

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def survivors_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a death the runner lets the other ranks say what they saw, however slow they are."""
    monkeypatch.setattr(run, "GRACE_AFTER_DEATH", SOON)
