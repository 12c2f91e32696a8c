"""What the kernel may ask about its target."""

from __future__ import annotations

from ..core import running_core
from ..enums import nc_version
from ..targets import get_target


def get_nc_version() -> nc_version:
    """NeuronCore generation of the kernel's target; outside a kernel, of the default target."""
    core = running_core()
    return (core.target if core else get_target()).version


def get_nc_sub_version() -> int:
    """Silicon revision within the generation; the simulator models the first, 0."""
    return 0
