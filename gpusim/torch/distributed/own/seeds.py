"""Random states of ranks: each rank starts with states of its own, the same in every run.

A process that does not seed its generators starts with states of its own, which the operating
system gives it. So ranks differ in weights that no broadcast sets. Simulated ranks have to differ
as well, or the missing broadcast goes unnoticed; but a run has to repeat. So a rank's states follow
from the launch's base seed and the rank's number, and from nothing else: not from the schedule, nor
from whether ranks are threads, processes, or spread over instances.

This holds for torch's generators of the CPU and of GPUs, for NumPy's global generator and for
Python's `random`. Not for what asks the operating system: `np.random.default_rng()` and
`random.Random()` without a seed, `os.urandom`, `uuid`, `secrets`, `torch.seed()`.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Seeds", "as_seed", "seeds_of", "sow"]

NUMPY_WORDS = 8
TORCH_BITS = 53
"""The bits of a seed that torch draws for a generator by itself."""

_numpy: Any = np.random  # the global generator, which programs may use


class Seeds(NamedTuple):
    """The seeds of a rank's generators."""

    torch: int
    python: int
    numpy: list[int]
    gpus: int

    def of_gpu(self, number: int) -> int:
        """The seed of a GPU's generator, as torch draws one for each."""
        return (self.gpus + number) % 2**TORCH_BITS


def as_seed(value: Any, what: str) -> int:
    """A base seed.

    **Raises**: TypeError if it is not an integer, ValueError if it is negative.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{what}={value!r:.60}: expected an integer from 0")
    if value < 0:
        raise ValueError(f"{what}={value}: expected an integer from 0")
    return int(value)


def seeds_of(base: int, rank: int) -> Seeds:
    """The seeds of a rank, from the launch's base seed."""
    words = np.random.SeedSequence(base, spawn_key=(rank,)).generate_state(14, np.uint32).tolist()
    torchs, python, gpus = (
        sum(word << 32 * place for place, word in enumerate(words[start : start + 2]))
        for start in (0, 2, 4)
    )
    return Seeds(torchs % 2**TORCH_BITS, python, words[6 : 6 + NUMPY_WORDS], gpus % 2**TORCH_BITS)


def sow(seeds: Seeds) -> None:
    """Seed the process's generators, those of GPUs only where CUDA is initialised."""
    torch.default_generator.manual_seed(seeds.torch)
    for number, generator in enumerate(torch.cuda.default_generators):
        generator.manual_seed(seeds.of_gpu(number))
    _numpy.seed(seeds.numpy)
    random.seed(seeds.python)
