"""Synthetic inputs of a study: any range of elements of any replica, from a counter.

Every number is made by IEEE operations alone and is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback import kernels
from gpusim.fallback.quantile import normal_quantile

__all__ = ["SYNTHETIC", "Synthetic", "draw_words"]

Reals = NDArray[np.float64]
Words = NDArray[np.uint64]

# The generator's second key word: no stream of gpusim's roundings (0) has it. "study" in ASCII.
TAG = int.from_bytes(b"study", "big")
WORDS_PER_BLOCK = 4

CANCELLATION = 2.0**-8
"""The sum of a pair of "cancelling", relative to its values."""


@dataclass(frozen=True)
class Synthetic:
    """One of the distributions of `SYNTHETIC`, for any number of replicas."""

    name: str
    elements: int
    seed: int
    step: int = 0
    """Each of several steps has values of its own."""

    replicas = None  # any number
    scale = 1.0

    @property
    def title(self) -> str:
        return f"{self.name}, {self.elements:,} elements"

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": self.name, "elements": self.elements, "seed": self.seed}

    def block(self, replicas: int, rows: range, first: int, count: int) -> Reals:
        """Elements first..first+count-1 of the replicas `rows`, of `replicas` in all."""
        return SYNTHETIC[self.name](self, replicas, rows, first, count)

    def at_step(self, step: int) -> Synthetic:
        """The values of another step of the same replicas: other numbers."""
        return Synthetic(self.name, self.elements, self.seed, step)

    def words(self, rows: Iterable[int], stream: int, first: int, count: int) -> Words:
        """One 64-bit word an element, of one of the replicas' streams: shape (rows, count)."""
        return draw_words(self.seed, rows, stream + 16 * self.step, first, count)


def draw_words(seed: int, rows: Iterable[int], stream: int, first: int, count: int) -> Words:
    """The words of `count` elements from `first` on, of each row: shape (rows, count)."""
    compiled = kernels.compiled()
    if compiled is not None:
        numbers = np.fromiter(rows, np.int64)
        words = compiled.draw_rows(numbers, first, count, (seed, TAG), stream)
        if words is not None:
            return words
    generator = np.random.Philox(key=[seed, TAG])
    state: Any = generator.state
    block, skipped = divmod(first, WORDS_PER_BLOCK)
    drawn = []
    for row in rows:
        state["state"]["counter"] = np.array([block, row, stream, 0], np.uint64)
        generator.state = state
        drawn.append(generator.random_raw(skipped + count)[skipped:])
    return np.stack(drawn)


Draw = Callable[[Synthetic, int, range, int, int], Reals]


def _normal(source: Synthetic, replicas: int, rows: range, first: int, count: int) -> Reals:
    return normal_quantile(source.words(rows, 0, first, count))


def _lognormal(source: Synthetic, replicas: int, rows: range, first: int, count: int) -> Reals:
    return exponential(_normal(source, replicas, rows, first, count))


def _heavy_tailed(source: Synthetic, replicas: int, rows: range, first: int, count: int) -> Reals:
    """Student's t with two degrees of freedom, whose variance is infinite."""
    # The quantile of p is (2p - 1) / sqrt(2p (1 - p)); p is the middle of one of 2^53 intervals,
    # of which s, odd and within +-2^53, is the one at p = 1/2 + s / 2^54.
    words = (source.words(rows, 0, first, count) >> np.uint64(11)).astype(np.int64)
    s = (2 * words + (1 - 2**53)).astype(np.float64) * 2.0**-53
    return s / np.sqrt((1 - s) * (1 + s) * 0.5)


def _cancelling(source: Synthetic, replicas: int, rows: range, first: int, count: int) -> Reals:
    """The second half of the replicas subtracts what the first adds, except for a small rest."""
    half = replicas // 2
    values = normal_quantile(source.words(rows, 1, first, count))
    values *= CANCELLATION
    if half:
        partners = np.array(rows) % half
        whole = normal_quantile(source.words(partners.tolist(), 0, first, count))
        signs = np.where(np.array(rows) < half, 1.0, -1.0)
        signs[np.array(rows) >= 2 * half] = 0.0  # the last of an odd number has no partner
        values += whole * signs[:, np.newaxis]
    return values


SYNTHETIC: dict[str, Draw] = {
    "normal": _normal,
    "lognormal": _lognormal,
    "heavy-tailed": _heavy_tailed,
    "cancelling": _cancelling,
}

# log(2) in two parts; the product of the first and an exponent is exact.
_LOG2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LOG2_LOW = float.fromhex("0x1.a39ef35793c76p-33")


def exponential(x: Reals) -> Reals:
    """e**x for moderate x, to a unit or two in the last place: NumPy's own has other bits on
    other processors.

    >>> bool(np.allclose(exponential(np.array([-9.0, 0.0, 1.0, 9.0])), np.exp([-9, 0, 1, 9]),
    ...                  rtol=1e-15))
    True
    """
    exponents = np.rint(x * 1.4426950408889634)
    rest = (x - exponents * _LOG2_HIGH) - exponents * _LOG2_LOW
    series = np.ones_like(x)
    for n in range(14, 0, -1):  # the next term is less than 2**-60
        series *= rest
        series /= n
        series += 1.0
    return np.ldexp(series, exponents.astype(np.int32))
