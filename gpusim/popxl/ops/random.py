"""Random numbers, dropout and seeds. A replica's numbers depend on its seed tensor alone.

The words are those of gpusim.rng (Philox, call 0, replica 0), with the seed tensor as seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback import random as kernels
from gpusim.libraries import to_host, to_library_of

from .. import dtypes
from .._definition import (
    Array,
    Arrays,
    Attributes,
    Definition,
    Specs,
    add_op,
    gradient_ops,
    no_gradient,
)
from ..tensor import Tensor, TensorSpec, constant
from ._stacked import broadcast_to, narrow, wide

__all__ = [
    "random_uniform",
    "random_normal",
    "dropout",
    "shaped_dropout",
    "create_random_seed",
    "split_random_seed",
]

_DRAWS = np.zeros(1, np.uint64)  # the batch offset, in Philox's counter, of the ops' numbers
_SEEDS = np.ones(1, np.uint64)  # and of new seeds: they differ from all numbers


def check_seed(seed: TensorSpec) -> None:
    """Raise ValueError if a tensor is not a seed."""
    if seed.shape != (2,) or seed.dtype is not dtypes.uint32:
        raise ValueError(f"seed Tensor must be shape=(2,) dtype=uint32. Provided {seed}")


def _words_by_seed(seeds: Array) -> list[int]:
    """The 64-bit seed of each replica; element 0 has the low half."""
    halves = to_host(seeds).astype(np.uint64)
    return (halves[:, 0] | halves[:, 1] << np.uint64(32)).tolist()


def _draw(seeds: Array, count: int, make: Callable[[NDArray[np.uint64]], NDArray[Any]]) -> Array:
    """[R, count] numbers made of each replica's words. Equal seeds are drawn once."""
    numbers = _words_by_seed(seeds)
    by_seed = {n: make(kernels.Stream(n, 0, _DRAWS).words(count)[0]) for n in set(numbers)}
    if len(by_seed) == 1:
        (row,) = by_seed.values()
        rows = np.broadcast_to(row, (len(numbers), count))
    else:
        rows = np.stack([by_seed[number] for number in numbers])
    return to_library_of(seeds, rows)


# Numbers


def _drawn_spec(inputs: Specs, attributes: Attributes) -> Specs:
    check_seed(inputs[0])
    dtype = attributes["dtype"]
    if dtype not in (dtypes.float16, dtypes.float32):
        raise TypeError(f"Random numbers are float16 or float32, not {dtype.name}")
    return [TensorSpec(tuple(attributes["shape"]), dtype)]


