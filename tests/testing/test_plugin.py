"""The pytest plugin, in pytest sessions of its own."""

import re
import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import time
import unittest

import pytest
import torch
import torch.distributed as dist

multirank = pytest.mark.multirank
stream = open("/dev/null", "wb")


def check(value):
    assert value == {"a": [1, 2, 3]}, "checked by a helper"


@pytest.fixture
def scale():
    return torch.tensor(2.0)


@pytest.fixture
def unpicklable():
    return stream


@multirank(world_size=3)
def test_passes(rank, world_size, tmp_path, scale):
    assert dist.get_rank() == rank and dist.get_world_size() == world_size == 3
    (tmp_path / f"{rank}").touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    total = scale * rank
    dist.all_reduce(total)
    assert total == 6


@multirank(2)
def test_introspection(rank):
    values = [rank, 7]
    assert values == [0, 7]


@multirank(2)
def test_helper(rank):
    print("said by", rank)
    check({"a": [1, 2, rank]})


@multirank(world_size=2)
class TestInAClass:
    base = 10

    @pytest.mark.parametrize("k", [1, 2])
    def test_method(self, k, rank):
        assert self.base + k == 11 or rank == 0


@pytest.mark.parametrize("n", [pytest.param(n, marks=multirank(n)) for n in (1, 2)])
def test_several_worlds(n, world_size):
    assert dist.get_world_size() == world_size == n


@multirank(2)
def test_all_skip(rank):
    pytest.skip("not on this machine")


@multirank(2)
def test_some_skip(rank):
    if rank == 1:
        pytest.skip("only here")


@multirank(2)
@pytest.mark.xfail(strict=True)
def test_marked_xfail(rank):
    assert rank == 0


@multirank(2)
def test_calls_xfail():
    pytest.xfail("known")


@multirank(2)
def test_calls_fail(rank):
    if rank == 1:
        pytest.fail("by hand")


@multirank(2)
def test_unpicklable(unpicklable):
    pass


@multirank(2)
def test_uses_monkeypatch(monkeypatch):
    pass


@multirank(2)
@pytest.mark.parametrize("world_size", [3])
def test_contradicts(world_size):
    pass


@multirank(2)
async def test_coroutine():
    pass


@multirank(world=2)
def test_wrong_marker():
    pass


@multirank(0)
def test_no_ranks():
    pass


def test_no_marker(rank):
    pass


class TestUnit(unittest.TestCase):
    @multirank(2)
    def test_unit(self):
        pass
"""

HANG = """
import os, signal, time, pytest
import torch.distributed as dist

@pytest.mark.multirank(2, timeout=3)
def test_hangs(rank):
    if rank == 0:
        dist.barrier()  # rank 1 does not come

@pytest.mark.multirank(2)
def test_next(rank, tmp_path):
    (tmp_path.parent / f"next-{rank}").write_text(str(os.getpid()))
    dist.barrier()

@pytest.mark.multirank(2)
def test_fails(rank):
    assert rank == 5

@pytest.mark.multirank(2)
def test_same_processes(rank, tmp_path):
    assert (tmp_path.parent / f"next-{rank}").read_text() == str(os.getpid())

@pytest.mark.multirank(2)
def test_dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.multirank(2)
def test_new_processes(rank, tmp_path):
    assert (tmp_path.parent / f"next-{rank}").read_text() != str(os.getpid())
