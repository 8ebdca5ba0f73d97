"""What a process has once and each rank that is a thread is to have to itself, in turns."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import sys
from typing import Any

import numpy as np
import torch

from ...errors import GpusimError
from .private import generator_memory
from .seeds import Seeds
from .settings import Settings

__all__ = ["Globals"]

_numpy: Any = np.random  # the global generator, which programs may use


class Globals:
    """What a process has once and each rank is to have to itself, as it is at one time.

    torch's, NumPy's and Python's global generators, the default dtype, deterministic algorithms,
    the working directory, sys.argv, `__main__` and `Settings`. torch keeps its grad mode, autocast
    and default device for each thread.
    """

    def __init__(self) -> None:
        self.torch_bits, self.torch = _torch_bits(), torch.get_rng_state()
        self.cuda = _cuda_states()
        self.python_bits, self.python = _python_bits(), random.getstate()
        self.numpy_bits = _numpy_bits()
        self.numpy: Any = _numpy.get_state(legacy=False)
        self.dtype = torch.get_default_dtype()
        self.folder = os.getcwd()
        self.argv = sys.argv
        self.main = sys.modules["__main__"]
        self.settings = Settings()

    def of_rank(self, seeds: Seeds) -> Globals:
        """Those that a rank starts with: the same, but for the states of generators."""
        copy = object.__new__(Globals)
        vars(copy).update(vars(self), argv=list(self.argv), settings=self.settings.copy())
        generator = torch.Generator()
        copy.torch = generator.manual_seed(seeds.torch).get_state()
        copy.python = random.Random(seeds.python).getstate()
        copy.numpy = np.random.RandomState(seeds.numpy).get_state(legacy=False)
        # No memory has these, so that the first turn sets the states.
        copy.torch_bits = copy.python_bits = copy.numpy_bits = b""
        copy.cuda = _cuda_states(seeds)
        return copy

    def save(self) -> None:
        """Take what is there now; states that are slow to read only if they have been used."""
        bits: Any = _torch_bits()
        if bits != self.torch_bits:
            self.torch_bits, self.torch = bits, torch.get_rng_state()
        if torch.cuda.default_generators:
            self.cuda = _cuda_states()
        bits = _python_bits()
        if bits != self.python_bits:
            self.python_bits, self.python = bits, random.getstate()
        bits = _numpy_bits()
        # A second normal number may be left, whose use changes nothing else.
        if bits != self.numpy_bits or self.numpy["has_gauss"]:
            self.numpy_bits, self.numpy = bits, _numpy.get_state(legacy=False)
        self.dtype = torch.get_default_dtype()
        self.folder, self.argv = os.getcwd(), sys.argv
        self.main = sys.modules["__main__"]
        self.settings.save()

    def restore(self, now: Globals) -> None:
        """Put this in place of `now`."""
        self.restore_generators(now)
        if self.dtype != now.dtype:
            torch.set_default_dtype(self.dtype)
        if self.folder != now.folder:
            os.chdir(self.folder)
        sys.argv = self.argv
        sys.modules["__main__"] = self.main
        self.settings.restore(now.settings)

    def restore_generators(self, now: Globals) -> None:
        """Put the states of generators in place of those of `now`."""
        if self.torch_bits != now.torch_bits:
            torch.set_rng_state(self.torch)
            self.torch_bits = _torch_bits()  # with other bytes in a normal number that is not there
        for generator, state in zip(torch.cuda.default_generators, self.cuda, strict=True):
            generator.set_state(state)
        if self.python_bits != now.python_bits:
            random.setstate(self.python)
        gauss = self.numpy["has_gauss"] or now.numpy["has_gauss"]
        if self.numpy_bits != now.numpy_bits or gauss:
            _numpy.set_state(self.numpy)


def _cuda_states(seeds: Seeds | None = None) -> list[torch.Tensor]:
    """The states of the GPUs' generators, which the host keeps; none before CUDA is initialised.

    With `seeds`, the states that they have after they are seeded.
    """
    generators = torch.cuda.default_generators
    if seeds is not None:
        generators = tuple(torch.Generator(device=each.device) for each in generators)
        for number, generator in enumerate(generators):
            generator.manual_seed(seeds.of_gpu(number))
    return [generator.get_state() for generator in generators]


def _torch_bits() -> Any:
    """The state of torch's global generator as memory, if it is there as `private` finds it."""
    return _torch_memory.raw if _torch_memory is not None else _torch_bytes()


def _torch_bytes() -> bytes:
    found: bytes = torch.get_rng_state().numpy().tobytes()
    return found


_torch_memory = generator_memory()


_python: Any = random.random
_python = _python.__self__  # the global generator
_python_type: Any = type(_python).__base__  # in C
_python_memory = (ctypes.c_char * (_python_type.__basicsize__ - object.__basicsize__)).from_address(
    id(_python) + object.__basicsize__
)


def _python_bits() -> Any:
    """The state of Python's global generator as memory; 20 times faster to read than getstate()."""
    if not _PYTHON_IN_MEMORY:
        return random.getstate()
    return _python_memory.raw, _python.gauss_next


def _python_in_memory() -> bool:
    """Whether this Python keeps the state in the object, as CPython does."""
    if sys.implementation.name != "cpython":
        return False
    words, position = random.getstate()[1][:-1], random.getstate()[1][-1]
    memory = _python_memory.raw
    at = memory.find(np.array(words, np.uint32).tobytes())
    return at >= 4 and memory[at - 4 : at] == np.array([position], np.int32).tobytes()


_PYTHON_IN_MEMORY = _python_in_memory()


def _numpy_bits() -> bytes:
    """The state of NumPy's global generator as memory; 30 times faster to read than as an array."""
    return _memory_of(_numpy.get_bit_generator()).raw


@functools.lru_cache(maxsize=1)
def _memory_of(bits: Any) -> ctypes.Array[ctypes.c_char]:
    if not isinstance(bits, np.random.MT19937):
        raise GpusimError(
            f"NumPy's global generator has the bit generator {type(bits).__name__}; ranks can "
            "share MT19937 only, which np.random.set_bit_generator replaced"
        )
    return (ctypes.c_char * (625 * 4)).from_address(bits.ctypes.state_address)
