"""`nki-parallel-attn plan`: the table, the JSON, and one clear line for what cannot be."""

import pytest

from nki_parallel_attn import AttentionShape, Interleaved, ShardingPlan
from nki_parallel_attn.cli import main

MODEL = ["plan", "--q-heads", "32", "--kv-heads", "8"]


def test_table(capsys):
    assert main([*MODEL, "--world-size", "16", "--kvp", "2", "--max-seq-len", "8192", "--layers", "32"]) == 0
    shape = AttentionShape(32, 8, 128, layers=32)
    assert capsys.readouterr().out == f"{ShardingPlan(shape, world_size=16, kvp=2, max_seq_len=8192)}\n"


def test_json(capsys):
    options = ["--world-size", "16", "--tp", "8", "--cp", "2", "--kv-layout", "interleaved:16", "--target", "trn3"]
    assert main([*MODEL, *options, "--lnc", "1", "--rank-order", "strided", "--block-size", "64", "--json"]) == 0
    plan = ShardingPlan(
        AttentionShape(32, 8, 128),
        world_size=16,
        tp=8,
        cp=2,
        kv_layout=Interleaved(16),
        target="trn3",
        lnc=1,
        rank_order="strided",
        block_size=64,
    )
    assert ShardingPlan.from_json(capsys.readouterr().out) == plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world-size", "16", "--kvp", "3"], "nearest feasible kvp: 2, 4"),
        (["--world-size", "16", "--dtype", "bf17"], "dtype: got bf17"),
        (["--world-size", "16", "--head-dim", "0"], "head_dim: got 0"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(options, message, capsys):
    assert main([*MODEL, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


def test_an_unknown_layout_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as error:
        main([*MODEL, "--world-size", "4", "--kv-layout", "interleaved:x"])
    assert error.value.code == 2
    assert "expected round_robin, contiguous or interleaved:TOKENS" in capsys.readouterr().err
