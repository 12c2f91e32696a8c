"""Posts between the ranks of one Linux host: an anonymous file (memfd) per rank, which its owner writes and peers read.

A post is "<number> <text>" under a length and a checksum, in one of two places by the parity of its number. Readers
poll: a post that is not there, or that they catch half written, fails the checksum and is read again, so that no lock
and no memory barrier is needed on any architecture, and a rank that stays away leaves nothing pending. The kernel frees
the file with the last process that has it open, however it ends.
"""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import asdict, dataclass
from zlib import crc32

from nki_parallel_attn.kernels.shared_memory_torch import process_identity, start_time

# Two places for posts, as far apart as no post is long; the file has holes and takes memory for what is written.
PLACE_BYTES = 1 << 24
HEADER_BYTES = 8  # length and checksum, 4 bytes each
READ_BYTES = 4096
NONCE_AT = 2 * PLACE_BYTES


@dataclass(frozen=True)
class MailboxAddress:
    """Where a peer on this host finds a mailbox: `pid` of its owner, which started at `started`, and the open file."""

    boot: str
    pids: str
    pid: int
    started: str
    file: int
    nonce: str


class OwnMailbox:
    """What this rank posts.

    Raises:
        OSError: the system has no anonymous files or no /proc.
    """

    def __init__(self) -> None:
        identity = process_identity()
        self._file = os.memfd_create("nki_parallel_attn_posts")
        weakref.finalize(self, os.close, self._file)
        nonce = os.urandom(16)
        os.pwrite(self._file, nonce, NONCE_AT)
        address = MailboxAddress(**identity, file=self._file, nonce=nonce.hex())
        self.address = json.dumps(asdict(address), separators=(",", ":"))

    def write(self, number: int, text: str) -> None:
        """Replace the post before the last."""
        post = f"{number} {text}".encode()
        header = len(post).to_bytes(4, "little") + crc32(post).to_bytes(4, "little")
        os.pwrite(self._file, header + post, number % 2 * PLACE_BYTES)


class PeerMailbox:
    """What a peer posts; made from its `OwnMailbox.address`, JSON without spaces, or "null".

    Raises:
        OSError: the peer has none, runs on another host or in another container, or its file cannot be opened.
    """

    def __init__(self, address: str) -> None:
        if address == "null":
            raise OSError("the peer has no mailbox")
        self._of = MailboxAddress(**json.loads(address))
        own = process_identity()
        # Process numbers mean something within one boot of one host and one namespace only.
        if (own["boot"], own["pids"]) != (self._of.boot, self._of.pids):
            raise OSError("another host, or another container")
        self._file = os.open(f"/proc/{self._of.pid}/fd/{self._of.file}", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        if os.pread(self._file, 16, NONCE_AT).hex() != self._of.nonce:
            raise OSError("not the file that the peer made")

    def read(self, number: int) -> tuple[int, str] | None:
        """This post, or the later one that has replaced it, with its number; None while it is not there."""
        place = number % 2 * PLACE_BYTES
        found = os.pread(self._file, READ_BYTES, place)
        length = int.from_bytes(found[:4], "little")
        post = found[HEADER_BYTES : HEADER_BYTES + length]
        if len(post) < length:
            post += os.pread(self._file, length - len(post), place + HEADER_BYTES + len(post))
        if not length or crc32(post) != int.from_bytes(found[4:HEADER_BYTES], "little"):
            return None
        of, _, text = post.decode().partition(" ")
        return (int(of), text) if int(of) >= number else None

    def owner_died(self) -> bool:
        """Whether the process that writes here has ended."""
        return start_time(self._of.pid) != self._of.started
