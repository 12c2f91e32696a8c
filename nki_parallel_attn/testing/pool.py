"""The caller's side of the rank processes: starts, watches and ends them, and relays what they print.

There is at most one pool in a process. It grows to the largest world that was asked for, a smaller world uses its first
ranks, and of an idle pool MAX_IDLE_RANKS are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from nki_parallel_attn.errors import RankFailedError, RankTimeoutError
from nki_parallel_attn.testing import protocol

START_TIMEOUT = 120.0  # seconds for a rank server to load torch on a busy machine
MAX_IDLE_RANKS = 16  # about 10 MB each that they do not share, and what the tests left there

_SERVER = (
    "import json, sys; fd, directory, preload, path = map(json.loads, sys.argv[1:]); sys.path[:] = path; "
    "from nki_parallel_attn.testing.rank_server import main; main(fd, directory, preload)"
)


class RankProcess:
    """One rank process, as its caller sees it.

    Attributes:
        exit_status: None while it lives; the exit code; minus the signal's number.
    """

    def __init__(self, rank: int, pid: int, connection: Connection[bytes, bytes], outputs: list[_Output], stacks: Path):
        self.rank = rank
        self.pid = pid
        self.connection = connection
        self.outputs = outputs
        self.stacks = stacks
        self.exit_status: int | None = None

    def send(self, *messages: bytes) -> None:
        """Send; when the rank is gone its exit status tells, not this."""
        with contextlib.suppress(OSError):
            for message in messages:
                self.connection.send_bytes(message)

    def read_stacks(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self.stacks.read_text(errors="replace")
        return ""

    def close(self) -> None:
        self.connection.close()
        for output in self.outputs:
            output.close()


class RankPool:
    """Rank processes forked by one rank server; ranks[r] serves as rank r."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.directory = Path(tempfile.mkdtemp(prefix="nki-parallel-attn-ranks-"))
        self.ranks: list[RankProcess] = []
        self._received = b""
        self._replies: deque[dict[str, Any]] = deque()
        self._stores = 0
        self._control, server_end = socket.socketpair()
        preload = ["torch", "torch.distributed", "cloudpickle", *(["pytest"] if "pytest" in sys.modules else [])]
        arguments = [server_end.fileno(), str(self.directory), preload, sys.path]
        with server_end, open(self.directory / "server.log", "wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVER, *map(json.dumps, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[server_end.fileno()],
                start_new_session=True,  # Ctrl-C is for the caller, who ends the ranks
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        try:
            self._wait_for("ready")
        except BaseException:
            self.close()
            raise

    def resize(self, world_size: int) -> None:
        """Have `world_size` living ranks or more; all are replaced when one died since the last call."""
        self.poll(0)
        if any(rank.exit_status is not None for rank in self.ranks):
            self.kill()
        while len(self.ranks) < world_size:
            self._fork()

    def shrink(self) -> None:
        """End the idle ranks beyond MAX_IDLE_RANKS."""
        while len(self.ranks) > MAX_IDLE_RANKS:
            self.ranks.pop().close()

    def new_store(self) -> Path:
        """A path for the rendezvous of one call; nobody else knows it."""
        self._stores += 1
        return self.directory / f"store-{self._stores}"

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:
        """Wait for something to happen: relays output, records exits, and returns the messages as (rank, message)."""
        connections = {rank.connection: rank for rank in self.ranks if not rank.connection.closed}
        outputs = [output for rank in self.ranks for output in rank.outputs if output.is_open]
        waitable: list[Any] = [*connections, *outputs, self._control]
        ready: list[Any] = wait(waitable, max(timeout, 0.0))
        for output in outputs:
            if output in ready:
                output.relay()
        messages = []
        for connection, rank in connections.items():
            if connection in ready:
                try:
                    messages.append((rank.rank, connection.recv_bytes()))
                except (EOFError, OSError):
                    connection.close()
        if self._control in ready:
            self._read_events()
        return messages

    def relay_output(self) -> None:
        """Relay everything that the ranks have printed so far."""
        for rank in self.ranks:
            for output in rank.outputs:
                output.relay_rest()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    def stacks(self, ranks: Iterable[int], timeout: float = 2.0) -> dict[int, str]:
        """The Python stacks of these ranks as faulthandler writes them; empty when one does not answer in `timeout`."""
        before = {r: self.ranks[r].read_stacks() for r in ranks}
        for r in before:
            self._send(command="signal", pid=self.ranks[r].pid, signal=int(protocol.STACK_SIGNAL))
        texts, deadline = dict(before), time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.poll(0)
            time.sleep(0.1)
            previous, texts = texts, {r: self.ranks[r].read_stacks() for r in before}
            if texts == previous and all(len(texts[r]) > len(before[r]) for r in before):
                break  # written, and no longer growing
        return {r: text[len(before[r]) :] for r, text in texts.items()}

    def kill(self) -> None:
        """End every rank now; the rank server stays, so that new ranks are cheap."""
        for rank in self.ranks:
            if rank.exit_status is None:
                self._send(command="signal", pid=rank.pid, signal=int(signal.SIGKILL))
        deadline = time.monotonic() + 10.0
        while any(rank.exit_status is None for rank in self.ranks) and time.monotonic() < deadline:
            self.poll(0.1)
        self.relay_output()
        for rank in self.ranks:
            rank.close()
        self.ranks = []

    def close(self) -> None:
        """End the ranks and the rank server."""
        if os.getpid() != self.owner:  # a copy in a forked process: not ours to end
            return
        self._control.close()
        try:
            self._server.wait(10.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        for rank in self.ranks:
            rank.close()
        self.ranks = []
        shutil.rmtree(self.directory, ignore_errors=True)

    def _fork(self) -> None:
        connection, rank_end = Pipe()
        stdout, stderr = _Output("stdout", len(self.ranks)), _Output("stderr", len(self.ranks))
        try:
            fds = [rank_end.fileno(), stdout.write_end, stderr.write_end]
            try:
                socket.send_fds(self._control, [b'{"command": "fork"}\n'], fds)
            except OSError:
                self._server_lost()
            pid = self._wait_for("forked")["pid"]
        finally:
            rank_end.close()
            for output in (stdout, stderr):
                os.close(output.write_end)
        stacks = self.directory / f"{pid}.stacks"
        self.ranks.append(RankProcess(len(self.ranks), pid, connection, [stdout, stderr], stacks))

    def _send(self, **command: object) -> None:
        with contextlib.suppress(OSError):  # a lost server shows when its answers are read
            self._control.sendall(json.dumps(command).encode() + b"\n")

    def _wait_for(self, event: str) -> dict[str, Any]:
        deadline = time.monotonic() + START_TIMEOUT
        while not self._replies:
            if not wait([self._control], max(deadline - time.monotonic(), 0.0)):
                raise RankTimeoutError(f"the rank server gave no answer ({event}) within {START_TIMEOUT:.0f} s")
            self._read_events()
        reply = self._replies.popleft()
        if reply["event"] == "failed":
            raise RankFailedError(f"the rank server could not start\n{reply['text']}")
        return reply

    def _read_events(self) -> None:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._control.recv(65536)
        if not data:
            self._server_lost()
        *lines, self._received = (self._received + data).split(b"\n")
        for event in map(json.loads, lines):
            if event["event"] == "exited":
                for rank in self.ranks:
                    if rank.pid == event["pid"]:
                        rank.exit_status = event["status"]
            else:
                self._replies.append(event)

    def _server_lost(self) -> NoReturn:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        log = (self.directory / "server.log").read_text(errors="replace")
        raise RankFailedError(f"the rank server died (exit status {self._server.wait(10.0)})\n{log}")


class _Output:
    """What one rank prints to stdout or stderr, passed on line by line to the stream the caller has there now."""

    def __init__(self, stream: str, rank: int) -> None:
        self.stream = stream
        self.prefix = f"[rank {rank}] "
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self.is_open = True
        self._line = b""

    def fileno(self) -> int:
        return self.read_end

    def relay(self) -> bool:
        """Pass on one chunk of what is there; False when there was nothing."""
        try:
            data = os.read(self.read_end, 65536)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        *lines, self._line = (self._line + data).split(b"\n")
        self._write(lines)
        return True

    def relay_rest(self) -> None:
        """Pass on all that is there, an unfinished line included."""
        while self.is_open and self.relay():
            pass
        if self._line:
            self._write([self._line])
            self._line = b""

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            os.close(self.read_end)

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            text = "".join(f"{self.prefix}{line.decode(errors='replace')}\n" for line in lines)
            getattr(sys, self.stream).write(text)
