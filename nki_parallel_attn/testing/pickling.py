"""How functions, arguments, results and exceptions travel between the caller and the ranks.

cloudpickle carries lambdas, closures and partials. Test modules travel by value (protocol.by_value_modules). Tensors in
a result leave as detached, contiguous CPU data of their own, wherever in the result they are; a view does not drag its
storage along. Exceptions are rebuilt without calling their __init__, whose parameters are rarely what `args` holds.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from nki_parallel_attn.testing import protocol


def dumps_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle one call. Raises ArgumentTypeError naming the part that cannot be pickled."""
    with _test_modules_by_value():
        with contextlib.suppress(Exception):
            return _dumps(_CallPickler, (fn, tuple(args), dict(kwargs)))
        parts = {"fn": fn} | {f"args[{i}]": value for i, value in enumerate(args)}
        parts |= {f"kwargs[{name!r}]": value for name, value in kwargs.items()}
        for name, value in parts.items():
            _check_picklable(name, value)
        return _dumps(_CallPickler, (fn, tuple(args), dict(kwargs)))


def dumps_result(value: object) -> bytes:
    """Pickle what a rank returns or raises."""
    return _dumps(_ResultPickler, value)


def _dumps(pickler: type[cloudpickle.Pickler], value: object) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _check_picklable(name: str, value: object) -> None:
    from nki_parallel_attn.errors import ArgumentTypeError

    try:
        _dumps(_CallPickler, value)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ArgumentTypeError(
            name, f"a {kind}", "something that can be pickled", f"{type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _test_modules_by_value() -> Iterator[None]:
    already = cloudpickle.list_registry_pickle_by_value()
    modules = [sys.modules[name] for name in protocol.by_value_modules - already if name in sys.modules]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):  # cloudpickle drops the file name, and tracebacks would have no source
            build, args, *_ = self.dispatch_table[types.CodeType](obj)
            return _rebuild_code, (obj.co_filename, build, args)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (obj.__name__,)  # torch's config modules, which cloudpickle does not know
        return super().reducer_override(obj)


class _ResultPickler(_CallPickler):
    def reducer_override(self, obj: Any) -> Any:
        import torch

        if isinstance(obj, type) and (outcome := _pytest_outcome(obj)):
            return _pytest_outcome_class, (outcome,)
        if type(obj) in (torch.Tensor, torch.nn.Parameter):
            return _reduce_tensor(obj)
        if isinstance(obj, torch.Tensor):  # jagged, or of somebody's class
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        if isinstance(obj, BaseException) and isinstance(type(obj).__init__, types.FunctionType):
            return _rebuild_exception, (type(obj), obj.args, obj.__dict__)
        return super().reducer_override(obj)


def _rebuild_code(filename: str, build: Callable[..., types.CodeType], args: tuple[Any, ...]) -> types.CodeType:
    return build(*args).replace(co_filename=filename)


def _reduce_tensor(tensor: Any) -> tuple[Any, ...]:
    import torch

    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return _rebuild_tensor, (pickle.PickleBuffer(data.numpy()), tensor.dtype, tuple(tensor.shape))


def _rebuild_tensor(data: bytearray, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _pytest_outcome(kind: type) -> str | None:
    """The pytest function that raises this class. These classes claim to be builtins, which pickle believes."""
    pytest = sys.modules.get("pytest")
    names = ("skip", "xfail", "fail", "exit") if pytest is not None else ()
    return next((name for name in names if getattr(pytest, name).Exception is kind), None)


def _pytest_outcome_class(name: str) -> type:
    import pytest

    return getattr(pytest, name).Exception  # type: ignore[no-any-return]


def _rebuild_exception(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
