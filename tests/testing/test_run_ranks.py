"""What run_ranks() gives to each rank and brings back from it."""

import collections
import dataclasses
import functools
import os
import pickle

import pytest
import torch
import torch.distributed as dist

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, RankFailedError
from nki_parallel_attn.testing import run_ranks


@dataclasses.dataclass
class Shard:
    owner: int
    values: torch.Tensor


Pair = collections.namedtuple("Pair", "left right")


class NotRebuildable(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}: {detail}")
        self.code = code


def scaled_sum(scale: float, *, offset: float = 0.0) -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return scale * value.item() + offset


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_has_the_default_group(world_size: int) -> None:
    def describe() -> tuple[int, int, str]:
        dist.barrier()
        return dist.get_rank(), dist.get_world_size(), dist.get_backend()

    assert run_ranks(describe, world_size) == [(rank, world_size, "gloo") for rank in range(world_size)]


def test_module_functions_lambdas_partials_and_methods() -> None:
    shard = Shard(3, torch.ones(2))
    factor = 10
    assert run_ranks(scaled_sum, 3, args=(2.0,), kwargs={"offset": 1.0}) == [7.0] * 3
    assert run_ranks(lambda: factor * dist.get_rank(), 2) == [0, 10]
    assert run_ranks(functools.partial(scaled_sum, offset=5.0), 2, args=(1.0,)) == [6.0, 6.0]
    assert run_ranks(shard.values.sum, 2) == [torch.tensor(2.0)] * 2


def test_tensors_come_back_detached_wherever_they_are() -> None:
    def nested() -> object:
        rank = dist.get_rank()
        weight = torch.nn.Parameter(torch.full((2, 3), float(rank)))
        return {
            "product": [weight * 2, (weight.to(torch.bfloat16).T,)],
            "pair": Pair(torch.tensor(rank), None),
            "shard": Shard(rank, weight),
            "empty": torch.zeros(0, 4, dtype=torch.int64, requires_grad=False),
            "complex": torch.tensor([1 + 2j]).conj(),
            "fp8": torch.ones(3).to(torch.float8_e4m3fn),
            "bool": torch.tensor([True, False]),
        }

    for rank, result in enumerate(run_ranks(nested, 2)):
        product, (transposed,) = result["product"]
        assert not product.requires_grad and torch.equal(product, torch.full((2, 3), 2.0 * rank))
        assert torch.equal(transposed, torch.full((3, 2), float(rank), dtype=torch.bfloat16))
        assert type(result["pair"]) is Pair and result["pair"].left == rank
        assert type(result["shard"]) is Shard and type(result["shard"].values) is torch.Tensor
        assert not result["shard"].values.requires_grad
        assert result["empty"].shape == (0, 4) and result["empty"].dtype == torch.int64
        assert torch.equal(result["complex"].resolve_conj(), torch.tensor([1 - 2j]))
        assert result["fp8"].dtype == torch.float8_e4m3fn and torch.equal(result["fp8"].float(), torch.ones(3))
        assert result["bool"].tolist() == [True, False]
        product += 1  # writable


