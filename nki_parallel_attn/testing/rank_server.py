"""The rank server: a process that has torch loaded and forks ranks from itself.

It talks with the caller in lines of JSON over a socket: `fork` (with three file descriptors: connection, stdout,
stderr) and `signal` come in; `ready`, `failed`, `forked` and `exited` go out. It reaps the ranks, so that a death is
reported at once and a signal never reaches a stranger's process id. When the caller is gone, however that came about,
the ranks are ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import deque
from multiprocessing.connection import Connection


def main(control_fd: int, directory: str, preload: list[str]) -> None:
    """Load the modules `preload`, then serve until the caller closes its end; `directory` is removed at the end."""
    control = socket.socket(fileno=control_fd)
    try:
        for name in preload:
            importlib.import_module(name)
        from nki_parallel_attn.testing import rank_worker  # noqa: F401  (loaded here, so that no rank has to)
    except BaseException:
        _send(control, event="failed", text=traceback.format_exc())
        return
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, the pages that the ranks share
    server = _Server(control, directory)
    _send(control, event="ready")
    try:
        server.serve()
    finally:
        server.end_ranks()
        shutil.rmtree(directory, ignore_errors=True)


class _Server:
    def __init__(self, control: socket.socket, directory: str) -> None:
        self.control = control
        self.directory = directory
        self.ranks: set[int] = set()
        self.wakeup, self.wakeup_end = socket.socketpair()
        for end in (self.wakeup, self.wakeup_end):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup_end.fileno())

    def serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.control, selectors.EVENT_READ)
        selector.register(self.wakeup, selectors.EVENT_READ)
        received, fds = b"", deque[int]()
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if self.wakeup in ready:
                self.wakeup.recv(4096)
                self.reap()
            if self.control in ready:
                data, new_fds, _, _ = socket.recv_fds(self.control, 4096, 3)
                if not data:
                    selector.close()
                    return
                fds.extend(new_fds)
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    command = json.loads(line)
                    if command["command"] == "fork":
                        self.fork(fds.popleft(), fds.popleft(), fds.popleft())
                    elif command["pid"] in self.ranks:
                        os.kill(command["pid"], command["signal"])

    def fork(self, connection: int, stdout: int, stderr: int) -> None:
        pid = os.fork()
        if pid == 0:
            self.become_rank(connection, stdout, stderr)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self.ranks.add(pid)
        for fd in (connection, stdout, stderr):
            os.close(fd)
        _send(self.control, event="forked", pid=pid)

    def become_rank(self, connection: int, stdout: int, stderr: int) -> None:
        status = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self.control, self.wakeup, self.wakeup_end):
                end.close()
            for source, target in ((stdout, 1), (stderr, 2)):
                os.dup2(source, target)
                os.close(source)
            from nki_parallel_attn.testing import rank_worker

            rank_worker.serve(Connection(connection), os.path.join(self.directory, f"{os.getpid()}.stacks"))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def reap(self) -> None:
        for pid in list(self.ranks):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped == 0:
                continue
            self.ranks.discard(pid)
            # What the rank started itself. multiprocessing's resource tracker ignores SIGTERM and frees shared memory.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGTERM)
            _send(self.control, event="exited", pid=pid, status=os.waitstatus_to_exitcode(status))

    def end_ranks(self) -> None:
        for pid in self.ranks:
            os.kill(pid, signal.SIGKILL)
        while self.ranks:
            self.reap()
            time.sleep(0.005)


def _send(control: socket.socket, **event: object) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.sendall(json.dumps(event).encode() + b"\n")
