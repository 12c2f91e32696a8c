"""Each restriction is one error that names its argument, whatever the backend."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn import DtypeMode, QuantizationType, output_projection_cte
from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError
from nki_parallel_attn.nki import require_nki

from .case import E2M1, E4M3FN, MX, ROW, STATIC, BNdS, BNSd, BSNd, Case

CASES = {
    "none": Case(dtype=torch.bfloat16),
    "static": Case(kind=STATIC, dtype=torch.bfloat16),
    "row": Case(kind=ROW, dtype=torch.bfloat16),
    "mx": Case(1, 2, 64, 5, 128, torch.bfloat16, kind=MX, target="trn3"),
    "compact": Case(1, 2, 64, 5, 128, torch.bfloat16, kind=MX, target="trn3", compact=True),
}


def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def repeated(value, entry=None, rows=128, columns=1):
    scales = torch.full((rows, columns), value)
    if entry is not None:
        scales[3] = entry
    return scales


def trained(*shape):
    return torch.ones(*shape).requires_grad_()


def fp8(*shape, byte=0):
    return torch.full(shape, byte, dtype=torch.uint8).view(E4M3FN)


# the case, what to change, the argument that the error must name, and part of the message
BAD = {
    "attention not a tensor": ("none", {"attention": 1}, "attention", "int"),
    "attention dtype": ("none", {"attention": fp8(2, 3, 16, 7)}, "attention", "float8"),
    "attention dims": ("none", {"attention": bf16(2, 48, 7)}, "attention", r"\[B, N, D, S\]"),
    "attention empty": ("none", {"attention": bf16(2, 3, 16, 0)}, "attention", "size 0"),
    "head dim": ("none", {"attention": bf16(1, 1, 129, 4), "weight": bf16(129, 20)}, "attention", "at most 128"),
    "head dim, BSNd": ("none", {"attention_layout": BSNd, "attention": bf16(1, 4, 1, 129)}, "attention", "at most 128"),
    "weight not a tensor": ("none", {"weight": None}, "weight", "NoneType"),
    "weight dtype": ("none", {"weight": torch.zeros(48, 20)}, "weight", "float32"),
    "weight dims": ("none", {"weight": bf16(1, 48, 20)}, "weight", r"\[N\*D=48, H\]"),
    "contraction": ("none", {"weight": bf16(47, 20)}, "weight", r"\[N\*D=48, H\]"),
    "contraction in another layout": ("none", {"attention_layout": BSNd}, "weight", r"\[N\*D=112, H\]"),
    "hidden": ("none", {"weight": bf16(48, 32769), "bias": None}, "weight", "at most 32768"),
    "hidden over the cores": ("none", {"weight": bf16(48, 21), "bias": None, "lnc": 2}, "weight", "multiple of lnc=2"),
    "weight device": ("none", {"weight": bf16(48, 20).to("meta")}, "weight", "meta"),
    "bias shape": ("none", {"bias": bf16(20)}, "bias", r"\[1, H=20\]"),
    "bias dtype": ("none", {"bias": torch.zeros(1, 20)}, "bias", "float32"),
    "quantisation": ("none", {"quantization_type": "none"}, "quantization_type", "QuantizationType"),
    "quantisation of the other projection": (
        "none", {"quantization_type": QuantizationType.ROW_MX}, "quantization_type", "NONE, STATIC, ROW or MX",
    ),
    "MX on trn2": ("mx", {"target": "trn2"}, "quantization_type", "trn3"),
    "mode": ("static", {"dtype_mode": "ocp"}, "dtype_mode", "DtypeMode"),
    "OCP on trn2": ("static", {"dtype_mode": DtypeMode.OCP}, "dtype_mode", "trn3"),
    "layout": ("none", {"attention_layout": "BNdS"}, "attention_layout", "OProjAttentionLayout"),
    "ROW in BNdS": ("row", {"attention_layout": BNdS}, "attention_layout", "BSNd with quantization_type=ROW"),
    "ROW in BNSd": ("row", {"attention_layout": BNSd}, "attention_layout", "BSNd with quantization_type=ROW"),
    "STATIC in BSNd": ("static", {"attention_layout": BSNd}, "attention_layout", "BNdS with quantization_type=STATIC"),
    "STATIC in BNSd": ("static", {"attention_layout": BNSd}, "attention_layout", "BNdS with quantization_type=STATIC"),
    "MX in BSNd": ("mx", {"attention_layout": BSNd}, "attention_layout", "BNdS with quantization_type=MX"),
    "MX in BNSd": ("mx", {"attention_layout": BNSd}, "attention_layout", "BNdS with quantization_type=MX"),
    "STATIC weight": ("static", {"weight": bf16(48, 20)}, "weight", "float8_e4m3fn"),
    "ROW weight beyond 240": ("row", {"weight": fp8(48, 20, byte=0x78)}, "weight", "beyond 240"),
    "STATIC weight beyond 240": ("static", {"weight": fp8(48, 20, byte=0xFE)}, "weight", "beyond 240"),
    "input scale without STATIC": ("none", {"input_scales": repeated(1.0)}, "input_scales", "quantization_type=NONE"),
    "input scale with ROW": ("row", {"input_scales": repeated(1.0)}, "input_scales", "quantization_type=ROW"),
    "input scale with MX": ("mx", {"input_scales": repeated(1.0)}, "input_scales", "quantization_type=MX"),
    "input scale missing": ("static", {"input_scales": None}, "input_scales", "NoneType"),
    "input scale shape": ("static", {"input_scales": repeated(1.0, rows=1)}, "input_scales", "128, 1"),
    "input scale dtype": ("static", {"input_scales": repeated(1.0).double()}, "input_scales", "float32"),
    "input scale not repeated": ("static", {"input_scales": repeated(1.0, 2.0)}, "input_scales", "2.0 at 3"),
    "input scale zero": ("static", {"input_scales": repeated(0.0)}, "input_scales", "positive"),
    "input scale NaN": ("static", {"input_scales": repeated(torch.nan)}, "input_scales", "got nan, .* finite"),
    "input scale without a reciprocal": ("static", {"input_scales": repeated(1e-39)}, "input_scales", r"2\^-126"),
    "input scale device": ("static", {"input_scales": repeated(1.0).to("meta")}, "input_scales", "meta"),
    "input scale gradient": ("static", {"input_scales": trained(128, 1)}, "input_scales", "no gradient"),
    "input scale infinite": ("static", {"input_scales": repeated(torch.inf)}, "input_scales", "finite"),
    "weight scale without quantisation": ("none", {"weight_scales": repeated(1.0)}, "weight_scales", "NONE"),
    "weight scale missing": ("row", {"weight_scales": None}, "weight_scales", "NoneType"),
    "STATIC weight scale of ROW": ("static", {"weight_scales": repeated(1.0, columns=20)}, "weight_scales", "128, 1"),
    "STATIC weight scale not repeated": ("static", {"weight_scales": repeated(1.0, 2.0)}, "weight_scales", "2.0 at 3"),
    "STATIC scales, product tiny": ("static", {"weight_scales": repeated(1e-37)}, "weight_scales", "normal float32"),
    "STATIC scales, product huge": (
        "static", {"weight_scales": repeated(-1e38), "input_scales": repeated(9.0)}, "weight_scales", "normal float32",
    ),
    "ROW weight scale of STATIC": ("row", {"weight_scales": repeated(1.0)}, "weight_scales", r"\[128, H=20\]"),
    "ROW weight scale width": ("row", {"weight_scales": repeated(1.0, rows=1)}, "weight_scales", r"\[1, H=20\]"),
    "ROW scale rows": ("row", {"weight_scales": repeated(1.0, 2.0, 128, 20)}, "weight_scales", "rows that differ"),
    "ROW weight scale NaN": ("row", {"weight_scales": repeated(torch.nan, None, 1, 20)}, "weight_scales", "finite"),
    "ROW weight scale device": ("row", {"weight_scales": torch.ones(1, 20).to("meta")}, "weight_scales", "meta"),
    "STATIC weight scale gradient": ("static", {"weight_scales": trained(128, 1)}, "weight_scales", "gradient"),
    "ROW weight scale gradient": ("row", {"weight_scales": trained(1, 20)}, "weight_scales", "gradient"),
    "STATIC weight gradient": ("static", {"weight": torch.nn.Parameter(fp8(48, 20))}, "weight", "gradient"),
    "ROW weight gradient": ("row", {"weight": torch.nn.Parameter(fp8(48, 20))}, "weight", "gradient"),
    "MX weight gradient": ("mx", {"weight": torch.nn.Parameter(fp8(32, 128, 4))}, "weight", "gradient"),
    "quantised attention gradient": ("mx", {"attention": bf16(1, 2, 64, 5).requires_grad_()}, "attention", "gradient"),
    "quantised bias gradient": ("row", {"bias": bf16(1, 20).requires_grad_()}, "bias", "gradient"),
    "MX attention dtype": ("mx", {"attention": torch.zeros(1, 2, 64, 5)}, "attention", "float32"),
    "MX contraction": ("mx", {"attention": bf16(1, 2, 63, 5)}, "attention", "multiple of 32"),
    "MX weight unpacked": ("mx", {"weight": fp8(128, 128)}, "weight", r"\[N\*D/4=32, H, 4\]"),
    "MX weight dtype": ("mx", {"weight": bf16(32, 128, 4)}, "weight", "float8_e4m3fn"),
    "MX float4 weight unpacked": ("mx", {"weight": torch.zeros(32, 128, 4, dtype=E2M1)}, "weight", r"H, 2\]"),
    "MX scales dtype": ("mx", {"weight_scales": torch.zeros(4, 128)}, "weight_scales", "uint8"),
    "MX scales shape": ("mx", {"weight_scales": torch.zeros(1, 1, dtype=torch.uint8)}, "weight_scales", r"N\*D/32=4"),
    "compact scales shape": (
        "compact", {"weight_scales": torch.zeros(4, 128, dtype=torch.uint8)}, "weight_scales", r"N\*D/128=1, H/128=1",
    ),
    "compact scales of ragged sizes": (
        "compact", {"weight": fp8(32, 127, 4), "bias": None}, "compact_weight_scales", "multiples of 128",
    ),
    "compact without MX": ("row", {"compact_weight_scales": True}, "compact_weight_scales", "ROW"),
    "compact": ("mx", {"compact_weight_scales": 1}, "compact_weight_scales", "True or False"),
    "output dtype": ("none", {"output_dtype": torch.int32}, "output_dtype", "int32"),
    "output dtype not a dtype": ("none", {"output_dtype": "bfloat16"}, "output_dtype", "torch dtype"),
    "out with STATIC": ("static", {"out": bf16(2, 7, 20)}, "out", "None with quantization_type=STATIC"),
    "out with ROW": ("row", {"out": bf16(2, 7, 20)}, "out", "None with quantization_type=ROW"),
    "out with MX": ("mx", {"out": bf16(1, 5, 128)}, "out", "None with quantization_type=MX"),
    "out shape": ("none", {"out": bf16(7, 20)}, "out", "S_total"),
    "out batch": ("none", {"out": bf16(1, 7, 20)}, "out", "B=2"),
    "out dtype": ("none", {"out": torch.zeros(2, 7, 20)}, "out", "float32"),
    "out of output_dtype": ("none", {"out": bf16(2, 7, 20), "output_dtype": torch.float16}, "out", "bfloat16"),
    "out device": ("none", {"out": bf16(2, 7, 20).to("meta")}, "out", "meta"),
    "out expanded": ("none", {"out": bf16(1, 7, 20).expand(2, 7, 20)}, "out", "every element"),
    "out of sequences that overlap": (
        "none", {"out": bf16(400).as_strided((2, 7, 20), (100, 20, 1))}, "out", "every element",
    ),
    "out too short": ("none", {"out": bf16(2, 6, 20)}, "out_s_offset", "6 - 7"),
    "offset beyond": ("none", {"out": bf16(2, 9, 20), "out_s_offset": 3}, "out_s_offset", "9 - 7"),
    "offset negative": ("none", {"out": bf16(2, 9, 20), "out_s_offset": -1}, "out_s_offset", "at least 0"),
    "offset not an integer": ("none", {"out": bf16(2, 9, 20), "out_s_offset": 1.0}, "out_s_offset", "integer"),
    "offset without out": ("none", {"out_s_offset": 1}, "out_s_offset", "0 without out"),
    "lnc": ("none", {"lnc": 4}, "lnc", "1 or 2"),
    "target": ("none", {"target": "trn1"}, "target", "trn2"),
    "backend": ("none", {"backend": "cuda"}, "backend", "auto, torch, sim or neuron"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("backend", ["torch", "sim"])
def test_bad_argument(name, backend):
    case, change, argument, text = BAD[name]
    with pytest.raises(ArgumentError, match=text) as caught:
        output_projection_cte(**{**CASES[case].arguments(), "backend": backend, **change})
    assert caught.value.argument == argument


def test_a_leaf_that_requires_grad_cannot_be_out():
    out = bf16(2, 7, 20).requires_grad_()
    with pytest.raises(ArgumentError, match="leaf"):
        output_projection_cte(**CASES["none"].arguments(), out=out)
    with torch.no_grad():
        output_projection_cte(**CASES["none"].arguments(), out=out)


@pytest.mark.parametrize("backend", ["torch", "sim"])
@pytest.mark.parametrize("operand", ["attention", "weight", "bias"])
def test_out_in_the_memory_of_an_operand(operand, backend):
    memory = torch.randn(32, 32)
    arguments = {"attention": torch.randn(1, 32, 2, 16), "weight": torch.randn(32, 32), "bias": torch.randn(1, 32)}
    part = {"attention": memory.view(1, 32, 2, 16), "weight": memory, "bias": memory[10:11]}[operand]
    with pytest.raises(ArgumentError, match=f"shares memory with {operand}"):
        output_projection_cte(**{**arguments, operand: part}, attention_layout=BSNd, out=memory[None], backend=backend)


def test_out_between_the_rows_of_an_operand():
    """Their memory is one, but they have no element in common."""
    memory = torch.zeros(2, 7, 2, 48)
    attention = memory[:, :, 0].view(2, 7, 3, 16)
    attention.copy_(torch.randn(2, 7, 3, 16))
    weight = torch.randn(48, 48)
    expected = output_projection_cte(attention.clone(), weight, attention_layout=BSNd)
    output_projection_cte(attention, weight, attention_layout=BSNd, out=memory[:, :, 1])
    torch.testing.assert_close(memory[:, :, 1], expected)


def test_the_largest_float8_of_each_format_is_allowed():
    case = Case(kind=STATIC)
    output_projection_cte(**{**case.arguments(), "weight": fp8(48, 20, byte=0x77)})
    ocp = {"dtype_mode": DtypeMode.OCP, "target": "trn3"}
    output_projection_cte(**{**case.arguments(), "weight": fp8(48, 20, byte=0x7E), **ocp})


class TestKernel:
    """What the NKI kernel does not take."""

    def test_float64(self):
        with pytest.raises(ArgumentTypeError, match=r"attention: got torch\.float64, .* with backend='sim'"):
            output_projection_cte(**Case(dtype=torch.float64).arguments(), backend="sim")

    def test_gradients(self):
        arguments = Case().arguments()
        arguments["weight"].requires_grad_()
        with pytest.raises(ArgumentError, match="no gradient with backend='sim'"):
            output_projection_cte(**arguments, backend="sim")

    def test_microscaling_in_quarters_of_a_partition_tile(self):
        case = Case(1, 3, 32, 5, 16, torch.bfloat16, kind=MX, target="trn3")
        output_projection_cte(**case.arguments())
        with pytest.raises(ArgumentError, match="N\\*D=96, expected a multiple of 128"):
            output_projection_cte(**case.arguments(), backend="sim")

    def test_neuron_without_the_package_says_what_to_install(self):
        try:
            require_nki()
        except BackendUnavailableError:
            with pytest.raises(BackendUnavailableError, match="install"):
                output_projection_cte(**Case().arguments(), backend="neuron")
        else:
            pytest.skip("the nki package is installed")
