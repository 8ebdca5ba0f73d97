"""The global generators of torch, Python and NumPy: how their states are read and written."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ....errors import GpusimError
from ..private import generator_memory

__all__ = ["GENERATORS", "Generator", "cuda_states", "set_cuda_states"]

_numpy: Any = np.random  # the global generator, which programs may use


def cuda_states() -> list[torch.Tensor]:
    """The states of the GPUs' generators, which the host keeps; none before CUDA is initialised."""
    return [generator.get_state() for generator in torch.cuda.default_generators]


def set_cuda_states(states: list[torch.Tensor]) -> None:
    """Set the states of the GPUs' generators."""
    for gpu, state in zip(torch.cuda.default_generators, states, strict=True):
        gpu.set_state(state)


class Generator(NamedTuple):
    """How to read the state of a global generator, as values that can be compared, and to set it.

    States are read and written with each turn. So they are read as the memory that they are, which
    is 5 to 300 times as fast as to ask for them, where the memory is as it is expected to be.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]


# torch's


def _read_torch() -> bytes:
    state: bytes = torch.get_rng_state().numpy().tobytes()
    return state


def _write_torch(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _torch_in_memory() -> Generator | None:
    memory: Any = generator_memory()
    return None if memory is None else Generator(*_raw(memory))


def _raw(memory: Any) -> tuple[Callable[[], bytes], Callable[[bytes], None]]:
    return lambda: memory.raw, lambda state: setattr(memory, "raw", state)


# Python's

_python: Any = random.random
_python = _python.__self__  # the global generator
_python_type: Any = type(_python).__base__  # in C


def _python_in_memory() -> Generator | None:
    """The generator as memory, if this Python keeps the state in the object, as CPython does."""
    if sys.implementation.name != "cpython":
        return None
    size = _python_type.__basicsize__ - object.__basicsize__
    memory = (ctypes.c_char * size).from_address(id(_python) + object.__basicsize__)
    words, position = random.getstate()[1][:-1], random.getstate()[1][-1]
    at = memory.raw.find(np.array(words, np.uint32).tobytes())
    if at < 4 or memory.raw[at - 4 : at] != np.array([position], np.int32).tobytes():
        return None

    def read() -> tuple[bytes, Any]:
        return memory.raw, _python.gauss_next

    def write(state: tuple[bytes, Any]) -> None:
        memory.raw, _python.gauss_next = state

    return Generator(read, write)


# NumPy's


def _read_numpy() -> tuple[Any, ...]:
    name, key, *more = _numpy.get_state()
    return name, key.tobytes(), *more


def _write_numpy(state: tuple[Any, ...]) -> None:
    name, key, *more = state
    _numpy.set_state((name, np.frombuffer(key, np.uint32), *more))


def _numpy_in_memory() -> Generator | None:
    """The generator as memory: the words of MT19937, and a second normal number that is left.

    The latter, and whether it is there, are in the RandomState. A trial finds out where.
    """
    trial: Any = np.random.RandomState(0)
    trial.set_state(("MT19937", trial.get_state()[1], 624, 1, np.pi))
    size = type(trial).__basicsize__
    content = ctypes.string_at(id(trial), size)
    at = content.find(np.array([1, np.pi]).astype("f8")[1:].tobytes())
    if at < 8 or content[at - 8 : at - 4] != np.array([1], np.int32).tobytes():
        return None
    shared: Any = _numpy.mtrand._rand
    if type(shared) is not type(trial):
        return None
    normal = (ctypes.c_char * 16).from_address(id(shared) + at - 8)

    def read() -> tuple[bytes, bytes]:
        return _memory_of(_numpy.get_bit_generator()).raw, normal.raw

    def write(state: tuple[bytes, bytes]) -> None:
        _memory_of(_numpy.get_bit_generator()).raw, normal.raw = state

    return Generator(read, write)


@functools.lru_cache(maxsize=1)
def _memory_of(bits: Any) -> Any:
    if not isinstance(bits, np.random.MT19937):
        raise GpusimError(
            f"NumPy's global generator has the bit generator {type(bits).__name__}; ranks can "
            "share MT19937 only, which np.random.set_bit_generator replaced"
        )
    return (ctypes.c_char * (625 * 4)).from_address(bits.ctypes.state_address)


ASKED = [
    Generator(_read_torch, _write_torch),
    Generator(random.getstate, random.setstate),
    Generator(_read_numpy, _write_numpy),
]
IN_MEMORY = [_torch_in_memory(), _python_in_memory(), _numpy_in_memory()]
GENERATORS = [fast or asked for fast, asked in zip(IN_MEMORY, ASKED, strict=True)]
