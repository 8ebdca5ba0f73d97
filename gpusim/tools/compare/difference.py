"""How much two tensors differ: elements, units in the last place, and norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Difference", "difference"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Difference:
    """The difference between tensors of one dtype and shape.

    **Attributes**:

    - `elements`, `differing`: how many there are, and how many differ in their bits, or in whether
      they are NaN.
    - `max_ulp`, `median_ulp`: of the floating-point elements that differ: how many values of the
      dtype lie between the two, and one more. None without such elements; NaN is left out.
    - `relative_norm`: the 2-norm of b - a divided by that of a, over finite elements.
    - `not_finite`: how many are NaN or infinite in one of both alone.
    """

    elements: int
    differing: int
    max_ulp: int | None
    median_ulp: float | None
    relative_norm: float
    not_finite: int = 0


def difference(a: Sequence[Array], b: Sequence[Array]) -> Difference:
    """Compare two lists of tensors.

    >>> one = np.array([1.0, 2.0, 3.0], np.float32)
    >>> other = np.array([1.0, 2.0, np.nextafter(np.float32(3), np.float32(4))], np.float32)
    >>> found = difference([one], [other])
    >>> found.differing, found.max_ulp, found.median_ulp
    (1, 1, 1.0)
    """
    elements = differing = alone = 0
    ulps: list[Array] = []
    squares = [0.0, 0.0]
    for one, other in zip(a, b, strict=True):
        x, y = (np.ascontiguousarray(each).reshape(-1) for each in (one, other))
        elements += x.size
        unequal = _bits(x) != _bits(y)
        if x.dtype.kind in "fcV":  # which NaN it is does not count
            nans = np.isnan(_parts(x)) & np.isnan(_parts(y))
            unequal &= ~nans.reshape(unequal.shape)
        if unequal.ndim == 2:  # complex
            unequal = unequal.any(axis=1)
        differing += int(np.count_nonzero(unequal))
        if x.dtype.kind in "fcV":
            ulps.append(_ulps(_parts(x[unequal]), _parts(y[unequal])))
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        with np.errstate(invalid="ignore", over="ignore"):
            p, q = x.astype(wide), y.astype(wide)
            finite = np.isfinite(p) & np.isfinite(q)
            alone += int(np.count_nonzero(np.isfinite(p) != np.isfinite(q)))
            squares[0] += float(np.sum(np.abs(q[finite] - p[finite]) ** 2))
            squares[1] += float(np.sum(np.abs(p[finite]) ** 2))
    apart = np.concatenate(ulps) if ulps else np.zeros(0, np.uint64)
    apart = apart[apart > 0]
    ratio = (squares[0] / squares[1]) ** 0.5 if squares[1] else float("inf") if squares[0] else 0.0
    return Difference(
        elements,
        differing,
        int(apart.max()) if apart.size else None,
        float(np.median(apart)) if apart.size else None,
        ratio,
        alone,
    )


def _bits(x: Array) -> Array:
    if x.dtype.kind == "c":
        return x.view(f"u{x.dtype.itemsize // 2}").reshape(-1, 2)
    return x.view(f"u{x.dtype.itemsize}")


def _parts(x: Array) -> Array:
    """Real and imaginary parts as real numbers."""
    return x.view(f"f{x.dtype.itemsize // 2}") if x.dtype.kind == "c" else x


def _ulps(x: Array, y: Array) -> Array:
    """The distance of floats as numbers of values; 0 where one is NaN."""
    width = 8 * x.dtype.itemsize
    sign = np.uint64(1 << (width - 1))
    keys = []
    for each in (x, y):
        bits = each.view(f"u{x.dtype.itemsize}").astype(np.uint64)
        keys.append(np.where(bits & sign, sign - (bits & (sign - np.uint64(1))), sign + bits))
    larger, smaller = np.maximum(*keys), np.minimum(*keys)
    return np.where(np.isnan(x) | np.isnan(y), np.uint64(0), larger - smaller)
