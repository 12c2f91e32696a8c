"""Which backend runs, and what is said when it cannot."""

from __future__ import annotations

import sys

import pytest
import torch

from nki_parallel_attn import attention_kv_parallel_segmented_cte
from nki_parallel_attn.backends import BACKEND_VARIABLE, backend_name
from nki_parallel_attn.errors import ArgumentError, BackendUnavailableError
from nki_parallel_attn.nki import require_nki
from tests.kvp.case import Case

CASE = Case(ranks=1, rows=16, block_size=8, heads=2)


def test_auto(monkeypatch):
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    assert backend_name("auto", torch.empty(1)) == "torch"
    assert backend_name("sim", torch.empty(1)) == "sim"
    monkeypatch.setenv(BACKEND_VARIABLE, "sim")
    assert backend_name("auto", torch.empty(1)) == "sim"
    assert backend_name("torch", torch.empty(1)) == "torch"
    monkeypatch.setenv(BACKEND_VARIABLE, "tpu")
    with pytest.raises(ArgumentError, match=BACKEND_VARIABLE):
        backend_name("auto", torch.empty(1))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "not installed"),
        ("", "placeholder"),
        ("raise RuntimeError('use the other index')", "use the other index"),
        ("raise ImportError('use the other index')", "use the other index"),
    ],
    ids=["missing", "empty", "raises", "raises ImportError"],
)
def test_nki_missing_or_placeholder(monkeypatch, tmp_path, source, said):
    for name in [name for name in sys.modules if name == "nki" or name.startswith("nki.")]:
        monkeypatch.delitem(sys.modules, name)
    if source is None:
        monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    else:
        (tmp_path / "nki").mkdir()
        (tmp_path / "nki" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailableError, match=said) as raised:
        require_nki()
    assert "nki>=0.6,<0.8" in str(raised.value)
    with pytest.raises(BackendUnavailableError):
        attention_kv_parallel_segmented_cte(**CASE.arguments(0), backend="neuron")
    sys.modules.pop("nki", None)
