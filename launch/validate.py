"""Validate a backend: run the operations over layouts, ranks, LNC and dtypes, and compare with dense float64 attention.

    python launch/validate.py                                            the simulator, ranks started here
    torchrun --nproc-per-node 8 launch/validate.py --backend neuron      on a Trn2 or Trn3 instance
    python launch/validate.py --help

The cases are nki_parallel_attn/validation/; the options are in validate_options.py, the two ways to run in
validate_here.py and validate_world.py, what is shown and written in validate_table.py and validate_report.py.
docs/running_on_trainium.md explains the output.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from rich.console import Console

from neuron_device import neuron_device
from nki_parallel_attn.backends import BACKEND_VARIABLE
from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.nki import require_nki
from rank_process import Job, run_as_rank
from validate_here import run_here
from validate_options import check_files, make_parser, parse, selection
from validate_report import Record
from validate_table import Display
from validate_world import referee, run_as_peer


def main(job: Job) -> int:
    """Exit status: 0 when a case passed and none failed, else 1."""
    options = parse(sys.argv[1:])
    console = Console(quiet=job.rank > 0, highlight=False, width=None if sys.stdout.isatty() else 120)
    if options.help:
        console.print(make_parser().format_help(), markup=False)
        return 0
    cases = selection(options, job.world_size if job.under_torchrun else None).cases()
    if options.list:
        for case in cases:
            console.print(case.name, markup=False, soft_wrap=True)
        return 0
    if job.rank == 0:
        check_files(options)
    device, group = _prepare(options, job)
    settings = {
        "backend": options.backend,
        "target": options.target,
        "seed": options.seed,
        "timeout": options.timeout,
        "device": str(device),
        "world": job.world_size if job.under_torchrun else "started for each case",
    }
    record = Record(cases, settings, options.junit, options.json)
    display = Display(record, console)
    console.print(f"{len(cases)} cases: " + ", ".join(f"{name} {value}" for name, value in settings.items()))
    start = time.perf_counter()
    with display:
        if not job.under_torchrun:
            run_here(record, display, options.fail_fast)
        elif job.rank:
            job.init_process_group(group)
            run_as_peer(job, record, device)
            return _verdict(job)
        else:
            job.init_process_group(group)
            with referee(job, record, display, options.fail_fast):
                run_as_peer(job, record, device)
    record.write()
    display.conclude(time.perf_counter() - start)
    if job.under_torchrun:
        job.store.set("validate/passed", str(int(record.passed)))
    return 0 if record.passed else 1


def _prepare(options: argparse.Namespace, job: Job) -> tuple[torch.device, str]:
    """The device of the tensors and the process group's backend.

    Raises:
        ArgumentError: on device, but not under torchrun.
        BackendUnavailableError: a package that the backend needs is missing.
    """
    # What kernels are built with, here and in the ranks that are started: also where the nki package is installed.
    os.environ[BACKEND_VARIABLE] = options.backend
    if options.backend != "neuron":
        return torch.device("cpu"), "gloo"
    require_nki()
    if not job.under_torchrun:
        start = "torchrun --nproc-per-node N launch/validate.py --backend neuron"
        raise ArgumentError("--backend", "neuron", f"a torchrun job, one rank per logical core: {start}")
    return neuron_device()


def _verdict(job: Job) -> int:
    """Rank 0's, so that all ranks end with the same exit status."""
    job.store.wait(["validate/passed"])
    return 0 if job.store.get("validate/passed") == b"1" else 1


if __name__ == "__main__":
    run_as_rank(main, "validate", process_group=False)
