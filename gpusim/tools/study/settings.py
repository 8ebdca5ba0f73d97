"""A setting is one line of a study's picture; `grid` makes all settings of a study.

Formats have the names of NumPy and ml_dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from fallback.formats import FLOAT32, FLOAT64, SUB_32_BIT, default_accumulator
from fallback.schedules import Schedule
from gpusim.formats import Format, FormatLike, as_format
from gpusim.reduction import Reduction

__all__ = ["FORMATS", "Setting", "accumulator", "floating", "grid", "whole_numbers"]

_DTYPES: tuple[np.dtype[Any], ...] = (FLOAT64, FLOAT32, *SUB_32_BIT)
FORMATS = {dtype.name: dtype for dtype in _DTYPES}


def floating(given: DTypeLike, name: str = "dtype") -> np.dtype[Any]:
    """The floating-point dtype of this name. **Raises**: ValueError, with `name`, for any other."""
    expected = f"expected one of {', '.join(FORMATS)}"
    try:
        # ml_dtypes' names are not registered with NumPy.
        dtype = np.dtype(getattr(ml_dtypes, given, given) if isinstance(given, str) else given)
    except TypeError:
        raise ValueError(f"{name}={given!r}: {expected}") from None
    if given is None or dtype.name not in FORMATS:
        raise ValueError(f"{name}={given!r}: {expected}")
    return FORMATS[dtype.name]


def accumulator(given: Any) -> np.dtype[Any] | Format:
    """A dtype or Format to accumulate in; "e5m6" is `gpusim.Format(5, 6)`."""
    fields = re.fullmatch(r"e(\d+)m(\d+)", given) if isinstance(given, str) else None
    if fields is not None:
        return Format(int(fields[1]), int(fields[2]))
    return as_format(given) or floating(given, "accumulate")


def _name(given: np.dtype[Any] | Format) -> str:
    if isinstance(given, np.dtype):
        return given.name
    short = Format(given.exponent_bits, given.mantissa_bits)
    if given == short:
        return f"e{given.exponent_bits}m{given.mantissa_bits}"
    return given.name or repr(given)


def _narrow(given: np.dtype[Any] | Format) -> bool:
    """Whether rounding to it may be stochastic."""
    return given.bits < 32 if isinstance(given, Format) else given in SUB_32_BIT


@dataclass(frozen=True)
class Setting:
    """A format in which values travel, and how they are added; everything but the seed.

    >>> Setting(floating("bfloat16"), floating("float32"), "tree", "stochastic").name
    'bfloat16 added in float32, tree, stochastic'
    """

    dtype: np.dtype[Any]
    accumulate: np.dtype[Any] | Format
    order: str
    rounding: str

    @property
    def name(self) -> str:
        added = "" if self.accumulate == self.dtype else f" added in {_name(self.accumulate)}"
        last = ", stochastic" if self.stochastic else ""
        return f"{self.dtype.name}{added}, {self.order}{last}"

    @property
    def stochastic(self) -> bool:
        """Whether the result depends on a seed."""
        return self.rounding == "stochastic"

    @property
    def record(self) -> dict[str, str]:
        """The fields as text, for files."""
        return {
            "dtype": self.dtype.name,
            "accumulate": _name(self.accumulate),
            "order": self.order,
            "rounding": self.rounding,
        }

    def reduction(self, seed: int) -> Reduction:
        """The Reduction that this setting is, with a seed."""
        return Reduction("sum", self.order, self.accumulate, self.rounding, seed)


def grid(
    dtypes: Iterable[DTypeLike],
    accumulators: Iterable[DTypeLike | FormatLike | None],
    orders: Iterable[str],
    roundings: Iterable[str],
) -> list[Setting]:
    """Every combination once. None among `accumulators` is each dtype's own, as in Reduction.

    Where nothing narrower than float32 is rounded to, stochastic rounding has nothing to draw,
    and the setting is the same as rounding to nearest. ValueError where a list is empty or holds
    an unknown order.

    >>> for setting in grid(["float16", "float32"], [None], ["ring"], ["nearest", "stochastic"]):
    ...     print(setting.name)
    float16, ring
    float16, ring, stochastic
    float32, ring
    """
    lists: dict[str, list[Any]] = {
        "dtypes": [floating(dtype) for dtype in dtypes],
        "accumulators": [a if a is None else accumulator(a) for a in accumulators],
        "orders": list(orders),
        "roundings": list(roundings),
    }
    for name, values in lists.items():
        if not values:
            raise ValueError(f"{name} is empty: a sweep needs at least one")
    found: dict[Setting, None] = {}
    for dtype, accumulate, order, rounding in product(*lists.values()):
        a = _own(dtype, order) if accumulate is None else accumulate
        Reduction("sum", order, a, rounding)  # checks its arguments
        draws = _narrow(dtype) or _narrow(a)
        found[Setting(dtype, a, order, rounding if draws else "nearest")] = None
    return list(found)


def _own(dtype: np.dtype[Any], order: str) -> np.dtype[Any]:
    """The default accumulator of an order; engines have their own."""
    schedule = Reduction(order=order).schedule
    own = schedule.accumulator("sum", dtype) if isinstance(schedule, Schedule) else None
    return own or default_accumulator(dtype)


def whole_numbers(name: str, given: Sequence[int] | Iterable[int], least: int) -> list[int]:
    """Distinct integers of at least `least`. **Raises**: ValueError for others, and for none."""
    values = list(dict.fromkeys(given))
    if not values:
        raise ValueError(f"{name} is empty: a sweep needs at least one")
    for value in values:
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: {value!r} given, expected integers from {least}")
    return [int(value) for value in values]
