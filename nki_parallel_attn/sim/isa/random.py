"""Random numbers: XORWOW generators, one or four per partition, in the Vector and GpSimd Engines.

Source: nki/api/nki/isa/__init__.py, rng, dropout, rand2, set_rng_seed, rand_set_state, rand_get_state;
nki/guides/architecture/trainium3_arch.rst, "XORWOW-based PRNG". How the device deals the numbers of its generators to
the elements is not documented, and the trn2 Vector Engine has another, undescribed one, so results have the documented
distribution and not the device's bits. Engines start from the simulation's seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..core import Core
from ..dtypes import (
    bfloat16,
    float8_e4m3,
    float8_e5m2,
    float16,
    float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from ..enums import MemoryRegion, nc_version
from ..enums import engine as Engine
from ..instruction import Call, instruction
from ..tensor import NkiTensor
from .alu import column, flat_bits, put_bits, unsigned

Words = np.ndarray[Any, np.dtype[np.uint32]]

LANES = 128
WORDS = 6
STATE_WORDS = {Engine.gpsimd: WORDS, Engine.vector: 4 * WORDS}
_INTEGERS = (int8, int16, int32, uint8, uint16, uint32)
_WEYL = np.uint32(362437)
_FOUR = np.uint32(4)
_DELAY = 5


class Xorwow:
    """The generators of one engine (G. Marsaglia, Xorshift RNGs, 2003, xorwow).

    Attributes:
        state: uint32 [6, 128, generators per partition]: five words of the shift register, then the Weyl counter.
    """

    def __init__(self, words: int, *entropy: int) -> None:
        self.generators = words // WORDS
        self.reseed(*entropy)

    @staticmethod
    def of(call: Call) -> Xorwow:
        """The generators of the engine that executes `call`."""
        core: Core = call.core
        key = f"{call.engine.name}.random"
        if key not in core.state:
            entropy = (core.generator.initial_seed() % 2**64, core.rank.index, core.program_id, call.engine.value)
            core.state[key] = Xorwow(STATE_WORDS[call.engine], *entropy)
        return core.state[key]  # type: ignore[no-any-return]

    def reseed(self, *entropy: int) -> None:
        """Start all generators from a few numbers."""
        words = np.random.SeedSequence(entropy).generate_state(WORDS * LANES * self.generators)
        self.state: Words = words.astype(np.uint32).reshape(WORDS, LANES, self.generators)

    def load(self, words: Words) -> None:
        """Set the generators of the first partitions from [P, 6 * generators] words, generator after generator."""
        partitions = words.shape[0]
        self.state[:, :partitions] = words.reshape(partitions, self.generators, WORDS).transpose(2, 0, 1)

    def save(self, partitions: int) -> Words:
        """[partitions, 6 * generators], as `load` takes them."""
        words: Words = self.state[:, :partitions].transpose(1, 2, 0).reshape(partitions, -1)
        return words

    def bits(self, partitions: int, elements: int) -> Words:
        """The next 32-bit numbers, [partitions, elements]; the generators of a partition take turns."""
        steps = -(-elements // self.generators)
        # The words of the shift register, one after the other; each depends on the one before and the fifth before.
        words = np.empty((steps + 2 * _DELAY, partitions, self.generators), np.uint32)
        words[:_DELAY] = self.state[:_DELAY, :partitions]
        for first in range(0, steps, _DELAY):
            late: Words = words[first : first + _DELAY]
            late = late ^ (late >> np.uint32(2))
            late ^= late << np.uint32(1)
            word = words[first + _DELAY - 1]
            for i in range(_DELAY):
                word = np.bitwise_xor(word ^ (word << _FOUR), late[i], out=words[first + _DELAY + i])
        counters = np.arange(1, steps + 1, dtype=np.uint32)[:, None, None] * _WEYL + self.state[_DELAY, :partitions]
        self.state[:_DELAY, :partitions] = words[steps : steps + _DELAY]
        self.state[_DELAY, :partitions] = counters[-1]
        numbers = words[_DELAY : _DELAY + steps] + counters
        in_turn: Words = numbers.transpose(1, 0, 2).reshape(partitions, -1)[:, :elements]
        return in_turn

    def uniform(self, tensor: NkiTensor) -> torch.Tensor:
        """float32 in [0, 1), a multiple of 2**-24, one for each element of `tensor`, in its shape."""
        bits = self.bits(tensor.shape[0], tensor.free_size)
        return torch.from_numpy((bits >> 8).astype(np.float32)).mul_(2.0**-24).reshape(tensor.shape)


def _check_engine(call: Call, vector_since: nc_version | None = None) -> None:
    if call.engine is Engine.gpsimd:
        call.require_target(nc_version.gen3, f"{call.name} on the GpSimd Engine")
    elif vector_since is not None and not call.core.target.at_least(vector_since):
        call.require(False, "engine-choice", f"{call.name} runs on the Vector Engine from {vector_since.name} on")


@instruction(
    engine=lambda dst, engine, name: engine,
    engines=(Engine.vector, Engine.gpsimd),
    writes=("dst",),
    dtypes={"dst": _INTEGERS},
)
def rng(call: Call, dst: NkiTensor, engine: Engine = Engine.vector, name: str | None = None) -> None:
    """dst, integers, = random bits: the low bits of 32-bit numbers."""
    _check_engine(call)
    if call.core.computes:
        bits = Xorwow.of(call).bits(dst.shape[0], dst.free_size)
        put_bits(dst, torch.from_numpy(bits.astype(np.int64)))


@instruction(
    engine=Engine.vector,
    reads=("data", "prob"),
    writes=("dst",),
    elementwise=("data", "dst"),
    vectors=("prob",),
)
def dropout(call: Call, dst: NkiTensor, data: NkiTensor, prob: float | NkiTensor, name: str | None = None) -> None:
    """dst = data, bit for bit and unscaled, each element replaced by 0 with probability `prob`.

    Args:
        dst: of data's dtype.
        prob: a constant or [P, 1]; float32 when data holds integers, else any float dtype.
    """
    if dst.dtype != data.dtype:
        call.fail("matching-dtype", f"data is {data.dtype}, dst {dst.dtype}")
    if isinstance(prob, NkiTensor):
        if data.dtype.is_integer:
            call.require(prob.dtype == float32, "operand-dtype", f"prob is {prob.dtype} for {data.dtype}, not float32")
        call.require(prob.dtype.is_float, "operand-dtype", f"prob is {prob.dtype}, expected a float")
    if not call.core.computes:
        return
    kept = Xorwow.of(call).uniform(data) >= column(prob, data.shape)
    dst.put_raw(torch.where(kept, data.bits(), 0).view(dst.format.torch))


@instruction(
    engine=Engine.vector,
    reads=("min", "max"),
    writes=("dst",),
    dtypes={
        "dst": (float8_e4m3, float8_e5m2, float16, bfloat16, float32, tfloat32, *_INTEGERS),
        "min": (float32,),
        "max": (float32,),
    },
)
def rand2(call: Call, dst: NkiTensor, min: float | NkiTensor, max: float | NkiTensor, name: str | None = None) -> None:
    """dst = float32 numbers uniform in [min, max], cast to its dtype; trn3.

    Args:
        min, max: constants or [P, 1] float32, min < max.
    """
    call.require_target(nc_version.gen4, "rand2")
    for label, value in (("min", min), ("max", max)):
        if isinstance(value, NkiTensor) and (value.size != dst.shape[0] or value.shape[0] != dst.shape[0]):
            call.fail("vector-operand", f"{label} is {list(value.shape)}, expected [{dst.shape[0]}, 1]")
    known = call.core.computes or not (isinstance(min, NkiTensor) or isinstance(max, NkiTensor))
    low, high = column(min, dst.shape), column(max, dst.shape)
    if known and call.core.checking and not bool(torch.as_tensor(low < high).all()):
        call.fail("random-range", f"min is {min}, max {max}")
    if call.core.computes:
        dst.put(Xorwow.of(call).uniform(dst) * (high - low) + low)


@instruction(engine=Engine.vector, reads=("src_seeds",))
def set_rng_seed(call: Call, src_seeds: NkiTensor, name: str | None = None) -> None:
    """Seed the Vector Engine's generators with the 32-bit value of a [1, 1] tensor."""
    if src_seeds.size != 1:
        call.fail("rng-state-size", f"src_seeds is {list(src_seeds.shape)}, expected [1, 1]")
    call.require(
        src_seeds.dtype.itemsize == 4, "operand-dtype", f"src_seeds is {src_seeds.dtype}, expected a 32-bit dtype"
    )
    if call.core.computes:
        Xorwow.of(call).reseed(int(flat_bits(src_seeds)[0, 0]) & 0xFFFFFFFF)


