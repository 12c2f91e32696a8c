"""The simulator under the names of NKI, for kernels that import `nki`.

    with as_nki():
        import their_kernels          # does `import nki.language as nl`, and gets nki_parallel_attn.sim.language

`python -m nki_parallel_attn.sim run SCRIPT` does the same for a whole script.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "nki"
SUBMODULES = ("collectives", "isa", "language", "typing")
FUNCTIONS = {"jit": "kernel", "simulate": "simulation"}


@contextmanager
def as_nki() -> Iterator[ModuleType]:
    """Serve the simulator as `nki`, `nki.language`, `nki.isa`, `nki.collectives` and `nki.typing`.

    A context manager and a decorator. What was imported under these names before, be it the real package, comes back
    at the end; modules imported meanwhile keep the simulator. An installed package called nki is not looked at.

    Yields:
        the module `nki`.
    """
    before = _take_out()
    served = {PACKAGE: _package(), **{f"{PACKAGE}.{name}": _submodule(name) for name in SUBMODULES}}
    sys.modules.update(served)
    try:
        yield served[PACKAGE]
    finally:
        _take_out()
        sys.modules.update(before)


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}


def _package() -> ModuleType:
    package = ModuleType(PACKAGE, "NKI, simulated on the CPU.")
    package.__spec__ = ModuleSpec(PACKAGE, None, is_package=True)
    package.__path__ = []
    for name in SUBMODULES:
        setattr(package, name, _submodule(name))
    for name, module in FUNCTIONS.items():
        setattr(package, name, getattr(_submodule(module), name))
    return package


def _submodule(name: str) -> ModuleType:
    return import_module(f".{name}", __package__)


def run_script(path: str, arguments: Sequence[str] = ()) -> None:
    """Run a Python file as `python path arguments` does, with the simulator as `nki`.

    Sets NKI_SIMULATOR=1, by which NKI programs know that they are simulated.
    """
    os.environ["NKI_SIMULATOR"] = "1"
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    with as_nki():
        runpy.run_path(path, run_name="__main__")
