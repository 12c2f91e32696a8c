"""The example kernels of NKI's public documentation, unedited, with the checks of their own drivers.

Set NEURON_DOCS to a copy of the documentation repository (aws-neuron-sdk). Drivers that need torch_xla are replaced by
the same inputs and checks on the CPU; a driver without a check gets the result that its kernel is documented to give.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nki_parallel_attn.sim import NkiValidationError, as_nki, simulate
from nki_parallel_attn.sim import language as nl

DOCS = os.environ.get("NEURON_DOCS")
pytestmark = pytest.mark.skipif(
    not DOCS, reason="NEURON_DOCS is not set: it names a copy of the NKI documentation (aws-neuron-sdk)"
)
MX_DTYPES = {
    "float8_e5m2": nl.float8_e5m2_x4,
    "float8_e4m3fn": nl.float8_e4m3fn_x4,
    "float4_e2m1fn": nl.float4_e2m1fn_x4,
}


@pytest.fixture
def module(monkeypatch):
    """A function that imports a file of the documentation as its driver does, the simulator being nki."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # one of the files sets its target there
    known = set(sys.modules)

    def load(path):
        file = Path(DOCS) / path
        monkeypatch.syspath_prepend(file.parent)
        with as_nki():
            return importlib.import_module(file.stem)

    yield load
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(DOCS)):
            del sys.modules[name]


def run_as_main(path, *arguments, monkeypatch):
    """Run a file of the documentation as a script."""
    file = Path(DOCS) / path
    monkeypatch.setattr(sys, "argv", [str(file), *arguments])
    with as_nki():
        return runpy.run_path(str(file), run_name="__main__")


def test_simulate_example(monkeypatch):
    run_as_main("nki/examples/simulate/nki_simulate_example.py", monkeypatch=monkeypatch)


def test_average_pool2d(monkeypatch, module):
    run_as_main("nki/examples/average_pool2d/average_pool2d_nki_kernels.py", monkeypatch=monkeypatch)
    kernel = module("nki/examples/average_pool2d/average_pool2d_nki_kernels.py").tensor_avgpool_kernel
    x = torch.arange(2 * 6 * 6, dtype=torch.bfloat16).reshape(2, 6, 6)
    assert (kernel(x, 2) == torch.nn.functional.avg_pool2d(x, 2, 2)).all()


def test_transpose2d(monkeypatch, module):
    run_as_main("nki/examples/transpose2d/transpose2d_nki_kernels.py", monkeypatch=monkeypatch)
    kernel = module("nki/examples/transpose2d/transpose2d_nki_kernels.py").tensor_transpose2D_kernel_
    p, x, y = 5, 3, 4
    a = torch.arange(p * x * y, dtype=torch.int8).reshape(p, x * y)
    assert torch.equal(kernel(a, (x, y)), a.reshape(p, x, y).transpose(1, 2).reshape(p, x * y))


@pytest.mark.parametrize("target", ["trn1", "trn3"])
def test_tensor_addition(module, target):
    kernel = module("nki/examples/tensor_addition/tensor_addition_nki_kernels.py").nki_tensor_add
    a, b = torch.rand(256, 1024, dtype=torch.bfloat16), torch.rand(256, 1024, dtype=torch.bfloat16)
    assert torch.allclose(simulate(kernel, target=target)(a, b), a + b, atol=1e-4, rtol=1e-2)


def test_basic_matmul(module):
    kernels = module("nki/examples/matrix_multiplication/matrix_multiplication_nki_kernels.py")
    lhs, rhs = torch.rand(64, 128, dtype=torch.bfloat16), torch.rand(128, 512, dtype=torch.bfloat16)
    assert torch.allclose(lhs @ rhs, kernels.nki_matmul_basic_(lhs.T, rhs), atol=1e-4, rtol=1e-2)


@pytest.fixture(scope="module")
def large_product():
    generator = torch.Generator().manual_seed(0)
    lhs = torch.rand((4096, 1024), generator=generator).to(torch.bfloat16)
    rhs = torch.rand((1024, 2048), generator=generator).to(torch.bfloat16)
    return lhs, rhs, (lhs.float() @ rhs.float()).to(torch.bfloat16)


@pytest.mark.parametrize("variant", ["tiled", "hoist_load", "block_free_dimension", "fully_optimized"])
def test_large_matmul(module, large_product, variant):
    kernels = module("nki/examples/matrix_multiplication/matrix_multiplication_nki_kernels.py")
    lhs, rhs, product = large_product
    assert torch.allclose(product, getattr(kernels, f"nki_matmul_{variant}_")(lhs.T, rhs), atol=1e-4, rtol=1e-2)


def mamba_layer(delta, u, A, B, C):
    """The layer that the kernels compute: a scan over the sequence for each channel and state, summed over states."""
    decay = torch.exp(delta[:, :, None, :] * A[None, :, :, None])
    update = delta[:, :, None, :] * B[:, None, :, :] * u[:, :, None, :]
    state, states = torch.zeros_like(decay[..., 0]), []
    for i in range(decay.shape[-1]):
        state = decay[..., i] * state + update[..., i]
        states.append(state)
    return (C[:, None, :, :] * torch.stack(states, -1)).sum(-2)


