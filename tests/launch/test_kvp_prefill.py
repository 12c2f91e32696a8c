"""The launcher's main function on a pool of ranks: options, models, and what it refuses."""

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


def run_main(arguments: list[str], damage: str = "") -> int:
    """main() on this rank; `damage` "tolerance" makes it zero, "text" gives rank 1 another prompt."""
    import sys

    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "launch"))
    import kvp_prefill
    import prefill_report
    from rank_process import Job

    sys.argv = ["kvp_prefill.py", *arguments]
    if damage == "text" and dist.get_rank() == 1:
        sys.argv[-1] = "Take 2 of them"
    original = prefill_report.logits_tolerance
    if damage == "tolerance":
        prefill_report.logits_tolerance = lambda config, reference: 0.0
    try:
        job = Job(dist.get_rank(), dist.get_world_size(), under_torchrun=True, store=dist.HashStore())
        return kvp_prefill.main(job)
    finally:
        prefill_report.logits_tolerance = original


def reported(ranks: int, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run main() on all ranks and return its report; it has passed on every rank."""
    path = tmp_path / "report.json"
    assert run_ranks(run_main, ranks, args=([*arguments, "--report", str(path)],)) == [0] * ranks
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_checkpoint_gives_the_tokens_of_the_package(tmp_path: Path) -> None:
    save_as_huggingface(load_glassllm(), tmp_path / "model", shards=2)
    theirs = reported(4, tmp_path)["comparison"]
    ours = reported(4, tmp_path, "--model", str(tmp_path / "model"), "--apc")["comparison"]
    assert ours["reference"] == "the dense reference decoder" and theirs["reference"] == "glassllm's own forward"
    assert [token["token_id"] for token in ours["ours"]] == [token["token_id"] for token in theirs["theirs"]]
    assert [token["text"] for token in ours["ours"]] == [token["text"] for token in theirs["theirs"]]


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, ["--prompt", "Alice"]),
        (4, ["--prompt", "Alice was beginning to", "--apc"]),
        (4, ["--block-size", "8", "--seg-size", "24"]),
        (4, ["--sliding-window", "1"]),
        (4, ["--sliding-window", "17", "--apc"]),
        (2, ["--synthetic", "gpt-oss-120b", "--seq-len", "200"]),
        (4, ["--synthetic", "llama3-8b", "--seq-len", "256", "--sliding-window", "100"]),
    ],
)
def test_options(ranks: int, arguments: list[str], tmp_path: Path) -> None:
    comparison = reported(ranks, tmp_path, *arguments)["comparison"]
    assert 0 < comparison["deviation"] <= comparison["tolerance"]


def test_prompt_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The Cat looked at the clock")
    report = reported(2, tmp_path, "--prompt-file", str(tmp_path / "text"))
    assert report["calls"] == [
        {"start": 0, "stop": len(load_glassllm().encode("The Cat looked at the clock")), "apc_mode": False}
    ]


def test_deviation_beyond_the_tolerance_fails_on_every_rank(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(run_main, 4, args=([], "tolerance")) == [1] * 4
    assert "FAIL" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq-len", "8"], "--synthetic beside it"),
        (["--report", "no-such-folder/out.json"], "a folder that exists"),
        (["--synthetic", "llama3-8b", "--prompt", "a"], "none with --synthetic"),
        (["--apc", "--layout", "contiguous"], "kvp_group_size > 0"),
        (["--layout", "spiral"], "invalid choice"),
        (["--block-size", "0"], "not a positive integer"),
        (["--prompt", ""], "at least one token"),
        (["--prompt", "long " * 200], "context of 128"),
        (["--model", "/nowhere"], "config.json"),
        (["--block-size", "24", "--seg-size", "50"], "block_size divides seg_size"),
    ],
)
def test_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(RankFailedError, match=message):
        run_ranks(run_main, 2, args=(arguments,))


def test_prompt_file_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    with pytest.raises(RankFailedError, match="UTF-8"):
        run_ranks(run_main, 2, args=(["--prompt-file", str(tmp_path / "text")],))


def test_ranks_that_read_other_text() -> None:
    with pytest.raises(RankFailedError, match=r"ranks \[1\] read other tokens than rank 0") as caught:
        run_ranks(run_main, 2, args=(["--prompt", "Take 1 of them"], "text"))
    assert set(caught.value.exceptions) == {0, 1}
