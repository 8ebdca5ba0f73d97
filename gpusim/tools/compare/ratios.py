"""Relations between what two runs have: a factor, a cast, and last bits of other additions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpusim.reduction import as_reduction

__all__ = [
    "COARSE",
    "Cast",
    "Factor",
    "cast_of",
    "coherence",
    "condition",
    "factor_of",
    "rounding_threshold",
]

Array = NDArray[Any]

LOCAL = 32
"""Units of roundoff that an operand may have from what its rank added before.

A sum of m terms has a rounding error of about sqrt(m) units where errors are independent (Higham
and Mary, "A new approach to probabilistic rounding error analysis", 2019): 32 are those of 1,000
terms, such as a layer's product or a batch's mean."""

NARROWER = {
    "float64": ("float32", "bfloat16", "float16"),
    "float32": ("bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"),
    "float16": ("float8_e5m2", "float8_e4m3fn"),
    "bfloat16": ("float8_e5m2", "float8_e4m3fn"),
}
NARROW = 2.0**-3
"""The unit roundoff of wires whose format no dtype has, as int8 with a scale or 4 bits."""
FLOATS = "fcV"
"""Kinds of dtypes that round; ml_dtypes are of kind V."""


@dataclass(frozen=True)
class Factor:
    """A constant c by which all of b are c times a.

    **Attributes**: `value` is c, and `name` how it is written, as 1/4. `exact` says whether c is a
    power of two and b has the very bits of c times a.
    """

    value: float
    name: str
    exact: bool


@dataclass(frozen=True)
class Cast:
    """One run (`of`: "a" or "b") has the other's values, rounded to a narrower dtype."""

    dtype: str
    of: str


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """Half of a dtype's epsilon: the largest relative error of one rounding.

    >>> unit_roundoff(np.dtype(np.float32)) == 2.0**-24
    True
    """
    return 0.0 if dtype.kind not in FLOATS else float(ml_dtypes.finfo(dtype).eps) / 2


COARSE = 0.125
"""A relative norm above which a difference is not called rounding, whatever the threshold is.

Of narrow wires the threshold is above 1, so that unrelated sums lie below it too."""


def rounding_threshold(
    dtype: np.dtype[Any],
    terms: Sequence[int],
    condition: float | None = None,
    reductions: Sequence[str | None] = (),
) -> float:
    """The relative 2-norm up to which two sums may differ by rounding alone.

    A sum of n terms x has an error of at most (n - 1) u sum |x| in any order (Higham, "Accuracy and
    Stability of Numerical Algorithms", 4.2), with u the unit roundoff; two such sums differ by at
    most the sum of both errors. Each term may itself be a rounded sum of its rank, by LOCAL units
    in each run. Divided by the norm of the sum, this is

        u ((n_a - 1) + (n_b - 1) + 2 LOCAL) c,    c = |sum of |x|| / |sum of x|.

    **Arguments**:

    - `dtype`: of the results.
    - `terms`: n of each sum.
    - `condition`: c, from the operands; None: sqrt(n), of terms with random signs.
    - `reductions`: the texts of the records' Reductions. An accumulator or wire narrower than
      `dtype` rounds more: u is then the narrowest one's.

    >>> rounding_threshold(np.dtype(np.float32), [4, 4], 1.0) == 70 * 2.0**-24
    True
    """
    u = unit_roundoff(dtype)
    for text in reductions:
        u = max(u, _roundoff_of(text, u))
    factor = max(terms) ** 0.5 if condition is None else condition
    return u * (sum(n - 1 for n in terms) + LOCAL * len(terms)) * factor


def _roundoff_of(text: str | None, least: float) -> float:
    """The unit roundoff of a Reduction's accumulator and wire; `least` where it is not known."""
    try:
        reduction = as_reduction(text) if text else None
    except (TypeError, ValueError):  # of another version
        reduction = None
    if reduction is None:
        return least
    found = least
    for given in (reduction.accumulate, getattr(reduction.wire, "format", reduction.wire)):
        if given is not None:
            found = max(found, _roundoff(given))
    return found


def _roundoff(given: Any) -> float:
    """The unit roundoff of a dtype, or of a format that no dtype has."""
    try:
        return float(ml_dtypes.finfo(given).eps) / 2
    except (TypeError, ValueError, KeyError):
        bits = getattr(given, "precision", None)
        return float(2.0**-bits) if isinstance(bits, int) else NARROW


def condition(operands: Sequence[Sequence[Array]], total: Sequence[Array]) -> float | None:
    """c of `rounding_threshold`: operands of each rank, and their sum. None if that is zero."""
    magnitudes = [sum(np.abs(_wide(x)) for x in parts) for parts in zip(*operands, strict=True)]
    above = float(np.sqrt(sum(np.sum(m**2) for m in magnitudes)))
    below = float(np.sqrt(sum(np.sum(np.abs(_wide(x)) ** 2) for x in total)))
    return above / below if np.isfinite(above) and np.isfinite(below) and below else None


