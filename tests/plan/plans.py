"""Random plans for the property tests: feasible ones by construction, and requests that may break any rule."""

from hypothesis import strategies as st

from nki_parallel_attn import AttentionShape, Contiguous, Interleaved, RoundRobin, ShardingPlan
from nki_parallel_attn.plan_feasibility import Request

RANK_ORDERS = ("consecutive", "strided")


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def feasible_arguments(draw, most_ranks=4096, modes=("kvp", "decode", "none")):
    """Constructor arguments, with kv_groups chosen first so that heads always fit."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    spread = draw(st.sampled_from([1, 2, 3, 4]))
    kv_groups = draw(st.sampled_from([*divisors(kv_heads), kv_heads * spread]))
    mode = draw(st.sampled_from(modes))
    kvp = kvdp = cp = 1
    if mode == "kvp":
        kvp = draw(st.sampled_from([2, 3, 4, 8, 16]))
    elif mode == "decode":
        kvdp, cp = draw(st.sampled_from([(2, 1), (1, 2), (2, 2), (4, 1), (1, 8), (3, 4)]))
    tp = kv_groups * kvp * kvdp * cp
    lcm = next(n for n in range(tp, tp * kv_heads + 1, tp) if n % kv_heads == 0)
    q_heads = lcm * draw(st.integers(1, 2))
    replicas = draw(st.integers(1, max(1, min(8, most_ranks // tp))))
    block_size = draw(st.sampled_from([1, 2, 4, 6, 16, 128]))
    layouts = [RoundRobin(), Contiguous()]
    if mode == "decode":
        layouts += [Interleaved(i) for i in divisors(block_size)]
    return {
        "shape": AttentionShape(q_heads, kv_heads, draw(st.sampled_from([2, 16, 64, 128])), draw(st.integers(1, 3))),
        "world_size": tp * replicas,
        "tp": tp,
        "kvp": kvp,
        "kvdp": kvdp,
        "cp": cp,
        "kv_layout": draw(st.sampled_from(layouts)),
        "block_size": block_size,
        "seg_size": block_size * draw(st.integers(1, 4)),
        "lnc": draw(st.sampled_from([1, 2])),
        "target": draw(st.sampled_from(["trn2", "trn3"])),
        "rank_order": draw(st.sampled_from(RANK_ORDERS)),
        "max_seq_len": draw(st.integers(1, 3000)),
    }


@st.composite
def plans(draw, **kwargs):
    return ShardingPlan(**draw(feasible_arguments(**kwargs)))


@st.composite
def requests(draw):
    """Any request at all: half of them stray from a feasible one in a few parameters, half are drawn freely."""
    size = st.integers(0, 40)
    strays = {
        "world_size": st.one_of(size, st.integers(41, 600)),
        "tp": st.one_of(st.none(), size),
        "kvp": st.one_of(st.integers(0, 12), st.just(1)),
        "kvdp": st.one_of(st.integers(0, 12), st.just(1)),
        "cp": st.one_of(st.integers(0, 12), st.just(1)),
        "kv_layout": st.sampled_from([RoundRobin(), Contiguous(), Interleaved(0), Interleaved(3), Interleaved(4)]),
        "block_size": st.integers(0, 200),
        "seg_size": st.one_of(st.none(), st.integers(0, 2000)),
        "lnc": st.integers(0, 3),
        "target": st.sampled_from(["trn1", "trn2", "trn3"]),
        "rank_order": st.sampled_from([*RANK_ORDERS, "random"]),
        "max_seq_len": st.sampled_from([None, 0, 100]),
    }
    values = draw(feasible_arguments(most_ranks=64))
    names = draw(st.one_of(st.lists(st.sampled_from(sorted(strays)), max_size=3), st.just(sorted(strays))))
    for name in names:
        values[name] = draw(strays[name])
    if draw(st.booleans()):
        q_heads = draw(st.integers(1, 48))
        values["shape"] = AttentionShape(
            q_heads,
            draw(st.sampled_from(divisors(q_heads))),
            draw(st.integers(1, 140)),
            hidden=draw(st.sampled_from([None, 4096, 2881])),
        )
    return Request(**values)
