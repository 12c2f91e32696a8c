"""Kernels and their arguments as a command line names them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .arguments import ShapeOnly
from .dtypes import as_dtype
from .kernel import Kernel

_SHAPE = re.compile(r"(?P<dtype>\w+)\[(?P<dims>\d+(,\d+)*)\]")


def load_kernel(text: str) -> Kernel | Callable[..., Any]:
    """The kernel called MODULE:KERNEL or FILE.py:KERNEL.

    Raises:
        ValueError: there is no such file, module or kernel.
    """
    where, _, name = text.rpartition(":")
    if not where:
        raise ValueError(f"{text!r} names no kernel, expected MODULE:KERNEL or FILE.py:KERNEL")
    if where.endswith(".py"):
        if not os.path.exists(where):
            raise ValueError(f"there is no file {where}")
        spec = importlib.util.spec_from_file_location("profiled", where)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.pop(0)
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"there is no module {where} ({error})") from error
    kernel = getattr(module, name, None)
    if not callable(kernel):
        raise ValueError(f"{where} has no kernel {name!r}")
    return kernel  # type: ignore[no-any-return]


def check_call(kernel: Kernel | Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Check that the kernel takes these arguments.

    Raises:
        ValueError: an argument is missing, or there is one too many; names the kernel's parameters.
    """
    signature = inspect.signature(kernel.function if isinstance(kernel, Kernel) else kernel)
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        raise ValueError(f"--shape does not fit the kernel's parameters {signature}: {error}") from error


def parse_argument(text: str) -> Any:
    """DTYPE[DIM,DIM,...] as a ShapeOnly, anything else as a Python literal, e.g. 4.0, None, 'text' or [[0, 1]].

    Raises:
        ValueError: it is neither, or no dtype of nki.language.
    """
    match = _SHAPE.fullmatch(text.replace(" ", ""))
    if match is not None:
        try:
            dtype = as_dtype(match["dtype"])
        except TypeError as error:
            raise ValueError(str(error)) from error
        return ShapeOnly(tuple(int(dim) for dim in match["dims"].split(",")), dtype)
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{text!r} is neither DTYPE[DIM,DIM,...] nor a Python literal") from error


def parse_arguments(texts: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and NAME=VALUE arguments.

    Raises:
        ValueError: as parse_argument.
    """
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name.isidentifier():
            named[name] = parse_argument(value)
        else:
            positional.append(parse_argument(text))
    return positional, named
