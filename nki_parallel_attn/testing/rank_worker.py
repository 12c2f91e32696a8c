"""A rank: sets up the process group, runs the call, reports what became of it, and tears the group down.

Every call gets a new process group (12 ms for 2 ranks, 25 ms for 4, 65 ms for 8, and 30 ms to destroy): a group that an
earlier call left with an unmatched collective, or with subgroups of its own, would poison the next one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import pickle
import random
import socket
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from nki_parallel_attn.testing import protocol
from nki_parallel_attn.testing.pickling import dumps_result


def serve(connection: Connection[bytes, bytes], stacks: str) -> None:
    """Run calls until the caller goes away.

    Args:
        connection: a Call and its pickled (fn, args, kwargs) come in, an Outcome goes out; then RELEASE comes in and,
            once the process group is gone, goes out.
        stacks: file for the Python stacks, on STACK_SIGNAL and when the process crashes.
    """
    stacks_file = open(stacks, "ab", buffering=0)  # noqa: SIM115  (open for as long as the process lives)
    faulthandler.enable(stacks_file, all_threads=True)
    faulthandler.register(protocol.STACK_SIGNAL, stacks_file, all_threads=True)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        if message == protocol.RELEASE:
            if dist.is_initialized():
                dist.destroy_process_group()
            reply = protocol.RELEASE
        else:
            reply = pickle.dumps(_run(pickle.loads(message), connection.recv_bytes()))
        _flush()
        connection.send_bytes(reply)


def _run(call: protocol.Call, payload: bytes) -> protocol.Outcome:
    try:
        _set_up_process(call)
        fn, args, kwargs = pickle.loads(payload)
    except BaseException as error:
        return _raised(error, "the call could not be rebuilt on the rank: ")
    payload = b""
    try:
        _set_up_process_group(call)
        result = fn(*args, **kwargs)
    except BaseException as error:
        # Without this function's own frame.
        return _raised(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
    try:
        return protocol.Outcome(returned=True, pickled=dumps_result(result))
    except BaseException as error:
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        return _raised(error, f"the result, a {kind}, cannot be pickled: ")


def _raised(error: BaseException, prefix: str = "") -> protocol.Outcome:
    linecache.checkcache()
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickled: bytes | None = dumps_result(error)
    except BaseException:
        pickled = None
    summary = traceback.format_exception_only(type(error), error)[0].split("\n")[0]
    return protocol.Outcome(returned=False, pickled=pickled, title=prefix + summary, text=text)


def _set_up_process(call: protocol.Call) -> None:
    """Make the process look like the caller's, whatever the previous call did to it."""
    environment = {
        **call.environment,
        "RANK": str(call.rank),
        "LOCAL_RANK": str(call.rank),
        "WORLD_SIZE": str(call.world_size),
        "LOCAL_WORLD_SIZE": str(call.world_size),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": _loopback_interface(),
    }
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    if call.directory is not None:
        os.chdir(call.directory)
    sys.path[:] = call.sys_path
    protocol.set_this_rank(call.rank)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_flush_denormal(False)
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        numpy.random.seed(0)


def _set_up_process_group(call: protocol.Call) -> None:
    dist.init_process_group(
        call.pg_backend,
        store=dist.FileStore(call.store, call.world_size),  # type: ignore[attr-defined]
        rank=call.rank,
        world_size=call.world_size,
        timeout=timedelta(seconds=call.pg_timeout),
    )


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next(name for name in ("lo", "lo0") if name in names)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the test
            stream.flush()
