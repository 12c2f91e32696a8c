"""What the parameters of an instruction take, read from their annotations: tensors, integers, numbers.

A value of another kind is an error before the instruction looks at it. NumPy's numbers are as good as Python's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from .integers import nested_integers
from .tensor import NkiTensor

if TYPE_CHECKING:
    from .instruction import Call

_LISTS = ("", "a list of ", "a list of lists of ")
_INTEGER_WORDS = {"int", "Sequence", "list", "tuple", "None"}


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        depths: lists around one value: 0 for the value itself.
        plain: types that it takes as they are; the others are `checked`.
    """

    name: str
    position: int
    depths: frozenset[int]
    plain: frozenset[type]

    def checked(self, call: Call, value: Any) -> Any:
        """A value of no plain type, as the instruction takes it.

        Raises:
            NkiValidationError: it is of another kind.
        """
        raise NotImplementedError

    def refuse(self, call: Call, rule: str, value: Any, what: str) -> NoReturn:
        """Raise the error of a value of another kind."""
        expected = " or ".join(f"{_LISTS[depth]}{what}" for depth in sorted(self.depths))
        shown = repr(value)
        call.fail(rule, f"{self.name} is {shown if len(shown) <= 80 else type(value)}, expected {expected}")


class Integer(Parameter):
    """Integers known while the kernel is built, or lists of them."""

    def checked(self, call: Call, value: Any) -> Any:
        value = nested_integers(value, f"{call.name}: {self.name}")
        if _depth(value) not in self.depths:
            self.refuse(call, "integer", value, "integers")
        return value


class Number(Parameter):
    """A number or, for some, a tensor."""

    def checked(self, call: Call, value: Any) -> Any:
        if isinstance(value, (bool, np.bool_, np.integer)):
            return int(value)
        if not isinstance(value, (float, np.floating)):
            self.refuse(call, "scalar-operand", value, _number_or_tensor(self))
        return float(value)


def _number_or_tensor(number: Number) -> str:
    return "a number or a tensor of the kernel" if NkiTensor in number.plain else "a number"


class Tensors(Parameter):
    """A tensor, or lists of tensors."""

    def checked(self, call: Call, value: Any) -> Any:
        for depth in self.depths:
            if not _is_nested(value, depth):
                self.refuse(
                    call, "tensor-operand", value, "tensors of the kernel" if depth else "a tensor of the kernel"
                )
        return value


def parameters_of(parameters: Sequence[inspect.Parameter], tensors: Collection[str]) -> list[Parameter]:
    """Those of an instruction's parameters that have something to check.

    Args:
        tensors: names of the operands that are read or written.
    """
    found: list[Parameter] = []
    for position, parameter in enumerate(parameters):
        annotation = parameter.annotation
        words = set(re.findall(r"\w+", annotation))
        kind: type[Parameter]
        if "int" in words and words <= _INTEGER_WORDS:
            kind = Integer
        elif annotation.startswith("float"):
            kind = Number
        elif parameter.name in tensors:
            kind = Tensors
        else:
            continue
        found.append(kind(parameter.name, position, *_kinds(annotation)))
    return found


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "NkiTensor": (NkiTensor,),
    "None": (type(None),),
}


def _kinds(annotation: str) -> tuple[frozenset[int], frozenset[type]]:
    """(depths, plain types) of an annotation like "int | Sequence[int] | None"."""
    kinds = annotation.split(" | ")
    plain = frozenset(found for kind in kinds for found in _TYPES.get(kind, ()))
    return frozenset(kind.count("[") for kind in kinds if kind != "None"), plain


def _depth(value: Any) -> int:
    if not isinstance(value, (list, tuple)):
        return 0
    return 1 + (_depth(value[0]) if value else 0)


def _is_nested(value: Any, depth: int) -> bool:
    """Whether `value` is tensors inside `depth` lists."""
    if depth == 0:
        return isinstance(value, NkiTensor)
    return type(value) in (list, tuple) and all(_is_nested(item, depth - 1) for item in value)