def factor_of(
    a: Sequence[Array], b: Sequence[Array], likely: Sequence[Fraction] = ()
) -> Factor | None:
    """The constant factor between two lists of tensors; None if there is none, or it is 1.

    Where fewer than three elements are not zero, a constant proves nothing: then the factor must be
    one of those that are `likely`.

    >>> x = np.array([1.0, 3.0, 0.1], np.float32)
    >>> factor_of([x], [x / 4])
    Factor(value=0.25, name='1/4', exact=True)
    >>> factor_of([x[:1]], [x[:1] * 3]) is None
    True
    >>> factor_of([x], [x[::-1]]) is None
    True
    """
    if not a or [x.dtype for x in a] != [y.dtype for y in b]:
        return None
    if any(x.dtype.kind not in FLOATS for x in a):
        return None
    x, y = (np.concatenate([_flat(each) for each in side]) for side in (a, b))
    if x.shape != y.shape or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    square = float(x @ x)
    if not square or not np.isfinite(square):
        return None
    value = float(x @ y) / square
    tolerance = 4 * LOCAL * unit_roundoff(a[0].dtype)
    if not value or abs(value - 1) <= tolerance:
        return None
    if float(np.linalg.norm(y - value * x)) > tolerance * float(np.linalg.norm(y)):
        return None
    nice = _nice(value, tolerance, likely)
    if np.count_nonzero(x) < 3 and nice not in likely:
        return None
    if nice is None:
        return Factor(value, f"{value:.6g}", False)
    exact = _power_of_two(nice) and bool(np.array_equal(x * float(nice), y))
    return Factor(float(nice), str(nice), exact)


def _nice(value: float, tolerance: float, likely: Sequence[Fraction]) -> Fraction | None:
    """A simple fraction within the tolerance: one that is likely, n, 1/n, or of small numbers."""
    tried = [*likely, Fraction(round(value))]
    if abs(value) < 1:
        tried.append(Fraction(1, round(1 / value)))
    tried.append(Fraction(value).limit_denominator(16))
    for each in tried:
        if each and abs(float(each) - value) <= tolerance * abs(value):
            return each
    return None


def _power_of_two(value: Fraction) -> bool:
    return all(n & (n - 1) == 0 for n in (abs(value.numerator), value.denominator))


def cast_of(a: Sequence[Array], b: Sequence[Array]) -> Cast | None:
    """The narrower dtype to which one side's values are the other's rounded; None without one.

    The dtypes of both sides may differ or not: a program may cast and cast back.

    >>> x = np.array([0.1, 0.7], np.float32)
    >>> cast_of([x], [x.astype(ml_dtypes.bfloat16)])
    Cast(dtype='bfloat16', of='b')
    >>> cast_of([x.astype(np.float16).astype(np.float32)], [x])
    Cast(dtype='float16', of='a')
    """
    for of, wide, narrow in (("b", a, b), ("a", b, a)):
        if not wide or any(x.shape != y.shape for x, y in zip(wide, narrow, strict=True)):
            continue
        for name in NARROWER.get(wide[0].dtype.name, ()):
            dtype = np.dtype(getattr(ml_dtypes, name, name))
            if narrow[0].dtype not in (dtype, wide[0].dtype):
                continue
            if all(_is_cast(x, y, dtype) for x, y in zip(wide, narrow, strict=True)):
                return Cast(name, of)
    return None


def _is_cast(wide: Array, narrow: Array, dtype: np.dtype[Any]) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        expected = wide.astype(dtype).astype(np.float64)
        return bool(np.array_equal(expected, narrow.astype(np.float64), equal_nan=True))


def coherence(a: Sequence[Sequence[Array]], b: Sequence[Sequence[Array]]) -> float:
    """How much the differences on the ranks agree: 1 if all are the same, 0 if they cancel.

    Other weights change the gradients of all ranks in a similar way; other data change those of
    each rank in its own, and R independent differences give 1/R.

    >>> x = np.eye(2)
    >>> coherence([[x[0]], [x[0]]], [[x[1]], [x[1]]]), coherence([[x[0]], [x[1]]], [[x[1]], [x[0]]])
    (1.0, 0.0)
    """
    deltas = [
        np.concatenate([_flat(y) - _flat(x) for x, y in zip(one, other, strict=True)])
        for one, other in zip(a, b, strict=True)
    ]
    squares = sum(float(d @ d) for d in deltas)
    together = np.sum(deltas, axis=0)
    return float(together @ together) / (len(deltas) * squares) if squares else 0.0


def _wide(x: Array) -> Array:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _flat(x: Array) -> Array:
    """The elements as a vector of float64; complex ones as two each."""
    return np.ascontiguousarray(_wide(x)).reshape(-1).view(np.float64)
