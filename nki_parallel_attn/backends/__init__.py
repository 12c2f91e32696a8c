"""How an operation is run: one module per backend, with one function per operation that it can run.

    torch     the twins in kernels/: eager, differentiable, any torch device
    sim       the NKI kernels in kernels/, interpreted
    neuron    the same kernels through the nki package, on device

An operation has checked its arguments before it calls a backend.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Literal, get_args

from torch import Tensor

from nki_parallel_attn.errors import ArgumentError

Backend = Literal["auto", "torch", "sim", "neuron"]
BACKEND_VARIABLE = "NKI_PARALLEL_ATTN_BACKEND"
# What torch calls a Neuron device: torch-neuronx through XLA, and the native device type.
NEURON_DEVICES = ("xla", "neuron", "privateuseone")


def backend_name(backend: str, tensor: Tensor) -> str:
    """Resolve "auto": NKI_PARALLEL_ATTN_BACKEND if set, else "neuron" for tensors on a Neuron device, else "torch".

    Raises:
        ArgumentError: not one of `Backend`, as argument or in the environment.
    """
    if backend == "auto":
        backend = os.environ.get(BACKEND_VARIABLE, "")
        if not backend:
            return "neuron" if tensor.device.type in NEURON_DEVICES else "torch"
        if backend not in get_args(Backend)[1:]:
            raise ArgumentError(BACKEND_VARIABLE, repr(backend), "torch, sim or neuron")
    if backend not in get_args(Backend):
        raise ArgumentError("backend", repr(backend), "auto, torch, sim or neuron")
    return backend


def load_backend(name: str) -> ModuleType:
    """The module of a resolved backend name.

    Raises:
        BackendUnavailableError: it needs a package that is missing.
    """
    return import_module(f"nki_parallel_attn.backends.{name}")
