"""The random generators of simulated GPUs.

Each rank has a generator for each of its GPUs, as a process has. torch seeds those of a process
from the operating system, so that they differ between ranks: here they start from seeds of the rank
(`..own.seeds`). They are generators of the CPU: a real GPU draws other numbers from the same seed.

torch's functions draw from the one default generator. While a function works on a GPU, that
generator has the state of the GPU's (`GpuGenerators.drawing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..own.draws import lasting, made
from ..private import generator_position, is_random_operation

__all__ = ["DRAWS", "RANDOM", "GpuGenerators", "draws", "position"]

DRAWS = (
    "{name} on a tensor of 'cuda' drew from the CPU's generator, as gpusim (device='cpu') does not "
    "know it as a random function. On a GPU it draws from the GPU's, and the CPU's is left alone"
)

_genuine: Any = torch.Generator
_default: Any = torch.default_generator


class GpuGenerators(Sequence[Any]):
    """A rank's `torch.cuda.default_generators`; each is made when it is first used.

    **Arguments**: `seed_of` is the seed that a GPU's generator starts with.
    """

    def __init__(self, count: int, seed_of: Callable[[int], int]) -> None:
        self.size = count
        self.seed_of = seed_of
        self.made: dict[int, torch.Generator] = {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(self.size)))
        index = range(self.size)[index]  # IndexError, as of a tuple
        if index not in self.made:
            self.made[index] = _genuine().manual_seed(self.seed_of(index))
        return self.made[index]

    def seed_all(self, seed: int) -> None:
        """Seed the generators of all GPUs."""
        self.seed_of = lambda index: seed
        for generator in self.made.values():
            generator.manual_seed(seed)

    @contextmanager
    def drawing(self, index: int) -> Iterator[None]:
        """A block in which torch's functions draw from the generator of a GPU."""
        generator = self[index]
        with lasting():
            _default.set_state(generator.get_state())
            try:
                yield
            finally:
                generator.set_state(_default.get_state())


_position: Callable[[], bytes] | None = generator_position()


def position() -> Any:
    """A value that changes with each draw of the calling thread's rank from the CPU's generator.

    It is None, always, where it can't be read.
    """
    draws = made()
    if draws is not None or _position is None:
        return draws
    return _position()


def _named(owner: Any, names: str) -> Iterator[Any]:
    for name in names.split():
        if hasattr(owner, name):
            yield getattr(owner, name)


#: Functions that draw; operations of torch.ops have a tag.
RANDOM = frozenset(
    [
        *_named(
            torch,
            "rand randn randint randperm normal bernoulli multinomial poisson binomial rand_like "
            "randn_like randint_like dropout dropout_ alpha_dropout alpha_dropout_ "
            "feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ "
            "native_dropout rrelu rrelu_ lstm gru rnn_tanh rnn_relu svd_lowrank pca_lowrank "
            "lobpcg _standard_gamma _sample_dirichlet",
        ),
        *_named(
            torch.Tensor,
            "normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ bernoulli_ "
            "bernoulli multinomial",
        ),
        *_named(
            nn.functional,
            "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu "
            "rrelu_ gumbel_softmax fractional_max_pool2d fractional_max_pool2d_with_indices "
            "fractional_max_pool3d fractional_max_pool3d_with_indices "
            "scaled_dot_product_attention multi_head_attention_forward",
        ),
        *_named(
            nn.init,
            "normal_ uniform_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ "
            "xavier_normal_ orthogonal_ sparse_",
        ),
    ]
)


def draws(function: Any) -> bool:
    """Whether a function of torch draws random numbers.

    >>> draws(torch.nn.functional.dropout), draws(torch.ops.aten.normal_.default), draws(torch.add)
    (True, True, False)
    """
    return function in RANDOM or is_random_operation(function)
