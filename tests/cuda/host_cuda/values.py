"""Values for the kernels' tests, and the comparison of bits.
The tests on a GPU use both too, where there need not be a compiler."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.fallback.formats import SUB_32_BIT


def bits_of(array: np.ndarray) -> np.ndarray:
    """The bits, with one NaN in the place of all: their payloads are unspecified."""
    if array.dtype.kind == "c":
        array = array[..., np.newaxis].view(f"f{array.dtype.itemsize // 2}")
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    if array.dtype.kind in "biu" and array.dtype not in SUB_32_BIT:
        return bits
    with np.errstate(invalid="ignore"):
        nans = np.isnan(array.astype(np.float64))
    return np.where(nans, bits.dtype.type(np.iinfo(bits.dtype).max), bits)


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert np.array_equal(bits_of(found), bits_of(expected)), (found, expected)


@np.errstate(all="ignore")
def moderate(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Numbers whose sums have something to round, and some special ones."""
    dtype, random = np.dtype(dtype), np.random.default_rng(seed)
    values = random.normal(size=shape) * 3
    if dtype.kind in "iu" and dtype not in SUB_32_BIT:
        return random.integers(0, 2 ** (8 * dtype.itemsize), shape, f"u{dtype.itemsize}").view(
            dtype
        )
    values = np.where(random.random(shape) < 0.02, np.inf, values)
    values = np.where(random.random(shape) < 0.1, -0.0, values)
    return values.astype(np.float32).astype(dtype)


@np.errstate(all="ignore")
def any_bits(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> np.ndarray:
    """Any bits, beside ordinary and subnormal numbers."""
    random = np.random.default_rng(seed)
    if dtype == np.bool_:
        return random.integers(0, 2, shape).astype(bool)
    raw = random.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    if dtype.kind in "iu" and dtype not in SUB_32_BIT:
        return raw
    tiny = np.array([0.0, -0.0, 1e-40, -1e-42, np.nan, np.inf, 2.0**-133, 2.0**-9])
    kind = random.integers(0, 3, shape)
    ordinary = random.normal(size=shape).astype(np.float32).astype(dtype)
    few = random.choice(tiny, shape).astype(dtype)
    return np.where(kind == 0, raw, np.where(kind == 1, ordinary, few)).astype(dtype)
