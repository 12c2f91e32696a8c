"""The simulator under the names of NKI: in a `with` block, for a script, and for the ranks of torchrun."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from types import ModuleType

import numpy as np
import pytest

import nki_parallel_attn.sim.language
from nki_parallel_attn.sim import as_nki
from tests.patience import JOB

KERNEL = """
    import nki
    import nki.isa as nisa
    import nki.language as nl
    from nki.collectives import ReplicaGroup
    from nki.typing import tensor

    @nki.jit
    def double(x: tensor[4, 3]):
        tile = nl.load(x)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        nl.store(out, value=tile)
        return out
"""


def write(path, text):
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder on sys.path with a kernel module, beside a placeholder package nki whose import raises."""
    write(tmp_path / "their_kernels.py", KERNEL)
    (tmp_path / "nki").mkdir()
    write(tmp_path / "nki" / "__init__.py", "raise RuntimeError('this is a placeholder')")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("their_kernels", None)


def run(folder, *arguments, **environment):
    """`python -m nki_parallel_attn.sim run ...` in a folder that shadows nki with the placeholder."""
    command = [sys.executable, "-m", "nki_parallel_attn.sim", "run", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=JOB, env=env, check=False)


def test_kernels_find_the_simulator_whatever_is_installed(kernels):
    with pytest.raises(RuntimeError, match="placeholder"):
        importlib.import_module("nki")
    with as_nki() as nki:
        import their_kernels

        assert sys.modules["nki"] is nki
        assert sys.modules["nki.language"] is nki.language is nki_parallel_attn.sim.language
        assert importlib.util.find_spec("nki") is not None
        with pytest.raises(ModuleNotFoundError, match=r"nki\.compiler"):
            importlib.import_module("nki.compiler")
    x = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(their_kernels.double(x), 2 * x)
    np.testing.assert_array_equal(nki.simulate(their_kernels.double)(x), 2 * x)
    assert not {name for name in sys.modules if name.split(".")[0] == "nki"}


def test_what_was_imported_before_comes_back_also_after_an_error():
    real = {"nki": ModuleType("nki"), "nki.language": ModuleType("nki.language"), "nki.extra": ModuleType("nki.extra")}
    sys.modules.update(real)
    try:
        with pytest.raises(ZeroDivisionError), as_nki() as outer:
            assert "nki.extra" not in sys.modules
            with as_nki() as inner:
                assert sys.modules["nki"] is inner
            assert sys.modules["nki"] is outer
            raise ZeroDivisionError
        assert {name: module for name, module in sys.modules.items() if name.split(".")[0] == "nki"} == real
    finally:
        for name in real:
            sys.modules.pop(name, None)


def test_it_decorates_functions():
    @as_nki()
    def target():
        import nki.isa

        return nki.isa.get_nc_version().name

    assert target() in {"gen2", "gen3", "gen4"}
    assert "nki" not in sys.modules


def test_a_script_runs_as_python_would_run_it(kernels):
    script = write(
        kernels / "main.py",
        """
        import os, sys
        import numpy as np
        from their_kernels import double

        if __name__ == "__main__":
            assert os.environ["NKI_SIMULATOR"] == "1"
            print(sys.argv[1:], double(np.ones((2, 2), np.float32)).sum())
            sys.exit(int(sys.argv[-1]))
        """,
    )
    done = run(kernels, script, "--flag", "-x", "3")
    assert done.returncode == 3, done.stderr
    assert done.stdout == "['--flag', '-x', '3'] 8.0\n"


def test_a_broken_kernel_ends_the_script_with_its_line(kernels):
    script = write(
        kernels / "broken.py",
        """
        import nki, nki.language as nl, numpy as np

        @nki.jit
        def kernel(x):
            nl.ndarray((129, 1), nl.float32)

        kernel(np.ones((2, 2), np.float32))
        """,
    )
    done = run(kernels, script)
    assert done.returncode == 1
    assert f"{script}:6: [partition-limit]" in done.stderr


def test_the_target_comes_from_the_environment(kernels):
    script = write(kernels / "target.py", "import nki.isa as nisa\nprint(nisa.get_nc_version().name)\n")
    assert run(kernels, script, NEURON_PLATFORM_TARGET_OVERRIDE="trn2").stdout == "gen3\n"


def test_a_missing_script_is_named(kernels):
    done = run(kernels, kernels / "nothing.py")
    assert done.returncode == 2
    assert "nothing.py" in done.stderr


def test_two_ranks_under_torchrun(kernels):
    script = write(
        kernels / "ranks.py",
        """
        import os
        import numpy as np
        import torch.distributed as dist
        import nki, nki.collectives as ncc, nki.isa as nisa, nki.language as nl
        from their_kernels import double

        @nki.jit
        def total(x):
            src, dst, out = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm) for _ in range(3))
            nisa.dma_copy(dst=src, src=x)
            ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0, 1]]), op=nl.add)
            nisa.dma_copy(dst=out, src=dst)
            return out

        alone = double(np.ones((2, 2), np.float32))
        dist.init_process_group("gloo")
        x = np.full((2, 2), 1.0 + dist.get_rank(), np.float32)
        assert (total(x) == 3).all() and (alone == 2).all()
        os.write(1, b"rank %d right\\n" % dist.get_rank())  # whole lines, whoever else writes
        dist.destroy_process_group()
        """,
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "nki_parallel_attn.sim", "run", str(script)]
    env = {**os.environ, "PYTHONPATH": str(kernels), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOB, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "right" in line) == ["rank 0 right", "rank 1 right"]
