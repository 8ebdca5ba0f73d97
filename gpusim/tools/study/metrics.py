"""The figures of a study: how far a reduction's result is from the exact sum.

They are measured window by window; `merged` combines windows in their order, to the same bits.
Their memory does not depend on the number of elements: quantiles come from a histogram.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback.formats import FLOAT32, FLOAT64, SUB_32_BIT, FormatInfo
from gpusim.formats import Format
from gpusim.tools.study.reference import Exact

__all__ = [
    "METRICS",
    "RESOLUTION",
    "SIGNED",
    "Metrics",
    "Partial",
    "Sizes",
    "bounds",
    "measure",
    "merged",
]

BITS = 5
RESOLUTION = 2.0 ** -(BITS + 1)
"""The largest relative error of a quantile: half a bucket of its histogram."""
LIMIT = 64
"""The histogram counts relative errors from 2**-64 to 2**64; others are in its outer buckets."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

_INFO: dict[np.dtype[Any], FormatInfo] = {
    FLOAT32: Format(8, 23).info,
    FLOAT64: Format(11, 52).info,
    **SUB_32_BIT,
}


@dataclass(frozen=True)
class Metrics:
    """The figures of one reduction, over all elements of its result."""

    relative_error: float
    input_error: float
    max_ulp: float
    bias: float
    mean_error: float
    cosine: float
    error_p50: float
    error_p90: float
    error_p99: float
    error_max: float
    backward_p50: float
    backward_p99: float
    backward_max: float
    sign_flips: float
    correct: float
    overflowed: float
    infinite_input: float

    def __eq__(self, other: object) -> bool:
        """Whether all figures are the same; NaN is the same as NaN."""
        return repr(self) == repr(other) if isinstance(other, Metrics) else NotImplemented

    def __hash__(self) -> int:
        return hash(repr(self))


METRICS: dict[str, str] = {
    "relative_error": "relative error (2-norm)",
    "input_error": "error against the unrounded input",
    "max_ulp": "largest error (ulp)",
    "bias": "bias (mean error / rms of the sums)",
    "mean_error": "mean signed error",
    "cosine": "cosine similarity",
    "error_p50": "relative error of an element, median",
    "error_p90": "relative error of an element, 90 % quantile",
    "error_p99": "relative error of an element, 99 % quantile",
    "error_max": "relative error of an element, largest",
    "backward_p50": "error / sum of |x|, median",
    "backward_p99": "error / sum of |x|, 99 % quantile",
    "backward_max": "error / sum of |x|, largest",
    "sign_flips": "sign flipped (share)",
    "correct": "correctly rounded (share)",
    "overflowed": "overflow (share)",
    "infinite_input": "infinite input (share)",
}
SIGNED = ("bias", "mean_error")
BETWEEN = {"cosine": (-1.0, 1.0)} | dict.fromkeys(
    ("sign_flips", "correct", "overflowed", "infinite_input"), (0.0, 1.0)
)
"""The least and the largest value of a figure; those that are not signed or here begin at 0."""


def bounds(metric: str) -> tuple[float, float]:
    """The least and the largest value of a figure.

    >>> bounds("correct"), bounds("bias")
    ((0.0, 1.0), (-inf, inf))
    """
    return BETWEEN.get(metric, (-math.inf if metric in SIGNED else 0.0, math.inf))


@dataclass(frozen=True)
class Partial:
    """The figures of one window; norms, sums and errors are those of its finite elements.

    `alignment` is the cosine of the angle between the errors and the exact sums. `errors` is the
    histogram of the elements' relative errors: how many are zero, how many infinite, the number of
    the first bucket, and the count in each bucket from there on. `backward` is that of the errors
    over the sums of magnitudes.
    """

    elements: int
    finite: int
    infinite: int
    error_norm: float
    exact_norm: float
    input_error_norm: float
    input_norm: float
    alignment: float
    error_sum: float
    max_ulp: float
    error_max: float
    flipped: int
    correct: int
    errors: tuple[int, ...]
    backward_max: float
    backward: tuple[int, ...]

    @property
    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Partial:
        """Take the fields out of a record. **Raises**: KeyError, ValueError if they are not so."""
        found = {field.name: record.pop(field.name) for field in fields(cls)}
        for name in ("errors", "backward"):
            counts = found[name]
            if not isinstance(counts, list) or len(counts) < 3 or set(map(type, counts)) != {int}:
                raise ValueError(f"{name}: expected a list of integers")
            found[name] = tuple(counts)
        return cls(**found)


