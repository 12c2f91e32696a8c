"""The simulator's modules have every public name of the documented ones, with the documented parameters."""

from __future__ import annotations

import inspect
from enum import Enum

import pytest

from nki_parallel_attn.sim import as_nki, collectives, isa, language
from nki_parallel_attn.sim.ops import Operator

from . import documented_names as documented

MODULES = {
    "nki.isa": (isa, documented.ISA_FUNCTIONS, documented.ISA_OTHER),
    "nki.language": (language, documented.LANGUAGE_FUNCTIONS, documented.LANGUAGE_OTHER),
    "nki.collectives": (collectives, documented.COLLECTIVES_FUNCTIONS, documented.COLLECTIVES_OTHER),
}
FUNCTIONS = [(module, name) for module, (_, functions, _) in MODULES.items() for name in functions]


def parameters_of(function):
    """Parameter names as the documented signature writes them."""
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [marks.get(p.kind, "") + p.name for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("module", MODULES)
def test_every_documented_name_is_there_and_exported(module):
    ours, functions, others = MODULES[module]
    wanted = {*functions, *others}
    assert {name for name in wanted if not hasattr(ours, name)} == set()
    assert wanted - set(ours.__all__) == set()


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_functions_take_the_documented_parameters(module, name):
    ours, functions, _ = MODULES[module]
    function = getattr(ours, name)
    wanted = functions[name].split()
    if isinstance(function, Operator):  # also a value for op=; called with x, or x and y, and dtype
        assert wanted == [*("x", "y")[: function.inputs], "dtype"]
    else:
        assert parameters_of(function) == wanted


@pytest.mark.parametrize("name", documented.ENUMS)
def test_enums_have_the_documented_members(name):
    kind = getattr(isa, name)
    assert issubclass(kind, Enum)
    assert {member.name: member.value for member in kind} == documented.ENUMS[name]


def test_tensors_and_tile_sizes_have_the_documented_attributes():
    assert {name for name in documented.TENSOR_ATTRIBUTES if not hasattr(language.NkiTensor, name)} == set()
    assert {name for name in documented.TILE_SIZE_ATTRIBUTES if not hasattr(language.tile_size, name)} == set()


def test_the_served_package_has_the_documented_functions():
    with as_nki() as nki:
        for name in documented.NKI_FUNCTIONS:
            assert callable(getattr(nki, name))


def test_deprecated_engine_names_are_the_engines():
    for name in ("tensor", "vector", "scalar", "gpsimd", "unknown"):
        assert getattr(isa, f"{name}_engine") is isa.engine[name]
