"""nki.typing: annotations of kernel parameters (nki/migration/index.rst, "nki.typing module"). Nothing checks them."""

from __future__ import annotations

from types import GenericAlias


class tensor:
    """`tensor[128, 512]` annotates a parameter that takes a tensor of that shape."""

    def __class_getitem__(cls, shape: int | tuple[int, ...]) -> GenericAlias:
        return GenericAlias(cls, shape)