@dataclass(frozen=True)
class Sizes:
    """The sums of the magnitudes of what was added, each times two to the power of -exponent."""

    values: NDArray[np.float64]
    exponents: NDArray[Any] | None = None

    def scaled(self, errors: NDArray[np.float64], where: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Errors of some elements, scaled as their sums are."""
        return errors if self.exponents is None else np.ldexp(errors, -self.exponents[where])

    def divided(self, count: int) -> Sizes:
        """Those of a mean."""
        return Sizes(self.values / count, self.exponents)


def measure(
    result: NDArray[Any],
    exact: Exact,
    unrounded: Exact | None = None,
    infinite: NDArray[np.bool_] | None = None,
    target: np.dtype[Any] | FormatInfo | None = None,
    sizes: Sizes | None = None,
) -> Partial:
    """Compare a result with the exact sums.

    **Arguments**:

    - `result`: in any dtype that holds its values.
    - `exact`: the exact sums of the values that were added.
    - `unrounded`: those of the values before they were rounded. None: the same.
    - `infinite`: where an input was infinite. None: nowhere.
    - `target`: the format of the result, None for its dtype.
    - `sizes`: the sums of the values' magnitudes. None: those of the exact sums.
    """
    target = result.dtype if target is None else target
    unrounded = unrounded or exact
    values = result.astype(np.float64)
    best = exact.rounded(target).astype(np.float64)
    equal = (values == best) | (np.isnan(values) & np.isnan(best))
    with np.errstate(invalid="ignore"):
        flipped = np.sign(values) * np.sign(exact.high) < 0
    finite = np.isfinite(values) & np.isfinite(exact.high) & np.isfinite(unrounded.high)
    high, low = exact.high[finite], exact.low[finite]
    error = (values[finite] - high) - low
    input_error = (values[finite] - unrounded.high[finite]) - unrounded.low[finite]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ulps = np.abs(error) / ulp(exact.odd()[finite], target)
        relative = np.where(error == 0, 0.0, np.abs(error / high))
        backward = np.abs(error) if sizes is None else sizes.scaled(np.abs(error), finite)
        of = np.abs(high) if sizes is None else sizes.values[finite]
        backward = np.where(error == 0, 0.0, backward / of)
    error_norm, exact_norm = _norm(error), _norm(high)
    return Partial(
        elements=values.size,
        finite=int(np.count_nonzero(finite)),
        infinite=0 if infinite is None else int(np.count_nonzero(infinite)),
        error_norm=error_norm,
        exact_norm=exact_norm,
        input_error_norm=_norm(input_error),
        input_norm=_norm(unrounded.high[finite]),
        alignment=_alignment(error, error_norm, high, exact_norm),
        error_sum=math.fsum(error.tolist()),
        max_ulp=float(ulps.max(initial=0.0)),
        error_max=float(relative.max(initial=0.0)),
        flipped=int(np.count_nonzero(flipped)),
        correct=int(np.count_nonzero(equal)),
        errors=_histogram(relative),
        backward_max=float(backward.max(initial=0.0)),
        backward=_histogram(backward),
    )


def ulp(values: NDArray[np.float64], target: np.dtype[Any] | FormatInfo) -> NDArray[np.float64]:
    """The unit in the last place of the format around each value; subnormals have one ulp.

    >>> ulp(np.array([1.0, 1.99, 2.0, 1e-9]), np.dtype(np.float16)).tolist() == [
    ...     2**-10, 2**-10, 2**-9, 2**-24]
    True
    """
    info = target if isinstance(target, FormatInfo) else _INFO[target]
    exponents = np.where(values == 0, info.min_exponent, np.frexp(values)[1] - 1)
    exponents = np.clip(exponents, info.min_exponent, info.max_exponent)
    return np.ldexp(1.0, exponents - info.fraction_bits)


def _norm(values: NDArray[np.float64]) -> float:
    """The 2-norm, without overflow and with the same bits on every machine."""
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    scale = math.ldexp(1.0, max(math.frexp(largest)[1], -1021))
    return scale * math.sqrt(math.fsum(np.square(values / scale).tolist()))


def _alignment(a: NDArray[Any], a_norm: float, b: NDArray[Any], b_norm: float) -> float:
    return math.fsum((a / a_norm * (b / b_norm)).tolist()) if a_norm and b_norm else 0.0


def _histogram(errors: NDArray[np.float64]) -> tuple[int, ...]:
    """Counts by exponent and the first `BITS` bits after it."""
    positive = errors[(errors > 0) & np.isfinite(errors)]
    clipped = np.clip(positive, 2.0**-LIMIT, np.nextafter(2.0**LIMIT, 0))
    buckets = clipped.view(np.int64) >> (52 - BITS)
    first = int(buckets.min(initial=np.iinfo(np.int64).max)) if buckets.size else 0
    counts = np.bincount(buckets - first).tolist()
    zeros = int(np.count_nonzero(errors == 0))
    return zeros, int(np.count_nonzero(np.isinf(errors))), first, *counts


def _quantiles(histograms: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """The smallest errors that a share of the elements does not exceed, each to a bucket."""
    zeros, infinite = (sum(h[k] for h in histograms) for k in (0, 1))
    first = min((h[2] for h in histograms if len(h) > 3), default=0)
    end = max((h[2] + len(h) - 3 for h in histograms), default=first)
    counts = np.zeros(max(end - first, 0) + 2, np.int64)
    counts[0], counts[-1] = zeros, infinite
    for _, _, start, *numbers in histograms:
        counts[1 + start - first :][: len(numbers)] += np.array(numbers, np.int64)
    edges = (np.arange(first, first + len(counts) - 1) << (52 - BITS)).view(np.float64)
    middles = [0.0, *(0.5 * (edges[:-1] + edges[1:])).tolist(), math.inf]
    reached = np.cumsum(counts)
    return {
        name: middles[int(np.searchsorted(reached, math.ceil(share * int(reached[-1]))))]
        for name, share in QUANTILES.items()
    }


def merged(parts: Sequence[Partial]) -> Metrics:
    """The figures of the whole, from those of its windows in order."""
    elements = sum(part.elements for part in parts)
    finite = sum(part.finite for part in parts)
    infinite = sum(part.infinite for part in parts)
    shares = {
        "sign_flips": sum(part.flipped for part in parts) / elements,
        "correct": sum(part.correct for part in parts) / elements,
        "overflowed": (elements - finite - infinite) / elements,
        "infinite_input": infinite / elements,
    }
    if not finite:
        return Metrics(**(dict.fromkeys(METRICS, math.nan) | shares))
    error, exact, input_error, true = (
        math.hypot(*(getattr(part, name) for part in parts))
        for name in ("error_norm", "exact_norm", "input_error_norm", "input_norm")
    )
    mean = math.fsum(part.error_sum for part in parts) / finite
    rms = exact / math.sqrt(finite)
    return Metrics(
        relative_error=_ratio(error, exact),
        input_error=_ratio(input_error, true),
        max_ulp=max(part.max_ulp for part in parts),
        bias=mean / rms if rms else math.copysign(math.inf, mean) if mean else 0.0,
        mean_error=mean,
        cosine=_cosine(parts, error, exact),
        error_max=max(part.error_max for part in parts),
        backward_max=max(part.backward_max for part in parts),
        **{f"error_{n}": v for n, v in _quantiles([part.errors for part in parts]).items()},
        **{
            f"backward_{n}": v
            for n, v in _quantiles([part.backward for part in parts]).items()
            if f"backward_{n}" in METRICS
        },
        **shares,
    )


def _ratio(error: float, size: float) -> float:
    return error / size if size else math.inf if error else 0.0


def _cosine(parts: Sequence[Partial], error: float, exact: float) -> float:
    """Of the angle between results and exact sums; NaN where one of the two is zero.

    With t = |error| / |exact| and the errors' alignment a, the results are exact sums of length 1
    with errors of length t: their part along the sums is 1 + a t, across it t sqrt(1 - a**2).
    """
    if not exact:
        return math.nan
    t = error / exact
    aligned = (
        math.fsum(
            part.alignment * (part.error_norm / error) * (part.exact_norm / exact) for part in parts
        )
        if error
        else 0.0
    )
    along, across = 1 + aligned * t, t * math.sqrt(max(0.0, 1 - aligned**2))
    length = math.hypot(along, across)
    return along / length if length else math.nan
