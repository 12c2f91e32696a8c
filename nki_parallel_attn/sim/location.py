"""Where in the kernel's source the simulator was called from."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_THREADING = threading.__file__
_inside: dict[str, bool] = {}


def caller() -> tuple[str, int] | None:
    """File and line of the innermost frame outside the simulator, or None when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        inside = _inside.get(filename)
        if inside is None:
            inside = _inside[filename] = filename.startswith(_PACKAGE)
        if not inside:
            return None if filename == _THREADING else (filename, frame.f_lineno)
        frame = frame.f_back
    return None


def show(location: tuple[str, int] | None) -> str | None:
    """`location` as "file:line"."""
    return f"{location[0]}:{location[1]}" if location else None
