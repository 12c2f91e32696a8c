"""The Neuron device of a rank, as the two PyTorch integrations spell it. Never run so far.

Sources: frameworks/torch/pytorch-native-overview.rst (the device "neuron"), its process group of the same name under
torchrun in tools/neuron-explorer/how-to-profile-workload.rst; nki/guides/framework_custom_op.rst (torch_xla.device()).
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

from nki_parallel_attn.errors import BackendUnavailableError


def neuron_device() -> tuple[torch.device, str]:
    """The device, and the backend for torch.distributed.init_process_group.

    Raises:
        BackendUnavailableError: neither torch-neuronx's native device nor torch-xla is installed.
    """
    if find_spec("torch_neuronx") is not None:
        import_module("torch_neuronx")
    if hasattr(torch, "neuron"):
        return torch.device("neuron"), "neuron"
    if find_spec("torch_xla") is None:
        raise BackendUnavailableError(
            "neither torch-neuronx with the device 'neuron' nor torch-xla is installed; "
            "use the PyTorch environment of the Neuron SDK"
        )
    # Registers the process group backend "xla".
    import_module("torch_xla.distributed.xla_backend")
    device: torch.device = import_module("torch_xla").device()
    return device, "xla"