def test_tensors_of_other_kinds_come_back_detached_too() -> None:
    class Tagged(torch.Tensor):
        pass

    def kinds() -> dict[str, torch.Tensor]:
        rows = [torch.ones(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
        return {
            "nested": torch.nested.nested_tensor(rows, requires_grad=True) * 2,
            "tagged": (rows[0] * 2).as_subclass(Tagged),
            "sparse": rows[0].to_sparse() * 2,
        }

    (got,) = run_ranks(kinds, 1)
    assert not any(tensor.requires_grad for tensor in got.values())
    assert [row.tolist() for row in got["nested"].unbind()] == [[2, 2], [0, 0, 0]]
    assert type(got["tagged"]).__name__ == "Tagged" and got["tagged"].tolist() == [2, 2]
    assert got["sparse"].to_dense().tolist() == [2, 2]


def test_a_view_leaves_its_storage_behind() -> None:
    (view,) = run_ranks(lambda: torch.zeros(1 << 20)[:2], 1)
    assert view.untyped_storage().nbytes() == 8


def test_results_may_differ_from_rank_to_rank() -> None:
    assert run_ranks(lambda: [None, 1, "two"][dist.get_rank()], 3) == [None, 1, "two"]


def test_ranks_resemble_the_caller_and_torchrun(tmp_path, monkeypatch) -> None:
    def look() -> dict[str, object]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FROM_THE_CALLER")
        environment = {name: os.environ.get(name) for name in names}
        os.environ["FROM_THE_CALLER"] = "changed"
        return {"threads": torch.get_num_threads(), "directory": os.getcwd(), **environment}

    run_ranks(look, 2)  # the processes are there before the environment changes
    monkeypatch.setenv("FROM_THE_CALLER", "yes")
    monkeypatch.chdir(tmp_path)
    expected = {"threads": 1, "directory": str(tmp_path), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for _ in range(2):
        assert run_ranks(look, 2) == [
            {**expected, "RANK": str(rank), "LOCAL_RANK": str(rank), "FROM_THE_CALLER": "yes"} for rank in range(2)
        ]
    monkeypatch.delenv("FROM_THE_CALLER")
    assert run_ranks(look, 1)[0]["FROM_THE_CALLER"] is None


def test_one_call_does_not_change_the_next() -> None:
    def disturb() -> float:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_flush_denormal(True)
        torch.set_num_threads(2)
        return torch.rand((), device="cpu").item()

    def look() -> tuple[object, ...]:
        state = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
        torch.set_default_dtype(torch.float64)
        return *state, (torch.tensor(1e-310) * 1).item(), torch.rand(()).item()

    drawn = run_ranks(disturb, 2)
    assert run_ranks(look, 2) == [(torch.float32, True, 1, 1e-310, value) for value in drawn]
    assert drawn[0] == drawn[1]


def test_output_of_the_ranks_is_passed_on(capsys) -> None:
    def speak() -> None:
        rank = dist.get_rank()
        print(f"out {rank}\nmore", end="")
        os.write(2, f"err {rank}\n".encode())

    run_ranks(speak, 2)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] more", "[rank 0] out 0", "[rank 1] more", "[rank 1] out 1"]
    assert sorted(err.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]


def test_much_output_does_not_block(capsys) -> None:
    assert run_ranks(lambda: print("x" * 300_000), 2) == [None, None]
    assert sorted(map(len, capsys.readouterr().out.splitlines())) == [300_009] * 2


def test_large_arguments_and_results() -> None:
    big = torch.arange(4 << 20, dtype=torch.float32)
    for rank, result in enumerate(run_ranks(lambda x: x + dist.get_rank(), 2, args=(big,))):
        assert torch.equal(result, big + rank)


def test_exceptions_come_back_with_their_attributes() -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            raise ArgumentError("q", "float64", "bfloat16")
        raise NotRebuildable(7, detail="no")

    with pytest.raises(RankFailedError) as caught:
        run_ranks(fail, 2)
    argument_error, other = caught.value.exceptions[0], caught.value.exceptions[1]
    assert isinstance(argument_error, ArgumentError) and argument_error.argument == "q"
    assert type(other) is NotRebuildable and other.code == 7 and str(other) == "code 7: no"


def test_what_cannot_be_pickled_is_named() -> None:
    stream = open(os.devnull, "wb")  # noqa: SIM115
    with stream:
        with pytest.raises(ArgumentTypeError, match=r"args\[1\].*BufferedWriter"):
            run_ranks(print, 2, args=(1, stream))
        with pytest.raises(ArgumentTypeError, match=r"kwargs\['file'\].*BufferedWriter"):
            run_ranks(print, 2, kwargs={"file": stream})
        with pytest.raises(ArgumentTypeError, match=r"^fn: .*function"):
            run_ranks(lambda: stream, 2)


def test_results_that_cannot_be_pickled_fail_with_text() -> None:
    with pytest.raises(RankFailedError, match=r"the result, a builtins\.generator, cannot be pickled"):
        run_ranks(lambda: (i for i in range(3)), 2)

    class Stubborn(Exception):
        def __reduce__(self):
            raise pickle.PicklingError("never")

    def fail() -> None:
        raise Stubborn("this text arrives")

    with pytest.raises(RankFailedError, match="Stubborn: this text arrives") as caught:
        run_ranks(fail, 2)
    assert caught.value.exceptions == {}


def test_results_that_cannot_be_rebuilt_fail_with_text() -> None:
    class OnlyOnRanks:
        def __reduce__(self):
            return int, ("not a number",)

    with pytest.raises(RankFailedError, match="its result cannot be rebuilt in the caller") as caught:
        run_ranks(OnlyOnRanks, 2)
    assert "invalid literal for int()" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"fn": print, "world_size": 0}, "world_size"),
        ({"fn": print, "world_size": 2.0}, "world_size"),
        ({"fn": print, "world_size": True}, "world_size"),
        ({"fn": print, "world_size": 1, "timeout": 0}, "timeout"),
        ({"fn": print, "world_size": 1, "timeout": "3"}, "timeout"),
        ({"fn": print, "world_size": 1, "timeout": True}, "timeout"),
        ({"fn": print, "world_size": 1, "timeout": float("inf")}, "timeout"),
        ({"fn": 3, "world_size": 1}, "fn"),
        ({"fn": print, "world_size": 1, "args": 5}, "args"),
        ({"fn": print, "world_size": 1, "args": "text"}, "args"),
        ({"fn": print, "world_size": 1, "args": None}, "args"),
        ({"fn": print, "world_size": 1, "kwargs": [1]}, "kwargs"),
        ({"fn": print, "world_size": 1, "kwargs": {1: 2}}, "kwargs"),
        ({"fn": print, "world_size": 1, "pg_backend": None}, "pg_backend"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        run_ranks(**arguments)
