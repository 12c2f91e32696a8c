"""The collectives of kvp_prefill.py's case alone, over shared memory and over gloo.

    python benchmarks/transports.py

S = 8192, bfloat16, 8 query heads of 128 over the ranks. Receivers copy what they get, as a stand-in for using it.
"""

from __future__ import annotations

import os
import statistics
from functools import partial

import torch
from measure import Actions, Ranks, time_rounds

from nki_parallel_attn.kernels.collectives_torch import TRANSPORT_VARIABLE, exchange_for

TRANSPORTS = ("shm", "gloo")
DIGESTS = 100


def set_up(transport: str) -> Actions:
    os.environ[TRANSPORT_VARIABLE] = transport
    exchange = exchange_for()
    assert exchange.transport == transport
    own = torch.randn(8 // exchange.size, 8192, 128).bfloat16()
    received = torch.empty_like(own)

    def all_gather() -> None:
        with exchange.round() as opened:
            opened.all_gather(own)

    def all_to_all() -> None:
        with exchange.round() as opened:
            outbox = opened.outbox(own.shape, own.dtype)
            for slot in outbox:
                slot.copy_(own)
            (parts,) = opened.all_to_all(outbox)
            for part in parts:
                received.copy_(part)

    def digests() -> None:
        for _ in range(DIGESTS):
            exchange.exchange_digest(bytes(40))

    return {"all_gather": all_gather, "all_to_all": all_to_all, "exchange_digest": digests}


def main() -> None:
    print(f"{'ranks':6}{'':18}{'shm, ms':>10}{'gloo, ms':>10}   medians of 15 rounds")
    for size in (2, 4):
        with Ranks(size, set_up, "shm") as shm, Ranks(size, set_up, "gloo") as gloo:
            for action in ("all_gather", "all_to_all", "exchange_digest"):
                timed = {"shm": partial(shm.seconds, action), "gloo": partial(gloo.seconds, action)}
                seconds = time_rounds(timed, 15)
                calls = DIGESTS if action == "exchange_digest" else 1
                medians = [1e3 * statistics.median(seconds[name]) / calls for name in TRANSPORTS]
                print(f"{size:<6}{action:18}{medians[0]:10.2f}{medians[1]:10.2f}")


if __name__ == "__main__":
    main()
