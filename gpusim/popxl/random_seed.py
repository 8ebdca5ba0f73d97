"""Seeds for random ops: a pair of uint32 for every replica, step and iteration."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MAX_UINT32",
    "MAX_UINT64",
    "create_seeds",
    "two_uint32_to_uint64",
    "uint64_to_two_uint32",
]

MAX_UINT32, MAX_UINT64 = 2**32 - 1, 2**64 - 1


def create_seeds(
    seed: int,
    offset: int = 0,
    batches_per_step: int = 1,
    gradient_accumulation_factor: int = 1,
    replicas: int = 1,
) -> NDArray[np.uint32]:
    """Seeds for a host stream. All of them differ, also from those of another `offset`.

    **Arguments**

    - `seed`: the seed of NumPy's generator, 0 to 2**64 - 1.
    - `offset`: the number of steps that have drawn seeds before.
    - `batches_per_step`, `gradient_accumulation_factor`, `replicas`: the numbers that a step takes.

    **Returns** uint32 (batches per step, gradient accumulation factor, replicas, 2), without the
    axes of size 1.

    **Raises**: ValueError: if the seed or the offset is negative or not a 64-bit number.

    >>> create_seeds(0, replicas=2).shape
    (2, 2)
    >>> bool((create_seeds(7, offset=1) != create_seeds(7)).any())
    True
    """
    uint64_to_two_uint32(seed)
    uint64_to_two_uint32(offset)
    sizes = batches_per_step, gradient_accumulation_factor, replicas
    count = int(np.prod(sizes))
    key = np.array([seed, 2], np.uint64)  # key (seed, 0) rounds, (seed, 1) draws
    # Each block of the counter-based generator has four 64-bit words, and a seed takes one.
    blocks = -(-count // 4)
    words = np.random.Philox(key=key, counter=[offset * blocks, 0, 0, 0]).random_raw(count)
    pairs = words.astype("<u8").view("<u4").astype(np.uint32)
    return pairs.reshape(*(size for size in sizes if size != 1), 2)


def uint64_to_two_uint32(num: int) -> tuple[int, int]:
    """The low and the high 32 bits of a number; ValueError if it is not a 64-bit number.

    >>> uint64_to_two_uint32(2**32 + 5)
    (5, 1)
    """
    if not 0 <= num <= MAX_UINT64:
        raise ValueError(f"Number is negative or cannot be represented as a uint64: {num}")
    return num & MAX_UINT32, num >> 32


def two_uint32_to_uint64(a: int, b: int) -> int:
    """The number with the low bits `a` and the high bits `b`; ValueError beyond 32 bits.

    >>> two_uint32_to_uint64(5, 1) == 2**32 + 5
    True
    """
    if not (0 <= a <= MAX_UINT32 and 0 <= b <= MAX_UINT32):
        raise ValueError(
            f"Either `a` or `b` are negative or cannot be represented as a uint32: {a}, {b}"
        )
    return b << 32 | a
