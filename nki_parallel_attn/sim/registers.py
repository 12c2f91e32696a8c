"""Virtual registers: scalar values that exist at run time (nki/api/nki/isa/__init__.py, VirtualRegister)."""

from __future__ import annotations

from typing import NoReturn

from .core import fail


class VirtualRegister:
    """A 32-bit register: an integer, or a float32 on its way from one tensor to another.

    It can be the condition of `while`, a bound of a dynamic loop, a dynamic index, or a `scalar_offset`; Python
    arithmetic and comparisons on it do not exist on the device and raise TypeError.

    Args:
        state: initial value, or None for an uninitialised register.
        frozen: True for loop registers, which instructions cannot write.
    """

    def __init__(self, state: int | float | None = None, frozen: bool = False) -> None:
        self.state = state
        self.frozen = frozen

    def read(self) -> int | float:
        """The value.

        Raises:
            NkiValidationError: nothing has been written to it.
        """
        if self.state is None:
            fail("register", "this register is read before anything was written to it")
        return self.state

    def read_integer(self) -> int:
        """The value of a register that counts or points.

        Raises:
            NkiValidationError: nothing has been written to it, or a float32.
        """
        value = self.read()
        if isinstance(value, float):
            fail("register", f"this register holds the float32 {value:g}, expected an integer")
        return value

    def write(self, value: int | float) -> None:
        """Store `value`, an integer wrapped to 32 bits or a float32.

        Raises:
            NkiValidationError: it is the register of a loop.
        """
        if self.frozen:
            fail("register", "the register of a loop is read-only")
        if isinstance(value, int) and not 0 <= value < 2**32:
            value = (value + 2**31) % 2**32 - 2**31
        self.state = value

    def __bool__(self) -> bool:
        return self.read() != 0

    def _no_python_value(self, *_: object) -> NoReturn:
        raise TypeError(
            "a VirtualRegister has no value while the kernel is built: compute with instructions, or use it as a "
            "dynamic index, a scalar_offset or a loop bound"
        )

    __int__ = __index__ = __float__ = _no_python_value
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_python_value
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = _no_python_value
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = _no_python_value
    # Without these two a branch on `register == 0` would silently never be taken.
    __eq__ = __ne__ = _no_python_value
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"VirtualRegister({self.state})"
