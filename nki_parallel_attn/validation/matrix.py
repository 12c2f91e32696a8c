"""The matrix: kernels x layouts x scenarios x dtypes x ranks x LNC, and the selection of a part of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.validation.case import Case
from nki_parallel_attn.validation.const_max_cases import const_max_cases
from nki_parallel_attn.validation.decode_cases import decode_cases
from nki_parallel_attn.validation.prefill_cases import prefill_cases
from nki_parallel_attn.validation.projection_cases import projection_cases

DEFAULT_RANKS = (1, 2, 4, 8)


def matrix(ranks: Iterable[int]) -> list[Case]:
    """Every case with these numbers of ranks."""
    counts = tuple(sorted(set(ranks)))
    return [*const_max_cases(), *prefill_cases(counts), *projection_cases(), *decode_cases(counts)]


@dataclass(frozen=True)
class Selection:
    """Which part of the matrix to run; an empty tuple stands for all values.

    Attributes:
        ranks: numbers of ranks.
        lnc: by default both, and on torch, where it has no effect, 1.
        expression: of words in case names with "and", "or", "not" and parentheses; "" for no condition.
    """

    backend: str
    target: str = "trn2"
    ranks: tuple[int, ...] = DEFAULT_RANKS
    kernels: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    lnc: tuple[int, ...] = ()
    expression: str = ""

    def cases(self) -> list[Case]:
        """The cases, in the order of the matrix.

        Raises:
            ArgumentError: a malformed expression, or no case left.
        """
        matches = name_filter(self.expression)
        lnc = self.lnc or ((1,) if self.backend == "torch" else (1, 2))
        found = [
            case
            for case in matrix(self.ranks)
            if case.exists_on(self.backend, self.target)
            and case.lnc in lnc
            and _among(case.kernel, self.kernels)
            and _among(case.layout, self.layouts)
            and _among(case.dtype, self.dtypes)
            and matches(case.name)
        ]
        if not found:
            raise ArgumentError("selection", "no case", "at least one", "--list without conditions shows all")
        return found


def values(attribute: str) -> list[str]:
    """The values that an attribute of cases, such as "dtype", has in the matrix."""
    return list(dict.fromkeys(getattr(case, attribute) for case in matrix(DEFAULT_RANKS)))


def name_filter(expression: str) -> Callable[[str], bool]:
    """A condition on case names, as pytest's -k: every word must be a part of the name.

    Raises:
        ArgumentError: not such an expression.
    """
    if not expression.strip():
        return lambda name: True
    words = re.findall(r"[()]|[^\s()]+", expression)
    operators = {"and", "or", "not", "(", ")"}
    # Words become string literals: nothing of the expression is executed.
    code = " ".join(word if word in operators else f"({word!r} in name)" for word in words)
    try:
        condition = compile(code, "expression", "eval")
        eval(condition, {"__builtins__": {}}, {"name": ""})  # two words side by side look like a call
    except (SyntaxError, TypeError) as error:
        form = "words of case names with and, or, not and parentheses"
        raise ArgumentError("expression", repr(expression), form) from error
    return lambda name: bool(eval(condition, {"__builtins__": {}}, {"name": name}))


def _among(value: str, wanted: Sequence[str]) -> bool:
    return not wanted or value in wanted
