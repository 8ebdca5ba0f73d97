"""Standard normal numbers from 64-bit words: the quantile function, in IEEE operations only.
Every step is one correctly rounded + - * / or sqrt, so that any IEEE machine gives the same bits.

Word w, read as a signed integer s, stands for the probability (s + 1/2) / 2**64 + 1/2, which is
never 0 or 1; the number is its quantile. Numbers rise with s, s and ~s give opposite ones, and
the largest is 9.16. The rational approximations are those of Wichura's algorithm AS241 (PPND16;
Applied Statistics 37, 1988, 477-484); the logarithm is made here, of the bits of its argument.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from . import kernels, memory

__all__ = ["normal_quantile"]

Reals = NDArray[np.float64]
Coefficients = tuple[float, ...]

# Words at a time, as measured: buffers that stay in the cache, and few calls of NumPy.
BLOCK = 32 * 1024

CENTRE = 0.425
CENTRE_SQUARED = 0.180625
"""Where q, the distance from 1/2, is at most CENTRE: q * P(r) / Q(r), r = CENTRE_SQUARED - q*q."""
TAIL, FAR_TAIL = 1.6, 5.0
"""Else, where p is the distance from 1: P(r) / Q(r), r = sqrt(-log(p)) - TAIL; from another ratio
with FAR_TAIL where the root is larger than that."""

# P and Q, from the highest power down.
CENTRE_RATIO: tuple[Coefficients, Coefficients] = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
TAIL_RATIO: tuple[Coefficients, Coefficients] = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)
FAR_TAIL_RATIO: tuple[Coefficients, Coefficients] = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        1.24266094738807843860e-3,
        2.65321895265761230930e-2,
        2.96560571828504891230e-1,
        1.78482653991729133580e0,
        5.46378491116411436990e0,
        6.65790464350110377720e0,
    ),
    (
        2.04426310338993978564e-15,
        1.42151175831644588870e-7,
        1.84631831751005468180e-5,
        7.86869131145613259100e-4,
        1.48753612908506148525e-2,
        1.36929880922735805310e-1,
        5.99832206555887937690e-1,
        1.0,
    ),
)

# log(m) = 2 * atanh(s), s = (m - 1) / (m + 1); for m within sqrt(1/2) and sqrt(2) the term after
# these is less than 2**-60 of the first. From the highest power of s*s down.
ATANH_SERIES: Coefficients = tuple(2.0 / (2 * n + 1) for n in range(11, 0, -1))
# log(2) in two parts: the product of the first with an exponent is exact.
LOG2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LOG2_LOW = float.fromhex("0x1.a39ef35793c76p-33")

_SIGN = np.uint64(1 << 63)
_FRACTION = np.uint64((1 << 52) - 1)
_ONE = np.uint64(1023 << 52)
_WORD = 2.0**-64


def _polynomial(coefficients: Coefficients, x: Reals) -> Reals:
    """Horner's rule, a multiplication and an addition for each coefficient."""
    total = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        total += coefficient
        total *= x
    total += coefficients[-1]
    return total


def _ratio(ratio: tuple[Coefficients, Coefficients], x: Reals) -> Reals:
    value = _polynomial(ratio[0], x)
    value /= _polynomial(ratio[1], x)
    return value


def natural_log(x: Reals) -> Reals:
    """The logarithm of normal positive numbers, within one unit in the last place for x < 1/2.

    >>> natural_log(np.array([0.25, 0.5, 2.0**-65])) / math.log(2)
    array([ -2.,  -1., -65.])
    """
    bits = x.view(np.uint64)
    exponent = (bits >> np.uint64(52)).astype(np.int64).astype(np.float64)
    exponent -= 1023.0
    mantissa = ((bits & _FRACTION) | _ONE).view(np.float64)
    large = (mantissa > math.sqrt(2.0)).astype(np.float64)
    exponent += large
    large *= -0.5
    large += 1.0
    mantissa *= large  # by 1 or 1/2
    s = mantissa - 1.0  # exact
    mantissa += 1.0
    s /= mantissa
    square = s * s
    series = _polynomial(ATANH_SERIES, square)
    series *= square
    series *= s
    series += exponent * LOG2_LOW
    series += s + s
    series += exponent * LOG2_HIGH
    return series


def _centre(q: Reals) -> Reals:
    r = q * q
    np.subtract(CENTRE_SQUARED, r, out=r)
    value = _ratio(CENTRE_RATIO, r)
    value *= q
    return value


def _tail(p: Reals) -> Reals:
    """The quantile of 1 - p, for p of at most 1/2 - CENTRE."""
    r = np.sqrt(-natural_log(p))
    far = r > FAR_TAIL
    value = _ratio(TAIL_RATIO, r - TAIL)
    if far.any():
        value[far] = _ratio(FAR_TAIL_RATIO, r[far] - FAR_TAIL)
    return value


def normal_quantile(words: NDArray[np.uint64]) -> Reals:
    """The standard normal number that each word stands for, float64, in the shape of `words`.

    The results lie within 6 units in the last place of the exact quantiles.

    >>> normal_quantile(np.array([0, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)).round(2)
    array([ 0.  ,  9.16, -9.16, -0.  ])
    """
    out = memory.empty(words.shape, np.float64)
    flat, flat_out = words.reshape(-1), out.reshape(-1)
    compiled = kernels.compiled()
    if flat.size >= BLOCK // 8 and compiled is not None and flat.flags.c_contiguous:
        if compiled.normal_quantile(flat, flat_out):
            return out
    for start in range(0, flat.size, BLOCK):
        block = slice(start, start + BLOCK)
        flat_out[block] = _quantile_block(flat[block])
    return out


def _quantile_block(words: NDArray[np.uint64]) -> Reals:
    signed = words.view(np.int64)
    magnitudes = signed ^ (signed >> 63)  # s, or ~s where it is negative: the distance from 1/2
    q = magnitudes.astype(np.float64)
    q += 0.5
    q *= _WORD
    value = _centre(q)
    tail = np.flatnonzero(q > CENTRE)
    if tail.size:
        p = (np.int64(2**63 - 1) - magnitudes[tail]).astype(np.float64)  # the distance from 1
        p += 0.5
        p *= _WORD
        value[tail] = _tail(p)
    bits = value.view(np.uint64)
    bits |= words & _SIGN
    return value
