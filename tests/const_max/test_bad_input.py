"""Each bad argument is one error that names it, whatever the backend."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn import attention_const_max
from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError
from nki_parallel_attn.nki import require_nki
from tests.const_max.case import SEQ, Case, as_tensor

CASE = Case(2, 20, 30)


def repeated(dtype=torch.float32, entry=None):
    top = as_tensor(4.0).to(dtype)
    if entry is not None:
        top[3] = entry
    return top


# what to change, the argument that the error must name, and part of the message
BAD = {
    "q not a tensor": ({"q_hbm": [1.0]}, "q_hbm", "list"),
    "q dtype": ({"q_hbm": torch.zeros(2, 128, 20, dtype=torch.int32)}, "q_hbm", "int32"),
    "q dims": ({"q_hbm": torch.zeros(128, 20).bfloat16()}, "q_hbm", r"\[128, 20\]"),
    "q in the other layout": ({"q_layout": SEQ}, "q_hbm", "d=128"),
    "q empty": ({"q_hbm": torch.zeros(2, 128, 0).bfloat16()}, "q_hbm", "size 0"),
    "head dim": ({"q_hbm": torch.zeros(2, 64, 20).bfloat16()}, "q_hbm", "d=128"),
    "k dtype": ({"k_hbm": torch.zeros(2, 128, 30)}, "k_hbm", "float32"),
    "k heads": ({"k_hbm": torch.zeros(1, 128, 30).bfloat16()}, "k_hbm", "N=2"),
    "k in the other layout": ({"k_layout": SEQ}, "k_hbm", "d=128"),
    "k device": ({"k_hbm": torch.zeros(2, 128, 30, device="meta").bfloat16()}, "k_hbm", "meta"),
    "v length": ({"v_hbm": torch.zeros(2, 31, 128).bfloat16()}, "v_hbm", "Sk=30"),
    "v transposed": ({"v_hbm": torch.zeros(2, 128, 30).bfloat16()}, "v_hbm", "Sk=30"),
    "v heads": ({"v_hbm": torch.zeros(3, 30, 128).bfloat16()}, "v_hbm", "N=2"),
    "maximum missing": ({"softmax_max": None}, "softmax_max", "number"),
    "maximum a bool": ({"softmax_max": True}, "softmax_max", "number"),
    "maximum infinite": ({"softmax_max": float("inf")}, "softmax_max", "finite"),
    "maximum shape": ({"softmax_max": torch.zeros(1)}, "softmax_max", "128, 1"),
    "maximum dtype": ({"softmax_max": repeated(torch.bfloat16)}, "softmax_max", "float32"),
    "maximum not repeated": ({"softmax_max": repeated(entry=5.0)}, "softmax_max", "5.0 at 3"),
    "maximum not a number": ({"softmax_max": torch.full((128, 1), torch.nan)}, "softmax_max", "nan"),
    "scale": ({"softmax_scale": "1"}, "softmax_scale", "number"),
    "scale infinite": ({"softmax_scale": float("nan")}, "softmax_scale", "finite"),
    "q layout": ({"q_layout": "head_major"}, "q_layout", "AttentionLayout"),
    "k layout": ({"k_layout": 1}, "k_layout", "AttentionLayout"),
    "raw": ({"raw": 1}, "raw", "True or False"),
    "lnc": ({"lnc": 4}, "lnc", "1 or 2"),
    "target": ({"target": "trn1"}, "target", "trn2"),
    "backend": ({"backend": "cuda"}, "backend", "auto, torch, sim or neuron"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("backend", ["torch", "sim"])
def test_bad_argument(name, backend):
    change, argument, text = BAD[name]
    with pytest.raises(ArgumentError, match=text) as caught:
        attention_const_max(**{**CASE.arguments(), "softmax_max": 4.0, "backend": backend, **change})
    assert caught.value.argument == argument


def test_the_kernel_takes_bfloat16_only():
    arguments = Case(1, 4, 4, torch.float32).arguments()
    with pytest.raises(ArgumentTypeError, match=r"q_hbm: got torch\.float32, expected bfloat16 with backend='sim'"):
        attention_const_max(softmax_max=4.0, backend="sim", **arguments)


def test_the_kernel_has_no_gradient():
    arguments = CASE.arguments()
    arguments["v_hbm"].requires_grad_()
    with pytest.raises(ArgumentError, match="no gradient"):
        attention_const_max(softmax_max=4.0, backend="sim", **arguments)
    with torch.no_grad():
        attention_const_max(softmax_max=4.0, backend="sim", **arguments)


def test_neuron_without_the_package_says_what_to_install():
    try:
        require_nki()
    except BackendUnavailableError:
        with pytest.raises(BackendUnavailableError, match="install"):
            attention_const_max(softmax_max=4.0, backend="neuron", **CASE.arguments())
    else:
        pytest.skip("the nki package is installed")
