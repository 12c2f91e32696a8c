"""The door to NKI: `from nki_parallel_attn.nki import nki, nl, nisa, ncc`, from the real package or from sim/.

The real package where it is installed and works, else the simulator. NKI_PARALLEL_ATTN_BACKEND=sim takes the simulator
in any case, =neuron the real package or an error. Nothing is imported before a name is asked for.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from nki_parallel_attn.errors import BackendUnavailableError

_MODULES = {"nki": "", "nl": ".language", "nisa": ".isa", "ncc": ".collectives"}

INSTALL_NKI = "on a Trn2 or Trn3 instance install 'nki>=0.6,<0.8' from the AWS Neuron package index"


def require_nki() -> None:
    """Raise BackendUnavailableError unless the real nki package is there, saying why and what to install."""
    try:
        module = import_module("nki")
        import_module("nki.language")
    except ModuleNotFoundError as error:
        if error.name == "nki":
            raise BackendUnavailableError(f"the nki package is not installed; {INSTALL_NKI}") from error
        placeholder = error.name == "nki.language"
        what = "an empty placeholder" if placeholder else f"broken ({error})"
        raise BackendUnavailableError(f"the installed nki package is {what}; {INSTALL_NKI}") from error
    except Exception as error:
        # What public PyPI serves under this name raises when it is imported, and not always an ImportError.
        raise BackendUnavailableError(
            f"the installed nki package cannot be imported ({type(error).__name__}: {error}), "
            f"it may be the placeholder that public PyPI serves under that name; {INSTALL_NKI}"
        ) from error
    if not hasattr(module, "jit"):
        raise BackendUnavailableError(f"the installed nki package has no nki.jit, it is a placeholder; {INSTALL_NKI}")


def _package() -> str:
    wanted = os.environ.get("NKI_PARALLEL_ATTN_BACKEND", "")
    if wanted != "sim":
        try:
            require_nki()
            return "nki"
        except BackendUnavailableError:
            if wanted == "neuron":
                raise
    return "nki_parallel_attn.sim"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(_package() + _MODULES[name])
