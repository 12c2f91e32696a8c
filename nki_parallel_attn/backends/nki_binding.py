"""Kernels are built with one NKI, the simulator's or the installed package's, when their module is first imported.

A backend makes sure that it got the one it stands for: a simulated result must not pass for a device's.
"""

from __future__ import annotations

import os
from typing import Any

from nki_parallel_attn.errors import ArgumentError, BackendUnavailableError

VARIABLE = "NKI_PARALLEL_ATTN_BACKEND"
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"


def simulated(kernel: Any) -> Any:
    """The kernel, if it was built with the simulator.

    Raises:
        BackendUnavailableError: it was built with the installed nki package.
    """
    if not _is_simulators(kernel):
        raise BackendUnavailableError(
            "the kernels of this process are built with the installed nki package; for backend='sim' set "
            f"{VARIABLE}=sim in the environment before the first of them is imported"
        )
    return kernel


def compiled(kernel: Any, lnc: int) -> Any:
    """The kernel for `lnc` cores, if it was built with the nki package and the machine's ranks have as many.

    Raises:
        BackendUnavailableError: it was built with the simulator.
        ArgumentError: another LNC than the runtime's, which would be an error of the runtime.

    Source: nki/api/nki/__init__.py (jit).
    """
    if _is_simulators(kernel):
        raise BackendUnavailableError(
            "the kernels of this process are built with the simulator; for backend='neuron' start with "
            f"{VARIABLE} unset or neuron"
        )
    if lnc != machine_lnc():
        raise ArgumentError("lnc", lnc, f"{machine_lnc()}, the cores of a rank on this machine ({LNC_VARIABLE})")
    return kernel[lnc]


def machine_lnc() -> int:
    """Cores of a rank on device: NEURON_LOGICAL_NC_CONFIG, by default 2.

    Raises:
        ArgumentError: it is set to something else than 1 or 2.

    Source: about-neuron/arch/neuron-features/logical-neuroncore-config.rst.
    """
    text = os.environ.get(LNC_VARIABLE, "2")
    if text not in ("1", "2"):
        raise ArgumentError(LNC_VARIABLE, repr(text), "1 or 2")
    return int(text)


def _is_simulators(kernel: Any) -> bool:
    from nki_parallel_attn.sim.kernel import Kernel

    return isinstance(kernel, Kernel)
