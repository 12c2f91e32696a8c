"""`nki-parallel-attn profile`: kernels by module and file, arguments, trace, and one clear line for what cannot be."""

from __future__ import annotations

import json

import pytest

from nki_parallel_attn.cli import main
from nki_parallel_attn.sim import ShapeOnly
from nki_parallel_attn.sim.kernel_spec import parse_arguments

MATMUL = "tests.sim.kernels.matmul:tiled_matmul"
KERNEL = '''
import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl


@nki.jit
def scaled(data, factor=1.0):
    """data * factor; [128, F]."""
    tile = nl.load(data)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    out = nl.ndarray(data.shape, dtype=data.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out
'''


@pytest.fixture
def kernel_file(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(KERNEL)
    return path


def test_module_on_two_cores(capsys):
    options = ["--shape", "bfloat16[256,256]", "bfloat16[256,1024]", "--lnc", "2", "--target", "trn3"]
    assert main(["profile", MATMUL, *options]) == 0
    out = capsys.readouterr().out
    assert "Modelled on trn3" in out and "rank 0 core 1" in out and "A model, not a measurement" in out


def test_file_with_a_trace(kernel_file, tmp_path, capsys):
    trace = tmp_path / "out.json"
    options = ["--shape", "float32[128,512]", "factor=2.0", "--trace", str(trace), "--json"]
    assert main(["profile", f"{kernel_file}:scaled", *options]) == 0
    assert json.loads(capsys.readouterr().out)["cores"][0]["dma_bytes"] == 2 * 128 * 512 * 4
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(names) == 3 and "tensor_scalar kernels.py:12" in names


def test_worlds(kernel_file, capsys):
    options = ["--shape", "data=float32[128,512]", "--world-size", "3"]
    assert main(["profile", f"{kernel_file}:scaled", *options]) == 0
    assert "rank 2 core 0" in capsys.readouterr().out
    assert main(["profile", f"{kernel_file}:scaled", *options, "--representative", "1"]) == 0
    out = capsys.readouterr().out
    assert "rank 1 core 0" in out and "rank 0" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere:kernel"], "no module nowhere"),
        (["nowhere.py:kernel"], "no file nowhere.py"),
        (["kernel"], "names no kernel"),
        ([MATMUL + "s"], "no kernel 'tiled_matmuls'"),
        ([MATMUL, "--shape", "float31[2,2]"], "float31"),
        ([MATMUL, "--shape", "2x2"], "neither DTYPE"),
        ([MATMUL, "--shape", "float32[2,2]"], "--shape does not fit the kernel's parameters ("),
        ([MATMUL, "--representative", "1"], "expected a rank of world_size"),
        ([MATMUL, "--shape", "float32[2]", "rhs=1", "--world-size", "2"], "in order or all by name"),
    ],
)
def test_what_cannot_be(arguments, message, capsys):
    assert main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_arguments():
    positional, named = parse_arguments(["bfloat16[1, 128]", "4.0", "a=None", "groups=[[0, 1]]", "'x=1'"])
    assert positional == [ShapeOnly((1, 128), "bfloat16"), 4.0, "x=1"]
    assert named == {"a": None, "groups": [[0, 1]]}
