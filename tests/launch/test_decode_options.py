"""The decoding launcher's main function on a pool of ranks: strategies, models, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from glassllm_checkpoint import save_as_huggingface

from nki_parallel_attn.errors import RankFailedError
from nki_parallel_attn.integrations.glassllm import load_glassllm
from nki_parallel_attn.testing import run_ranks

ROOT = Path(__file__).parents[2]


def run_main(arguments: list[str], transport: str = "", damaged: bool = False) -> int:
    """main() on this rank; `damaged`: rank 1 has another weight."""
    import os
    import sys

    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "launch"))
    import decode
    from rank_process import Job

    if transport:
        os.environ["NKI_PARALLEL_ATTN_TRANSPORT"] = transport
    sys.argv = ["decode.py", *arguments]
    original = decode.load_model

    def load(options: Any, batch: int) -> Any:
        model = original(options, batch)
        if damaged and dist.get_rank() == 1:
            model.decoder.layers[2].self_attn.k_proj.weight.mul_(-1)
        return model

    decode.load_model = load
    try:
        return decode.main(Job(dist.get_rank(), dist.get_world_size(), under_torchrun=True, store=dist.HashStore()))
    finally:
        decode.load_model = original


def reported(ranks: int, tmp_path: Path, *arguments: str, transport: str = "") -> dict[str, Any]:
    """Run main() on all ranks and return its report: passed on every rank, all bytes those of the plan."""
    path = tmp_path / "report.json"
    assert run_ranks(run_main, ranks, args=([*arguments, "--report", str(path)], transport)) == [0] * ranks
    report: dict[str, Any] = json.loads(path.read_text())
    for figures in (
        report["kv_cache_bytes_per_rank"],
        report["redistributed_bytes"],
        report["sent_bytes_per_token"],
        *report["sent_bytes_per_step"].values(),
    ):
        assert figures["measured"] == figures["planned"], report
    return report


@pytest.mark.parametrize(
    ("ranks", "arguments", "sequences"),
    [
        (2, ["--steps", "6", "--batch", "3"], 3),
        (4, ["--strategy", "kvdp", "--steps", "4"], 4),
        (2, ["--strategy", "kvdp", "--steps", "4", "--prompt", "Alice was", "--prompt", "The Cat"], 2),
        (4, ["--strategy", "kvdp+cp", "--steps", "4", "--batch", "6", "--block-size", "8"], 6),
        (2, ["--synthetic", "gpt-oss-120b", "--seq-len", "70", "--steps", "3"], 1),
    ],
)
def test_strategies(ranks: int, arguments: list[str], sequences: int, tmp_path: Path) -> None:
    report = reported(ranks, tmp_path, *arguments)
    assert len(report["comparison"]["ours"]) == len(report["prompt_tokens"]) == sequences
    moved = report["redistributed_bytes"]["measured"]
    assert (moved > 0) == ("--strategy" in arguments)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["cp", "kvdp", "kvdp+cp"])
def test_a_hundred_steps_of_eight_sequences(strategy: str, tmp_path: Path) -> None:
    report = reported(4, tmp_path, "--strategy", strategy, "--batch", "8")
    assert report["comparison"]["equal"] == 8 * 101 and len(set(report["prompt_tokens"])) == 8


def test_over_gloo(tmp_path: Path) -> None:
    arguments = ["--strategy", "kvdp+cp", "--steps", "3", "--batch", "2"]
    assert reported(4, tmp_path, *arguments, transport="gloo")["transport"] == "gloo"


def test_other_tokens_fail_on_every_rank(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(run_main, 2, args=(["--steps", "10"], "", True)) == [1, 1]
    printed = capfd.readouterr().out
    assert "FAIL: " in printed and "first differences: sequence 0 at token" in printed and "PASS" not in printed


def test_redistribution_is_a_stage(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(run_main, 4, args=(["--strategy", "kvdp", "--steps", "1"],)) == [0] * 4
    printed = capfd.readouterr().out
    assert "redistribute the cache" in printed and "K and V that change owner" in printed


def test_checkpoint_against_transformers(tmp_path: Path) -> None:
    save_as_huggingface(load_glassllm(), tmp_path / "model")
    report = reported(2, tmp_path, "--model", str(tmp_path / "model"), "--prompt", "The Cat looked", "--steps", "20")
    assert report["comparison"]["reference"] == "transformers' own generation"
    package = reported(2, tmp_path, "--prompt", "The Cat looked", "--steps", "20")
    assert report["comparison"]["ours"] == package["comparison"]["theirs"]


def test_float8_cache(tmp_path: Path) -> None:
    """Equal to the unsharded model over equally rounded K and V, and a quarter of the bytes."""
    report = reported(2, tmp_path, "--kv-dtype", "fp8", "--steps", "30")
    assert "float8" in report["comparison"]["reference"] and report["comparison"]["equal"] == 31
    assert report["unquantised"]["reference"] == "glassllm's own generation"
    assert report["kv_cache_bytes_per_rank"]["measured"] == 2 * 4 * 64 * 2 * 32


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (2, ["--strategy", "dp"], "invalid choice"),
        (2, ["--backend", "sim"], "--backend: got sim, expected torch"),
        (2, ["--strategy", "kvdp", "--batch", "3"], "kvdp divides batch"),
        (2, ["--strategy", "kvdp+cp"], "an even number of ranks, at least 4"),
        (2, ["--steps", "128"], "at most the model's context of 128 in all"),
        (2, ["--steps", "120", "--prompt", "The Cat looked at the clock in the hall"], "context of 128 in all"),
        (2, ["--prompt", ""], "at least one token"),
        (2, ["--prompt", "a", "--batch", "2"], "the number of prompts"),
        (2, ["--block-size", "129"], "at most the 128 tokens"),
        (2, ["--seq-len", "8"], "--synthetic beside it"),
        (2, ["--synthetic", "llama3-8b", "--prompt", "a"], "none with --synthetic"),
        (2, ["--report", "no-such-folder/out.json"], "a folder that exists"),
        (2, ["--model", "/nowhere"], "config.json"),
        (3, [], "tp divides q_heads"),
    ],
)
def test_refused_on_every_rank(ranks: int, arguments: list[str], message: str) -> None:
    with pytest.raises(RankFailedError, match=message) as caught:
        run_ranks(run_main, ranks, args=(arguments,))
    assert set(caught.value.exceptions) == set(range(ranks))