def _uniform(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (seeds,) = inputs
    shape, dtype = attributes["shape"], attributes["dtype"].as_numpy()
    low, high = dtype.type(attributes["low"]), dtype.type(attributes["high"])
    rows = _draw(seeds, math.prod(shape), lambda w: kernels.uniform(w, low, high, dtype))
    return [rows.reshape(-1, *shape)]


RANDOM_UNIFORM = Definition(
    "RandomUniform", _drawn_spec, _uniform, gradient=no_gradient, names=("seed_tensor",)
)


def random_uniform(
    seed_tensor: Tensor,
    shape: Iterable[int],
    low: float = 0.0,
    high: float = 1.0,
    dtype: dtypes.dtype = dtypes.float32,
) -> Tensor:
    """Uniformly distributed numbers.

    **Arguments**

    - `seed_tensor`: (2,) of uint32; replicas with equal seeds draw the same numbers.
    - `low`, `high`: the limits; `high` is excluded.
    - `dtype`: float16 or float32.

    **Raises**

    - ValueError: for another seed tensor.
    - TypeError: for another dtype.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.random_uniform(popxl.constant([42, 7], popxl.uint32), (2, 3))
    Tensor[randomuniform_out popxl.dtypes.float32 (2, 3)]
    """
    attributes = {"shape": tuple(shape), "low": low, "high": high, "dtype": dtype}
    return add_op(RANDOM_UNIFORM, [seed_tensor], attributes)[0]


def _normal(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (seeds,) = inputs
    shape, dtype = attributes["shape"], attributes["dtype"].as_numpy()
    mean, std = np.float64(attributes["mean"]), np.float64(attributes["std"])
    rows = _draw(seeds, math.prod(shape), lambda w: kernels.normal(w, mean, std, dtype))
    return [rows.reshape(-1, *shape)]


RANDOM_NORMAL = Definition(
    "RandomNormal", _drawn_spec, _normal, gradient=no_gradient, names=("seed_tensor",)
)


def random_normal(
    seed_tensor: Tensor,
    shape: Iterable[int],
    mean: float = 0.0,
    std: float = 1.0,
    dtype: dtypes.dtype = dtypes.float32,
) -> Tensor:
    """Normally distributed numbers.

    **Arguments**: `mean`, `std`: the mean and standard deviation; the others, and the errors, are
    those of `random_uniform`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     seed = popxl.constant([42, 7], popxl.uint32)
    ...     popxl.ops.random_normal(seed, (2, 3), dtype=popxl.float16)
    Tensor[randomnormal_out popxl.dtypes.float16 (2, 3)]
    """
    attributes = {"shape": tuple(shape), "mean": mean, "std": std, "dtype": dtype}
    return add_op(RANDOM_NORMAL, [seed_tensor], attributes)[0]


# Dropout: the mask may have fewer elements than the tensor, and is drawn again for the gradient


def _dropout_spec(inputs: Specs, attributes: Attributes) -> Specs:
    t, seed = inputs
    check_seed(seed)
    ratio, shape = attributes["ratio"], attributes["mask"]
    if not 0 <= ratio < 1:
        raise ValueError(f"The ratio of dropped elements must be in [0, 1), but it is {ratio}")
    try:
        fits = np.broadcast_shapes(shape, t.shape) == t.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"A mask of shape {shape} does not broadcast to the shape {t.shape}")
    return [TensorSpec(t.shape, t.dtype)]


def _dropout(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    t, seeds = inputs
    ratio, shape = attributes["ratio"], attributes["mask"]
    dropped = np.float64(ratio)
    mask = _draw(seeds, math.prod(shape), lambda w: kernels.bernoulli(w, dropped))
    mask = broadcast_to(xp, mask.reshape(-1, *shape), t.shape[1:])
    value = wide(t)
    scaled = xp.where(mask, value.dtype.type(0), value * value.dtype.type(1 / (1 - ratio)))
    return [narrow(scaled, t.dtype)]


def _dropout_family(op_type: str) -> Definition:
    grad = Definition(f"{op_type}Grad", _dropout_spec, _dropout)
    return Definition(
        op_type,
        _dropout_spec,
        _dropout,
        gradient_ops((grad, "1"), None),
        names=("t", "seed_tensor"),
    )


DROPOUT = _dropout_family("Dropout")


def dropout(t: Tensor, seed_tensor: Tensor, p: float) -> Tensor:
    """Set each element to zero with probability `p`, and divide the others by 1 - p.

    **Arguments**

    - `t`: a tensor of floating-point numbers.
    - `seed_tensor`: (2,) of uint32; replicas with equal seeds drop the same elements.

    **Raises**: ValueError: for another seed tensor, or if `p` is not in [0, 1).

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     seed = popxl.constant([42, 7], popxl.uint32)
    ...     popxl.ops.dropout(popxl.constant([1.0, 2.0]), seed, p=0.1)
    Tensor[dropout_out popxl.dtypes.float32 (2,)]
    """
    attributes = {"ratio": float(p), "mask": t.shape}
    return add_op(DROPOUT, [t, seed_tensor], attributes)[0]


SHAPED_DROPOUT = _dropout_family("ShapedDropout")


def shaped_dropout(t: Tensor, seed_tensor: Tensor, shape: Iterable[int], ratio: float) -> Tensor:
    """`dropout` by a mask of another shape, which broadcasts to the shape of `t`.

    **Arguments**

    - `t`: a tensor of floating-point numbers.
    - `seed_tensor`: (2,) of uint32; replicas with equal seeds drop the same elements.
    - `shape`: the shape of the mask; (n, 1), for example, drops whole rows of (n, m).
    - `ratio`: the probability of zeros; the other elements are divided by 1 - ratio.

    **Raises**: ValueError: for another seed tensor or shape, or if `ratio` is not in [0, 1).

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     seed = popxl.constant([42, 7], popxl.uint32)
    ...     t = popxl.constant(np.ones((4, 8), np.float32))
    ...     popxl.ops.shaped_dropout(t, seed, (4, 1), 0.5)
    Tensor[shapeddropout_out popxl.dtypes.float32 (4, 8)]
    """
    attributes = {"ratio": float(ratio), "mask": tuple(shape)}
    return add_op(SHAPED_DROPOUT, [t, seed_tensor], attributes)[0]


# Seeds


def _seed_spec(inputs: Specs, attributes: Attributes) -> Specs:
    seed, modifier = inputs
    check_seed(seed)
    if modifier.shape != () or not modifier.dtype.is_int:
        raise ValueError(f"The modifier must be a scalar integer, but it is {modifier}")
    return [TensorSpec((2,), dtypes.uint32)]


def _modify_seed(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    seeds, modifiers = inputs
    numbers = _words_by_seed(seeds)
    calls = (int(modifier) % 2**64 for modifier in to_host(modifiers).reshape(-1))
    words = [
        kernels.Stream(number, call, _SEEDS).words(1)[0, 0]
        for number, call in zip(numbers, calls, strict=True)
    ]
    new = np.array(words, np.uint64)
    halves = np.stack([new & np.uint64(0xFFFF_FFFF), new >> np.uint64(32)], axis=-1)
    return [to_library_of(seeds, halves.astype(np.uint32))]


MODIFY_RANDOM_SEED = Definition(
    "ModifyRandomSeed", _seed_spec, _modify_seed, gradient=no_gradient, names=("seed", "modifier")
)


def create_random_seed(seed: Tensor, modifier: Tensor) -> Tensor:
    """Make a seed of a seed and a number. Different numbers give unrelated seeds.

    **Arguments**

    - `seed`: (2,) of uint32.
    - `modifier`: a scalar integer.

    **Raises**: ValueError: for other shapes or dtypes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     seed = popxl.constant([42, 7], popxl.uint32)
    ...     popxl.ops.create_random_seed(seed, popxl.constant(3, popxl.uint32))
    Tensor[modified_seed popxl.dtypes.uint32 (2,)]
    """
    if seed.shape != (2,) or seed.dtype is not dtypes.uint32:
        raise ValueError(f"seed Tensor must be shape=(2,) dtype=uint32. Provided {seed}")
    outputs = add_op(MODIFY_RANDOM_SEED, [seed, modifier], output_names=["modified_seed"])
    return outputs[0]


def split_random_seed(seed: Tensor, n: int = 2) -> tuple[Tensor, ...]:
    """Make `n` unrelated seeds of one.

    **Raises**: ValueError: if `seed` is not a seed tensor.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     len(popxl.ops.split_random_seed(popxl.constant([42, 7], popxl.uint32), 3))
    3
    """
    return tuple(create_random_seed(seed, constant(i, dtypes.uint32)) for i in range(n))
