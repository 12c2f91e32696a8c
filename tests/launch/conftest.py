"""Helpers of tests/integrations can be imported here too, and the modules of launch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
