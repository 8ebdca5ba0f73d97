"""The random numbers of models: each operator draws from its replica's stream, as gpusim.rng does.

An operator has the numbers of the draw (counter << 20) + number: counter counts micro-batches,
number the random operators of one. They do not depend on the execution or the other replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpusim.fallback import random as kernels

from ...torch import seeds as _  # noqa: F401 - it defines gpusim::seeds
from ...torch.private import DisableTorchFunction
from ...torch.tensors import TO_NUMPY, as_tensor

__all__ = ["SEEDS", "Draws", "seed_torch", "seeds", "streams"]

OPERATORS = 20
"""The number of bits that count the operators of one micro-batch."""

Size = Sequence[int]


def streams(
    seed: int, counter: int, replicas: Sequence[int] | NDArray[np.int64], device: Any = None
) -> Tensor:
    """The streams of these replicas in a micro-batch: int64 rows of seed, counter, replica."""
    rows = np.empty((len(replicas), 3), np.int64)
    rows[:, 0] = seed - 2**64 if seed >= 2**63 else seed
    rows[:, 1] = counter
    rows[:, 2] = replicas
    found = torch.from_numpy(rows)
    return found if device is None else found.to(device)


@torch.library.custom_op(
    "gpusim::draw",
    mutates_args=(),
    schema=(
        "(Tensor stream, str kind, float[] bounds, SymInt[] size, ScalarType dtype, int number)"
        " -> Tensor"
    ),
)
def draw(
    stream: Tensor,
    kind: str,
    bounds: Sequence[float],
    size: Size,
    dtype: torch.dtype,
    number: int,
) -> Tensor:
    """Random numbers of shape `size` for each row of `stream`, which is [..., 3]."""
    rows = stream.reshape(-1, 3).cpu().numpy()
    seed, counter = int(rows[0, 0]) % 2**64, int(rows[0, 1])
    call = (counter << OPERATORS) + number
    words = kernels.Stream(seed, call, rows[:, 2].astype(np.uint64))
    drawn = KINDS[kind](words, math.prod(size), TO_NUMPY[dtype], *bounds)
    tensor = as_tensor(np.ascontiguousarray(drawn)).reshape(*stream.shape[:-1], *size)
    return tensor.to(dtype=dtype, device=stream.device)


@draw.register_fake
def _fake(
    stream: Tensor, kind: str, bounds: Any, size: Size, dtype: torch.dtype, number: int
) -> Tensor:
    return stream.new_empty((*stream.shape[:-1], *size), dtype=dtype)


@draw.register_vmap
def _vmap(
    info: Any,
    in_dims: Any,
    stream: Tensor,
    kind: str,
    bounds: Any,
    size: Size,
    dtype: torch.dtype,
    number: int,
) -> tuple[Tensor, int]:
    return draw(stream.movedim(in_dims[0], 0), kind, bounds, size, dtype, number), 0


Dtype = np.dtype[Any]


def _uniform(stream: kernels.Stream, count: int, dtype: Dtype, low: float, high: float) -> Any:
    first, last = (np.asarray(bound).astype(dtype) for bound in (low, high))
    return kernels.uniform(stream.words(count), first, last, dtype)


def _normal(stream: kernels.Stream, count: int, dtype: Dtype, mean: float, std: float) -> Any:
    return kernels.normal(stream.words(count), np.float64(mean), np.float64(std), dtype)


def _bernoulli(stream: kernels.Stream, count: int, dtype: Dtype, p: float) -> Any:
    return kernels.bernoulli(stream.words(count), np.float64(p))


def _integers(stream: kernels.Stream, count: int, dtype: Dtype, low: float, high: float) -> Any:
    bounds = (int(low), int(high) - 1)
    first, last = (np.asarray([bound % 2**64], np.uint64) for bound in bounds)
    replicas = stream.replicas[:, None]
    drawn = kernels.integers(stream, stream.words(count), replicas, first, last, ndim=1)
    return drawn.astype(np.int64)


def _permutation(stream: kernels.Stream, count: int, dtype: Dtype) -> Any:
    return kernels.permutation(stream, count)


KINDS: dict[str, Callable[..., Any]] = {
    "uniform": _uniform,
    "normal": _normal,
    "bernoulli": _bernoulli,
    "integers": _integers,
    "permutation": _permutation,
}


class Draws:
    """The random numbers of one micro-batch; counts the operators that draw.

    **Attributes**:

    - `stream`: of the replica, or of all replicas in lockstep.
    - `number`: how many operators have drawn.
    """

    def __init__(self, stream: Tensor) -> None:
        self.stream = stream
        self.number = 0
        self._ended = False

    def __call__(
        self,
        kind: str,
        bounds: Sequence[float],
        size: Size,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Tensor:
        number = self.next_number()
        chosen = torch.get_default_dtype() if dtype is None else dtype
        found: Tensor = torch.ops.gpusim.draw.default(
            self.stream, kind, [*map(float, bounds)], [*size], chosen, number
        )
        return found if device is None else found.to(device)

    def end(self) -> None:
        """End the forward pass. Drawing is an error afterwards."""
        self._ended = True

    @contextmanager
    def separate(self, number: int, branch: int) -> Iterator[None]:
        """Draw from a separate stream, with a count of its own, inside the block.

        For code that does not run on all replicas. The number of an operator and that of its
        branch select the stream.
        """
        stream, count = self.stream, self.number
        shift = (2 * number + branch + 1) * 0x9E3779B97F4A7C15 % 2**63  # odd: seeds far apart
        with DisableTorchFunction():
            self.stream = torch.cat([stream[:1] + shift, stream[1:]])
        self.number = 0
        try:
            yield
        finally:
            self.stream, self.number = stream, count

    def like(self, x: Tensor, kind: str, *bounds: float) -> Tensor:
        """Random numbers of the shape and dtype of `x`."""
        return self(kind, bounds, x.shape, x.dtype, x.device)

    def next_number(self) -> int:
        """The number of the next operator.

        **Raises**:

        - RuntimeError: after `end`.
        """
        if self._ended:
            raise RuntimeError(
                "random numbers are drawn in the backward pass, which would be others than those "
                "of the forward pass: replicas that run in threads cannot recompute them"
            )
        self.number += 1
        return self.number - 1


SEEDS = torch.ops.gpusim.seeds.default
"""The operator that gives seeds to operators with random bits of their own."""


def seeds(draws: Draws, count: int) -> Tensor:
    """The result of `SEEDS`."""
    return draws("integers", (0, 2**63 - 1), (count,), torch.int64)


@contextmanager
def seed_torch(draws: Draws) -> Iterator[None]:
    """Seed torch's own generator from the stream, inside the block."""

    seed, counter, replica = draws.stream.tolist()
    call = (counter << OPERATORS) + draws.next_number()
    stream = kernels.Stream(seed % 2**64, call, np.array([replica], np.uint64))
    with torch.random.fork_rng(enabled=True):
        torch.manual_seed(int(stream.words(1)[0, 0]) >> 1)
        yield
