"""The command `nki-parallel-attn`; each subcommand is one function that adds its parser and one that runs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nki_parallel_attn.errors import ArgumentError, NkiParallelAttnError
from nki_parallel_attn.plan_feasibility import RANK_ORDERS
from nki_parallel_attn.topology.kv_layout import Contiguous, Interleaved, KVLayout, RoundRobin
from nki_parallel_attn.topology.platforms import LNC_VALUES, TARGETS


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status, 2 for arguments that cannot be."""
    parser = argparse.ArgumentParser(prog="nki-parallel-attn", description="KV-sharded attention for AWS Trainium.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(commands)
    _add_profile(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except NkiParallelAttnError as error:
        print(f"nki-parallel-attn {arguments.command}: {error}", file=sys.stderr)
        return 2
    return status


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="print a sharding plan",
        description="Print how heads and KV cache are dealt over ranks, or say which values would be feasible.",
    )
    shape = parser.add_argument_group("model")
    shape.add_argument("--q-heads", type=int, required=True)
    shape.add_argument("--kv-heads", type=int, required=True)
    shape.add_argument("--head-dim", type=int, default=128, help="(default: 128)")
    shape.add_argument("--layers", type=int, default=1, help="(default: 1)")
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--world-size", type=int, required=True)
    ranks.add_argument("--tp", type=int, help="ranks of one model copy (default: the world)")
    ranks.add_argument("--kvp", type=int, default=1, help="ranks that share KV for prefill")
    ranks.add_argument("--kvdp", type=int, default=1, help="ranks that share KV by batch for decoding")
    ranks.add_argument("--cp", type=int, default=1, help="ranks that share KV by sequence for decoding")
    ranks.add_argument("--rank-order", choices=RANK_ORDERS, default="consecutive")
    ranks.add_argument("--lnc", type=int, choices=LNC_VALUES, default=2, help="physical cores of a rank (default: 2)")
    ranks.add_argument("--target", choices=TARGETS, default="trn2", help="(default: trn2)")
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--kv-layout",
        type=_layout,
        default=RoundRobin(),
        metavar="LAYOUT",
        help="round_robin (default), contiguous or interleaved:TOKENS",
    )
    cache.add_argument("--block-size", type=int, default=128, help="tokens of a cache block (default: 128)")
    cache.add_argument("--seg-size", type=int, help="tokens of a prefill segment (default: kvp x block size)")
    cache.add_argument("--max-seq-len", type=int, help="tokens of one sequence; adds tokens, blocks and bytes")
    cache.add_argument("--batch", type=int, help="sequences (default: kvdp, the fewest)")
    cache.add_argument("--dtype", default="bfloat16", help="of the cache (default: bfloat16)")
    parser.add_argument("--json", action="store_true", help="the plan as JSON, which ShardingPlan.from_json reads")
    parser.set_defaults(run=_run_plan)


def _run_plan(arguments: argparse.Namespace) -> int:
    import torch

    from nki_parallel_attn.plan import ShardingPlan
    from nki_parallel_attn.topology.types import AttentionShape

    dtype = getattr(torch, arguments.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError("dtype", arguments.dtype, "the name of a torch dtype, such as bfloat16 or float8_e4m3fn")
    plan = ShardingPlan(
        AttentionShape(arguments.q_heads, arguments.kv_heads, arguments.head_dim, layers=arguments.layers),
        world_size=arguments.world_size,
        tp=arguments.tp,
        kvdp=arguments.kvdp,
        cp=arguments.cp,
        kvp=arguments.kvp,
        kv_layout=arguments.kv_layout,
        block_size=arguments.block_size,
        seg_size=arguments.seg_size,
        lnc=arguments.lnc,
        target=arguments.target,
        rank_order=arguments.rank_order,
        max_seq_len=arguments.max_seq_len,
    )
    print(plan.to_json() if arguments.json else plan.table(batch=arguments.batch, dtype=dtype))
    return 0


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "profile",
        help="model the time of an NKI kernel",
        description="Run a kernel through the cost model, without data, and print where the modelled time goes.",
    )
    parser.add_argument("kernel", metavar="MODULE:KERNEL", help="or FILE.py:KERNEL")
    parser.add_argument(
        "--shape",
        dest="arguments",
        nargs="+",
        action="extend",
        default=[],
        metavar="[NAME=]VALUE",
        help="the kernel's arguments in order: DTYPE[DIM,DIM,...] for tensors, Python literals for the rest",
    )
    parser.add_argument("--world-size", type=int, help="ranks, all with the same arguments")
    parser.add_argument("--representative", type=int, metavar="RANK", help="run this rank alone, its peers like it")
    parser.add_argument("--lnc", type=int, choices=LNC_VALUES)
    parser.add_argument("--target", choices=TARGETS, default="trn2")
    parser.add_argument("--unknown-value", type=int, default=0, help="what numbers read from tensors are (default: 0)")
    parser.add_argument("--trace", metavar="FILE", help="write every instruction, for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.set_defaults(run=_run_profile)


@contextmanager
def _simulator_as_nki() -> Iterator[None]:
    """Kernels that ask for NKI, ours or others', get the simulator, whatever is installed."""
    from nki_parallel_attn.sim import as_nki

    variable = "NKI_PARALLEL_ATTN_BACKEND"
    previous = os.environ.get(variable)
    os.environ[variable] = "sim"
    try:
        with as_nki():
            yield
    finally:
        if previous is None:
            del os.environ[variable]
        else:
            os.environ[variable] = previous


def _run_profile(arguments: argparse.Namespace) -> int:
    from nki_parallel_attn.sim import profile
    from nki_parallel_attn.sim.kernel_spec import check_call, load_kernel, parse_arguments

    whole_world = arguments.world_size is not None and arguments.representative is None
    with _simulator_as_nki():
        try:
            positional, named = parse_arguments(arguments.arguments)
            if whole_world and positional and named:
                raise ValueError("with --world-size, pass all arguments in order or all by name")
            kernel = load_kernel(arguments.kernel)
            profiled = profile(
                kernel,
                world_size=arguments.world_size,
                lnc=arguments.lnc,
                target=arguments.target,
                representative=False if arguments.representative is None else arguments.representative,
                trace=arguments.trace is not None,
                unknown_value=arguments.unknown_value,
            )
            check_call(kernel, positional, named)
        except ValueError as error:
            print(f"nki-parallel-attn profile: {error}", file=sys.stderr)
            return 2
        if whole_world:
            report = profiled([named or tuple(positional)] * arguments.world_size)
        else:
            report = profiled(*positional, **named)
    print(report.to_json() if arguments.json else report)
    if arguments.trace is not None:
        report.write_trace(arguments.trace)
    return 0


def _layout(text: str) -> KVLayout:
    """round_robin, contiguous or interleaved:TOKENS."""
    name, _, tokens = text.partition(":")
    if name == "interleaved" and tokens.isdigit():
        return Interleaved(int(tokens))
    layouts: dict[str, KVLayout] = {"round_robin": RoundRobin(), "contiguous": Contiguous()}
    if text not in layouts:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected round_robin, contiguous or interleaved:TOKENS")
    return layouts[text]


if __name__ == "__main__":
    sys.exit(main())
