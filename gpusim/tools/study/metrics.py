"""The figures of a study: how far a reduction's result is from the exact sum.

They are measured window by window; `merged` combines windows in their order, to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fallback.formats import FLOAT32, SUB_32_BIT
from gpusim.tools.study.reference import Exact

__all__ = ["METRICS", "Metrics", "Partial", "measure", "merged"]


@dataclass(frozen=True)
class Metrics:
    """The figures of one reduction, over all elements of its result."""

    relative_error: float
    max_ulp: float
    bias: float
    mean_error: float
    correct: float
    overflowed: float

    def __eq__(self, other: object) -> bool:
        """Whether all figures are the same; NaN is the same as NaN."""
        return repr(self) == repr(other) if isinstance(other, Metrics) else NotImplemented

    def __hash__(self) -> int:
        return hash(repr(self))


METRICS: dict[str, str] = {
    "relative_error": "relative error (2-norm)",
    "max_ulp": "largest error (ulp)",
    "bias": "bias (mean signed error / rms of the sums)",
    "mean_error": "mean signed error",
    "correct": "correctly rounded (share)",
    "overflowed": "not finite (share)",
}


@dataclass(frozen=True)
class Partial:
    """The figures of one window; norms, sums and error are those of its finite elements."""

    elements: int
    finite: int
    error_norm: float
    exact_norm: float
    error_sum: float
    max_ulp: float
    correct: int

    @property
    def record(self) -> dict[str, float]:
        return asdict(self)


def measure(result: NDArray[Any], exact: Exact) -> Partial:
    """Compare a result with the exact sums."""
    values = result.astype(np.float64)
    best = exact.rounded(result.dtype).astype(np.float64)
    equal = (values == best) | (np.isnan(values) & np.isnan(best))
    finite = np.isfinite(values) & np.isfinite(exact.high)
    high, low = exact.high[finite], exact.low[finite]
    error = (values[finite] - high) - low
    with np.errstate(over="ignore"):
        ulps = np.abs(error) / ulp(exact.odd()[finite], result.dtype)
    return Partial(
        elements=values.size,
        finite=int(np.count_nonzero(finite)),
        error_norm=_norm(error),
        exact_norm=_norm(high),
        error_sum=math.fsum(error),
        max_ulp=float(ulps.max(initial=0.0)),
        correct=int(np.count_nonzero(equal)),
    )


def ulp(values: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[np.float64]:
    """The unit in the last place of the format around each value; subnormals have one ulp.

    >>> ulp(np.array([1.0, 1.99, 2.0, 1e-9]), np.dtype(np.float16)).tolist() == [
    ...     2**-10, 2**-10, 2**-9, 2**-24]
    True
    """
    narrow = SUB_32_BIT.get(dtype)
    if narrow is not None:
        fraction, least, most = narrow.fraction_bits, narrow.min_exponent, narrow.max_exponent
    else:
        fraction, least, most = (23, -126, 127) if dtype == FLOAT32 else (52, -1022, 1023)
    exponents = np.where(values == 0, least, np.frexp(values)[1] - 1)
    exponents = np.clip(exponents, least, most)
    return np.ldexp(1.0, exponents - fraction)


def _norm(values: NDArray[np.float64]) -> float:
    """The 2-norm, without overflow and with the same bits on every machine."""
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    scale = math.ldexp(1.0, max(math.frexp(largest)[1], -1021))
    return scale * math.sqrt(math.fsum(np.square(values / scale)))


def merged(parts: Sequence[Partial]) -> Metrics:
    """The figures of the whole, from those of its windows in order."""
    elements = sum(part.elements for part in parts)
    finite = sum(part.finite for part in parts)
    error = math.hypot(*(part.error_norm for part in parts))
    exact = math.hypot(*(part.exact_norm for part in parts))
    if not finite:
        nothing = (math.nan,) * 4
        relative, largest, bias, mean = nothing
    else:
        relative = error / exact if exact else math.inf if error else 0.0
        largest = max(part.max_ulp for part in parts)
        mean = math.fsum(part.error_sum for part in parts) / finite
        rms = exact / math.sqrt(finite)
        bias = mean / rms if rms else math.copysign(math.inf, mean) if mean else 0.0
    return Metrics(
        relative_error=relative,
        max_ulp=largest,
        bias=bias,
        mean_error=mean,
        correct=sum(part.correct for part in parts) / elements,
        overflowed=1 - finite / elements,
    )
