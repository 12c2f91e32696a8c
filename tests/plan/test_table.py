"""What a printed plan says, and that thousands of ranks stay readable."""

import time

import torch

from nki_parallel_attn import AttentionShape, Contiguous, Interleaved, ShardingPlan
from nki_parallel_attn.plan_table import human_bytes, run_text

SHAPE = AttentionShape(q_heads=8, kv_heads=2, head_dim=64, layers=4)


def test_a_small_plan_in_full():
    plan = ShardingPlan(SHAPE, world_size=8, tp=4, kvp=2, block_size=16, max_seq_len=100)
    assert str(plan).splitlines() == [
        "ShardingPlan: 8 Q heads, 2 KV heads of 64, 4 layers",
        "  ranks      8 = 2 model copies x tp 4; kvp=2 share KV for prefill, RoundRobin(); consecutive",
        "  per rank   2 Q heads, 1 KV heads; block_size 16, seg_size 32",
        "  machine    trn2, LNC 2: 8 of 64 ranks of 1 trn2.48xlarge",
        "  KV cache   64.0 KiB per rank for 1 x 100 tokens of torch.bfloat16; unsharded 224.0 KiB, "
        "tensor parallel 112.0 KiB; 0.00% of a rank's 24.0 GiB",
        "  kv         4 x 2 ranks: [0, 1], [2, 3], [4, 5], [6, 7]",
        "  tp         2 x 4 ranks: [0, 1, 2, 3], [4, 5, 6, 7]",
        "  replica    4 x 2 ranks: [0, 4], [1, 5], [2, 6], [3, 7]",
        "",
        "rank  replica  kv_group  kvp  Q heads  KV heads  tokens  blocks  KV cache  KV group",
        "0     0        0         0    0..1     0         52      4       64.0 KiB  [0, 1]",
        "1     0        0         1    2..3     0         48      3       64.0 KiB  [0, 1]",
        "2     0        1         0    4..5     1         52      4       64.0 KiB  [2, 3]",
        "3     0        1         1    6..7     1         48      3       64.0 KiB  [2, 3]",
        "4     1        0         0    0..1     0         52      4       64.0 KiB  [4, 5]",
        "5     1        0         1    2..3     0         48      3       64.0 KiB  [4, 5]",
        "6     1        1         0    4..5     1         52      4       64.0 KiB  [6, 7]",
        "7     1        1         1    6..7     1         48      3       64.0 KiB  [6, 7]",
    ]


def test_without_a_length_the_positions_are_shown():
    lines = str(ShardingPlan(SHAPE, world_size=8, cp=2, kvdp=2, block_size=16, kv_layout=Interleaved(4))).splitlines()
    assert "kvdp=2 x cp=2 share KV for decoding, Interleaved(interleave=4)" in lines[1]
    assert "  cp         4 x 2 ranks: [0, 2], [1, 3], [4, 6], [5, 7]" in lines
    assert "  kvdp       4 x 2 ranks: [0, 1], [2, 3], [4, 5], [6, 7]" in lines
    assert lines[-1].endswith(" 4..7, 12..15, ..  [4, 5, 6, 7]")
    contiguous = str(ShardingPlan(SHAPE, world_size=4, kvp=4, kv_layout=Contiguous()))
    assert "share 2 of 4" in contiguous
    assert "no rank shares KV" in str(ShardingPlan(SHAPE, world_size=2))


def test_a_plan_that_shares_a_batch_prints_with_one_sequence_for_each_share():
    text = str(ShardingPlan(SHAPE, world_size=8, kvdp=2, cp=2, max_seq_len=100))
    assert "for 2 x 100 tokens" in text
    assert text == ShardingPlan(SHAPE, world_size=8, kvdp=2, cp=2, max_seq_len=100).table(batch=2)


def test_a_length_and_dtype_given_to_the_table():
    table = ShardingPlan(SHAPE, world_size=4, kvp=4).table(1024, batch=2, dtype=torch.float8_e4m3fn)
    assert "2 x 1024 tokens of torch.float8_e4m3fn" in table
    assert table.splitlines()[-1].split() == [
        "3",
        "3",
        "6..7",
        "0..1",
        "256",
        "2",
        "512.0",
        "KiB",
        "[0,",
        "1,",
        "2,",
        "3]",
    ]


def test_4096_ranks_stay_readable():
    shape = AttentionShape(q_heads=128, kv_heads=8, head_dim=128, layers=80)
    plan = ShardingPlan(shape, world_size=4096, tp=64, kvp=8, max_seq_len=2**20, rank_order="strided")
    start = time.process_time()
    lines = str(plan).splitlines()
    assert time.process_time() - start < 2
    assert len(lines) < 32 and max(map(len, lines)) < 200
    assert "... 4080 more ranks, rank 12 to 4091" in lines
    assert lines[-1].startswith("4095")
    assert "  tp         64 x 64 ranks: [0..63], [64..127], [128..191], ..., [4032..4095]" in lines


def test_columns_line_up():
    lines = str(ShardingPlan(SHAPE, world_size=8, kvp=4, max_seq_len=5000)).splitlines()
    header = next(line for line in lines if line.startswith("rank "))
    rows = lines[lines.index(header) + 1 :]
    column = header.index("KV group")
    assert len(rows) == 8 and all(row[column] == "[" and row[column - 1] == " " for row in rows)


def test_pieces():
    assert [human_bytes(n) for n in (0, 1023, 1536, 24 * 2**30, 2**42)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "24.0 GiB",
        "4.0 TiB",
    ]
    assert run_text([3]) == "[3]"
    assert run_text(range(64)) == "[0..63]"
    assert run_text(range(0, 256, 4)) == "[0, 4, .. 252]"
    assert run_text([0, 1, 2, 3, 8, 9, 10, 11, 16]) == "[0, 1, 2, 3, 8, 9, .. 16]"