def _check_state(call: Call, operand: str, tensor: NkiTensor) -> None:
    words = STATE_WORDS[call.engine]
    if tensor.free_size != words or len(tensor.shape) != 2:
        call.fail("rng-state-size", f"{operand} is {list(tensor.shape)}, expected {words} elements per partition")


@instruction(
    engine=lambda src_seeds, engine, name: engine,
    engines=(Engine.gpsimd, Engine.vector),
    reads=("src_seeds",),
    dtypes={"src_seeds": (uint32,)},
)
def rand_set_state(call: Call, src_seeds: NkiTensor, engine: Engine = Engine.gpsimd, name: str | None = None) -> None:
    """Set the generators of an engine, partition by partition.

    Args:
        src_seeds: uint32 in SBUF, [P, 6] for GpSimd, [P, 24] for Vector (trn3).
    """
    _check_engine(call, nc_version.gen4)
    call.require(src_seeds.buffer is MemoryRegion.sbuf, "memory-access", "src_seeds is in PSUM, expected SBUF")
    _check_state(call, "src_seeds", src_seeds)
    if call.core.computes:
        Xorwow.of(call).load(unsigned(src_seeds).numpy().astype(np.uint32))


@instruction(
    engine=lambda dst, engine, name: engine,
    engines=(Engine.gpsimd, Engine.vector),
    writes=("dst",),
    dtypes={"dst": (uint32,)},
)
def rand_get_state(call: Call, dst: NkiTensor, engine: Engine = Engine.gpsimd, name: str | None = None) -> None:
    """dst = the state of an engine's generators, as rand_set_state takes it."""
    _check_engine(call, nc_version.gen4)
    _check_state(call, "dst", dst)
    if call.core.computes:
        put_bits(dst, torch.from_numpy(Xorwow.of(call).save(dst.shape[0]).astype(np.int64)))
