"""Generators of ranks that run at the same time as threads: each rank draws from its own.

torch, NumPy and Python's `random` have one global generator in a process. Ranks in turns exchange
its state with the turn (`turns`). Ranks that run freely can't: so each draw, and each call that
reads or sets the state, exchanges it for as long as it lasts, under a lock. A rank has the values
that it has in turns.

What is known is found where all ways lead through: torch's operators with the tag of those that
draw, and the functions of the modules `torch`, `numpy.random` and `random`. A copy of a function
that was made before the launch (`from random import choice`), or a method of
`torch.default_generator`, changes the state that is there between the draws. It is compared at
every draw and wait, and at the end, and a warning says that ranks shared it. It is not an error, as
many programs draw initial weights that a broadcast replaces.
"""

from __future__ import annotations

import functools
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..private import replace
from ..private_calls import draws_call
from .generators import GENERATORS, Generator, cuda_states, set_cuda_states
from .seeds import seeds_of, sow
from .threads import rank_of_thread

if TYPE_CHECKING:
    from ..runners.threads import Rank

__all__ = ["OwnDraws", "is_forking", "lasting", "made"]

TORCH, PYTHON, NUMPY = range(3)
SHARED = (
    "ranks that are threads and run freely have shared {name}: a rank seeded it or drew from it by "
    "a function that a module had taken before the launch, or by a method of the generator itself. "
    "Values depend on the order of the ranks; use processes (launch(..., processes=True), or "
    "gpusim torchrun --processes), or turns"
)
NAMES = (
    "torch's generator of the CPU",
    "Python's generator of random",
    "NumPy's global generator",
)
#: Functions of the modules that read, set or use the global generator, beside its own methods.
OF_TORCH = "get_rng_state", "initial_seed", "manual_seed", "seed", "set_rng_state"
OF_NUMPY = "ranf", "sample", "seed"
#: On real GPUs. Where the CPU plays them, these are the rank's own.
OF_CUDA = (
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
)

_numpy: Any = np.random
_torch: Any = torch

#: Held while a global generator has the state of a rank, or of a simulated GPU. A fork waits for
#: it, so that it is free in the child, and the states there are those of between two draws.
_lock = threading.RLock()
#: The generators that have such a state now. Belongs to the thread that holds the lock.
_lent: set[int] = set()
#: How often a rank's thread has drawn by torch; read by the simulated GPUs.
_counts = threading.local()


class _Here(threading.local):
    """The state of the calling thread."""

    forks = False


_here = _Here()


def is_forking() -> bool:
    """Whether the calling thread is in the midst of a fork, for which it holds the lock."""
    return _here.forks


def _begin_fork() -> None:
    _lock.acquire()
    _here.forks = True


def _end_fork() -> None:
    _here.forks = False
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_end_fork)


def made() -> int | None:
    """How often the calling thread has drawn by torch; None if its rank does not run freely."""
    return getattr(_counts, "draws", None)


@contextmanager
def lasting() -> Iterator[None]:
    """A block in which torch's generator has another state, which ranks must not exchange.

    It is as before afterwards, in all bits of its memory, as these are compared.
    """
    with _lock:
        was, before = TORCH in _lent, GENERATORS[TORCH].read()
        _lent.add(TORCH)
        try:
            yield
        finally:
            GENERATORS[TORCH].write(before)
            if not was:
                _lent.discard(TORCH)


def _torch_generator() -> Generator:
    """The generator of the CPU together with those of GPUs, from which the same operators draw."""
    cpu = GENERATORS[TORCH]
    if not _torch.cuda.default_generators:
        return cpu

    def write(state: tuple[Any, Any]) -> None:
        cpu.write(state[0])
        set_cuda_states(state[1])

    return Generator(lambda: (cpu.read(), cuda_states()), write)


class OwnDraws:
    """The states of all ranks of a launch. (A state is touched under the lock only.)"""

    def __init__(self, size: int, seed: int) -> None:
        self.generators = [_torch_generator(), *GENERATORS[1:]]
        self.states: list[list[Any]] = []
        for rank in range(size):
            sow(seeds_of(seed, rank))
            self.states.append([each.read() for each in self.generators])
        #: What is there between the draws.
        self.between = [each.read() for each in GENERATORS]
        self.warned: set[int] = set()

    @contextmanager
    def drawing(self, rank: Rank, number: int) -> Iterator[None]:
        """A block in which a global generator has the rank's state."""
        with _lock:
            if number in _lent:  # a draw in a draw
                yield
                return
            self._check(number)
            _lent.add(number)
            generator, states = self.generators[number], self.states[rank.index]
            before = generator.read()
            generator.write(states[number])
            try:
                yield
            finally:
                states[number] = generator.read()
                generator.write(before)
                _lent.discard(number)

    def check(self) -> None:
        """Warn, once for each generator, if a rank has used one without its state."""
        if _lock.acquire(blocking=False):  # else a rank draws now, which checks as well
            try:
                for number in range(len(GENERATORS)):
                    if number not in _lent:
                        self._check(number)
            finally:
                _lock.release()

    def _check(self, number: int) -> None:
        now = GENERATORS[number].read()
        if now != self.between[number]:
            self.between[number] = now
            if number not in self.warned:
                self.warned.add(number)
                warnings.warn(SHARED.format(name=NAMES[number]), RuntimeWarning, stacklevel=4)

    @contextmanager
    def functions(self) -> Iterator[None]:
        """A block in which functions that draw, or read and set the state, take the rank's."""
        _lent.clear()
        with ExitStack() as stack:
            for owner in (torch, torch.random):
                self._replace(stack, owner, OF_TORCH, TORCH)
            if _torch.cuda.default_generators:
                for owner in (torch.cuda, torch.cuda.random):
                    self._replace(stack, owner, OF_CUDA, TORCH)
            self._replace(stack, random, _methods(random, random.random), PYTHON)
            self._replace(stack, _numpy, (*_methods(_numpy, _numpy.rand), *OF_NUMPY), NUMPY)
            yield
            self.check()

    @contextmanager
    def of_thread(self) -> Iterator[None]:
        """A block in which torch's operators draw from the generator of the thread's rank."""
        before = made()
        _counts.draws = before or 0
        try:
            with draws_call(self._torch_draws):
                yield
        finally:
            if before is None:
                del _counts.draws

    def _torch_draws(self, function: Callable[..., Any], args: Any, named: Any) -> Any:
        rank = rank_of_thread()
        if rank is None:
            return function(*args, **named)
        _counts.draws += 1
        with self.drawing(rank, TORCH):
            return function(*args, **named)

    def _replace(self, stack: ExitStack, owner: Any, names: Sequence[str], number: int) -> None:
        for name in names:
            function = getattr(owner, name)

            @functools.wraps(function)
            def call(*args: Any, _function: Any = function, **named: Any) -> Any:
                rank = rank_of_thread()
                if rank is None:
                    return _function(*args, **named)
                with self.drawing(rank, number):
                    return _function(*args, **named)

            replace(stack, owner, name, call)


def _methods(module: Any, one: Any) -> list[str]:
    """The names in a module of methods of the same object as one of them."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__self__", None) is one.__self__
    ]
