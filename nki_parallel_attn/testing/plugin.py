"""The pytest plugin: `@pytest.mark.multirank(world_size=N, timeout=60)` runs a test on every rank of a world.

Fixtures run once, in the pytest process; their values and parameters are pickled to the ranks. `rank` and `world_size`
are fixtures of this plugin, `tmp_path` is the same directory on all ranks. Nothing of weight is imported before a
multirank test runs.
"""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from nki_parallel_attn.testing import protocol
from nki_parallel_attn.testing.report import rank_names

if TYPE_CHECKING:
    from nki_parallel_attn.errors import RankFailedError


class MultirankOptions(NamedTuple):
    """The arguments of the marker."""

    world_size: int
    timeout: float = 60


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "multirank(world_size, timeout=60): run the test on every rank of a world of processes"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Test modules and conftests travel by value; protocol.by_value_modules says why."""
    modules = {getattr(item, "module", None) for item in session.items}
    modules |= {
        plugin
        for plugin in session.config.pluginmanager.get_plugins()
        if (getattr(plugin, "__file__", None) or "").endswith("conftest.py")
    }
    protocol.by_value_modules |= {module.__name__ for module in modules if module is not None}


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("multirank") is not None:
        _options(item)
        if issubclass(getattr(item, "cls", None) or object, unittest.TestCase):
            pytest.fail("a unittest.TestCase method cannot be a multirank test; use a plain class", pytrace=False)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> protocol.RankPlaceholder:
    """This rank's number; on the ranks of a multirank test an int, elsewhere a placeholder for it."""
    _options(request.node)
    return protocol.RankPlaceholder()


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks of a multirank test."""
    return _options(request.node).world_size


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("multirank") is None:
        return None
    from nki_parallel_attn.errors import ArgumentTypeError, RankFailedError
    from nki_parallel_attn.testing.run import run_ranks

    options, problem = _options(pyfuncitem), ""
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: value for name, value in pyfuncitem.funcargs.items() if name in names}
    _check_arguments(pyfuncitem, options, arguments)
    try:
        run_ranks(pyfuncitem.obj, options.world_size, kwargs=arguments, timeout=options.timeout)
    except ArgumentTypeError as error:
        problem = f"the test and the values of its arguments are pickled to the ranks; {error}"
    except RankFailedError as error:
        _skip_or_xfail(error, options.world_size)
        raise
    if problem:
        pytest.fail(problem, pytrace=False)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the ranks reported, without the frames of this plugin around it."""
    report = yield
    if call.when == "call" and call.excinfo is not None and item.get_closest_marker("multirank") is not None:
        if report.skipped and isinstance(call.excinfo.value, pytest.skip.Exception):
            path, line, _ = item.reportinfo()
            report.longrepr = (str(path), (line or 0) + 1, f"Skipped: {call.excinfo.value}")
        elif type(call.excinfo.value).__name__ in ("RankFailedError", "RankTimeoutError"):
            report.longrepr = call.excinfo.getrepr(style="value")
    return report


def _options(item: pytest.Item) -> MultirankOptions:
    marker = item.get_closest_marker("multirank")
    if marker is None:
        pytest.fail("the fixtures rank and world_size are for tests marked multirank(world_size=N)", pytrace=False)
    problem = ""
    try:
        options = MultirankOptions(*marker.args, **marker.kwargs)
        if type(options.world_size) is not int or options.world_size < 1:
            problem = f"world_size is {options.world_size!r}, not an integer of 1 or more"
    except TypeError as error:
        problem = str(error).replace("MultirankOptions.__new__", "multirank")
    if problem:
        pytest.fail(f"the marker is multirank(world_size, timeout=60): {problem}", pytrace=False)
    return options


def _check_arguments(item: pytest.Function, options: MultirankOptions, arguments: dict[str, Any]) -> None:
    """Refuse what could only go wrong silently, or far from its cause."""
    problem = ""
    if inspect.iscoroutinefunction(item.obj):
        problem = "a coroutine cannot be a multirank test"
    elif getattr(item.obj, "is_hypothesis_test", False):
        problem = "with @given every rank would draw its own examples; call run_ranks inside an unmarked test instead"
    elif arguments.get("world_size", options.world_size) != options.world_size:
        problem = f"argument world_size is {arguments['world_size']}, the marker's is {options.world_size}"
    elif not isinstance(arguments.get("rank", protocol.RankPlaceholder()), protocol.RankPlaceholder):
        problem = "argument rank must be the plugin's fixture"
    for name, value in arguments.items():
        if type(value).__module__.split(".")[0] == "_pytest":
            problem = f"fixture {name!r} acts on the pytest process; it cannot be used on the ranks"
    if problem:
        pytest.fail(problem, pytrace=False)


def _skip_or_xfail(error: RankFailedError, world_size: int) -> None:
    """Skip or xfail when that is what every rank asked for."""
    for name, outcome in (("skip", pytest.skip), ("xfail", pytest.xfail)):
        exceptions = {rank: e for rank, e in error.exceptions.items() if isinstance(e, outcome.Exception)}
        if len(exceptions) == world_size:
            outcome(str(next(iter(exceptions.values()))))
        if exceptions:
            error.args = (f"{rank_names(exceptions)} called pytest.{name}, the others did not; {error}",)