"""


def section(output: str, name: str) -> str:
    """What the session printed about one failed test."""
    found = re.search(
        rf"^_+ (?:ERROR at setup of )?{re.escape(name)} _+$(.*?)(?=^(?:_{{3,}} |={{3,}} ))", output, re.M | re.S
    )
    assert found, f"no failure of {name} in:\n{output}"
    return found[1]


@pytest.fixture
def run_pytest(pytester: pytest.Pytester):
    def run(text: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(text)
        return pytester.runpytest_inprocess("--strict-markers", "-p", "no:cacheprovider", *options)

    return run


def test_outcomes_and_messages(run_pytest) -> None:
    result = run_pytest(TESTS, "-rs")
    result.assert_outcomes(passed=4, failed=9, skipped=1, xfailed=2, errors=4)
    output = result.stdout.str()
    file = r'File "[^"]*test_outcomes_and_messages\.py", line \d+'

    failed = section(output, "test_introspection")
    assert "1 of 2 ranks failed; rank 1: AssertionError: assert [1, 7] == [0, 7]" in failed
    assert re.search(file + r", in test_introspection\n    assert values == \[0, 7\]\n", failed)
    assert "plugin.py" not in failed and "run_ranks" not in failed

    failed = section(output, "test_helper")
    assert "2 of 2 ranks failed" in failed
    for rank in (0, 1):
        assert f"checked by a helper\nassert {{'a': [1, 2, {rank}]}} == {{'a': [1, 2, 3]}}" in failed
        assert f"[rank {rank}] said by {rank}" in failed
    assert "Captured stdout call" in failed

    assert "rank 1: AssertionError: assert ((10 + 2) == 11 or 1 == 0)" in section(output, "TestInAClass.test_method[2]")
    assert re.search(r"^SKIPPED \[1\] test_outcomes_and_messages\.py:\d+: not on this machine$", output, re.M)
    assert "rank 1 called pytest.skip, the others did not" in section(output, "test_some_skip")
    assert "by hand" in section(output, "test_calls_fail")
    assert "kwargs['unpicklable']: got a _io.BufferedWriter" in section(output, "test_unpicklable")
    assert "fixture 'monkeypatch' acts on the pytest process" in section(output, "test_uses_monkeypatch")
    assert "argument world_size is 3, the marker's is 2" in section(output, "test_contradicts[3]")
    assert "a coroutine cannot be" in section(output, "test_coroutine")
    assert "got an unexpected keyword argument 'world'" in section(output, "test_wrong_marker")
    assert "world_size is 0, not an integer of 1 or more" in section(output, "test_no_ranks")
    assert "for tests marked multirank(world_size=N)" in section(output, "test_no_marker")
    assert "a unittest.TestCase method cannot be" in section(output, "TestUnit.test_unit")


def test_given_is_refused(run_pytest) -> None:
    pytest.importorskip("hypothesis")
    result = run_pytest(
        """
        import pytest
        from hypothesis import given, strategies as st

        @pytest.mark.multirank(2)
        @given(st.integers())
        def test_property(i):
            pass
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*every rank would draw its own examples*"])


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_conftest_and_import_modes(run_pytest, pytester: pytest.Pytester, mode: str) -> None:
    pytester.makeconftest("def double(x):\n    assert x < 1\n    return 2 * x")
    result = run_pytest(
        """
        import pytest
        from nki_parallel_attn.testing import run_ranks

        def local(rank_list):
            import torch.distributed as dist
            return rank_list[dist.get_rank()]

        @pytest.mark.multirank(2)
        def test_marked(rank, request_free_value):
            assert local([0, 1]) == rank and request_free_value == 3

        @pytest.fixture
        def request_free_value():
            return 3

        def test_run_ranks(pytestconfig):
            (conftest,) = [
                plugin
                for plugin in pytestconfig.pluginmanager.get_plugins()
                if str(getattr(plugin, "__file__", "")).endswith("conftest.py")
            ]
            assert run_ranks(local, 2, args=([5, 6],)) == [5, 6]
            run_ranks(conftest.double, 2, args=(1,))
        """,
        f"--import-mode={mode}",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: assert 1 < 1*"])


def test_hang_and_death_leave_the_next_tests_alone_under_xdist(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    for name in ("test_one", "test_two"):
        pytester.makepyfile(**{name: HANG})
    result = pytester.runpytest_subprocess("-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=6, failed=6)
    output = result.stdout.str()
    hang = section(output, "test_hangs")
    assert "rank 0 did not finish within 3 s" in hang and "dist.barrier()  # rank 1 does not come" in hang
    assert "rank 1: returned" in hang
    assert "rank 1: died of SIGKILL (signal 9)" in section(output, "test_dies")


def test_sessions_without_multirank_tests_load_nothing_of_weight(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys
        import pytest

        def test_light(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin("nki_parallel_attn")
            assert not {"torch", "numpy", "cloudpickle", "nki_parallel_attn.testing.run"} & set(sys.modules)

        @pytest.fixture
        def rank():
            return "my own"

        def test_own_fixture(rank):
            assert rank == "my own"
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:hypothesispytest", "--strict-markers")
    result.assert_outcomes(passed=2)
    result = pytester.runpytest_subprocess("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.multirank(world_size, timeout=60):*"])


def test_importing_the_plugin_loads_nothing_of_weight() -> None:
    code = "import sys, nki_parallel_attn.testing.plugin; print({'torch', 'numpy', 'cloudpickle'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