@pytest.mark.parametrize("version", ["mamba_v1", "mamba_v2", "mamba_v3"])
@pytest.mark.parametrize("ones", [True, False])
def test_mamba_against_torch(module, version, ones):
    batch, length, channels, states = 1, 512, 256, 16
    shapes = ((batch, channels, length),) * 2 + ((channels, states),) + ((batch, states, length),) * 2
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.ones(s) if ones else torch.rand(s, generator=generator) for s in shapes]
    inputs[2] = -inputs[2]  # as in the driver: a growing state would hide errors
    kernel = getattr(module("nki/examples/fused_mamba/mamba_nki_kernels.py"), version)
    assert torch.allclose(mamba_layer(*inputs), kernel(*inputs), atol=1e-2, rtol=1e-2)


def test_mamba_versions_agree(monkeypatch):
    run_as_main("nki/examples/fused_mamba/mamba_nki_kernels.py", monkeypatch=monkeypatch)


MX = "nki/deep-dives/src/mxfp-matmul"
M, N = 128, 512


@pytest.fixture
def mx(module):
    """The kernels and the host-side helpers of the MX guide."""
    pytest.importorskip("ml_dtypes")
    np.random.seed(0)
    return module(f"{MX}/mx_kernels.py"), module(f"{MX}/mx_cpu_utils.py")


def dtype_of(name):
    import ml_dtypes

    return getattr(ml_dtypes, name)


def close_to_golden(result, golden):
    np.testing.assert_allclose(result.float().numpy(), golden, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn", "float4_e2m1fn"])
def test_mx_matmul_of_offline_quantised_operands(mx, name):
    kernels, cpu = mx
    dtype = dtype_of(name)
    _, _, left, left_scale = cpu.generate_stabilized_mx_data(dtype, (128, M * 4))
    _, _, right, right_scale = cpu.generate_stabilized_mx_data(dtype, (128, N * 4))
    arguments = (torch.from_numpy(array) for array in (left, left_scale, right, right_scale))
    result = kernels.kernel_offline_quantized_mx_matmul(*arguments, MX_DTYPES[name])
    close_to_golden(result, cpu.nc_matmul_mx_golden(left, right, left_scale, right_scale, dtype, dtype))


@pytest.mark.parametrize(
    ("left_name", "right_name"), [("float4_e2m1fn", "float8_e5m2"), ("float8_e5m2", "float8_e5m2")]
)
def test_mx_matmul_of_an_operand_quantised_on_device(mx, left_name, right_name):
    kernels, cpu = mx
    left_dtype, right_dtype = dtype_of(left_name), dtype_of(right_name)
    _, _, left, left_scale = cpu.generate_stabilized_mx_data(left_dtype, (128, M * 4))
    data, _, _, _ = cpu.generate_stabilized_mx_data(right_dtype, (128, N * 4))
    result = kernels.kernel_on_device_quantize_matmul_mx(
        torch.from_numpy(left),
        torch.from_numpy(left_scale),
        torch.from_numpy(data).bfloat16(),
        MX_DTYPES[left_name],
        MX_DTYPES[right_name],
    )
    right, right_scale = cpu.quantize_mx_golden(data, right_dtype)
    close_to_golden(result, cpu.nc_matmul_mx_golden(left, right, left_scale, right_scale, left_dtype, right_dtype))


@pytest.mark.parametrize("use_tensor_copy", [True, False])
@pytest.mark.parametrize("packed_scale", [True, False])
def test_mx_matmul_of_operands_rearranged_on_device(mx, use_tensor_copy, packed_scale):
    kernels, cpu = mx
    left, right = (cpu.generate_stabilized_mx_data(dtype_of("float8_e5m2"), (512, width))[0] for width in (M, N))
    kernel = kernels.kernel_copy_strided_quantize_matmul_mx
    if packed_scale:
        kernel = kernels.kernel_copy_strided_quantize_matmul_mx_packed_scale
    arguments = (torch.from_numpy(array).bfloat16() for array in (left, right))
    result = kernel(*arguments, MX_DTYPES["float8_e5m2"], use_tensor_copy)
    close_to_golden(result, left.T @ right)


# Files whose drivers only print, held to what their text says.


def test_getting_started(monkeypatch, module):
    run_as_main("nki/examples/getting_started_baremetal.py", monkeypatch=monkeypatch)
    for name in ("getting_started_baremetal", "getting_started_torch"):
        kernel = module(f"nki/examples/{name}.py").nki_tensor_add_kernel
        ones = torch.ones((4, 3), dtype=torch.float16)
        assert torch.equal(kernel(ones, ones), ones + ones)


def test_exponential_of_a_tile_that_fits(module):
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    result = module("nki/examples/layout-pass.py").tensor_exp_kernel_(x)
    assert torch.equal(result, x.float().exp().to(torch.bfloat16))


def test_a_tile_of_256_partitions_is_refused(module):
    kernel = module("nki/examples/layout-violation.py").tensor_exp_kernel_
    with pytest.raises(NkiValidationError, match="partition-limit"):
        kernel(torch.ones((256, 512), dtype=torch.bfloat16))


def test_even_and_odd_columns(module):
    x = torch.arange(4 * 5, dtype=torch.bfloat16).reshape(4, 5)
    even, odd = module("nki/examples/index-case-1.py").tensor_split_kernel_(x)
    assert torch.equal(even, x[:, ::2])
    assert torch.equal(odd, x[:, 1::2])


def test_maximum_pooling(module):
    x = torch.arange(2 * 6 * 6, dtype=torch.bfloat16).reshape(2, 6, 6)
    result = module("nki/examples/index-case-3.py").tensor_maxpool_kernel_(x, 2)
    assert torch.equal(result, torch.nn.functional.max_pool2d(x, 2, 2))
