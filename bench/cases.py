"""Cases: a collective, a variant of its arithmetic, and a number and size of values.

Every peer makes the same inputs from the same few lines, and its results are compared with a
definition written down here once more, in float64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

SUMS = ("psum", "pmean", "psum_scatter")
FOLDS = (*SUMS, "pmax")
SHORT = "ragged_all_to_all_short"  # rows of 64 bytes
RAGGED = ("ragged_all_to_all", "ragged_all_to_all_uneven", SHORT)
CUT = ("all_to_all", "psum_scatter")  # each value has a slice for every replica
COLLECTIVES = (
    "psum", "pmean", "pmax", "all_gather", "pbroadcast", "all_to_all", "ppermute", "psum_scatter",
    *RAGGED,
)  # fmt: skip
#: Their result is the same on every replica.
UNMAPPED = ("psum", "pmean", "pmax", "all_gather", "pbroadcast")

SOURCE = 1  # the replica whose value pbroadcast hands out
ROW_BYTES, SHORT_ROW_BYTES = 1024, 64  # of ragged_all_to_all
MAX_RAGGED_REPLICAS = 256  # their table of slices grows with the square


@dataclass(frozen=True)
class Variant:
    """A dtype, and how gpusim adds in it."""

    name: str
    dtype: str
    accumulate: str | None = None
    rounding: str = "nearest"

    @property
    def plain(self) -> bool:
        """Whether this is the dtype itself, and not another way to add in it."""
        return self.accumulate is None and self.rounding == "nearest"


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("float32", "float32"),
        Variant("float16", "float16"),  # rounded after every addition
        Variant("float16-f32", "float16", "float32"),  # rounded once
        Variant("bfloat16", "bfloat16"),  # its accumulator is float32 by default
        Variant("float16-sr", "float16", "float32", "stochastic"),  # rounded once, by chance
        Variant("float16-sr16", "float16", None, "stochastic"),  # after every addition
        Variant("bfloat16-srb16", "bfloat16", "bfloat16", "stochastic"),  # likewise
        Variant("float8_e4m3fn", "float8_e4m3fn"),  # added in float16, rounded once
        Variant("float8_e5m2", "float8_e5m2"),
    )
}

Size = tuple[int, int]  # replicas, elements of each one's value

KI, MI = 2**10, 2**20
SIZES: tuple[Size, ...] = (
    (8, KI),
    (8, 4 * MI),
    (64, 256 * KI),
    (256, 64 * KI),
    (4096, 4 * KI),
    (65536, 64),
)
#: In float32 1 MiB for every pair of 8 replicas, and 4 KiB for every pair of 256.
RAGGED_SIZES: tuple[Size, ...] = ((8, KI), (8, 2 * MI), (256, 256 * KI))
#: For every pair 64 rows of 64 bytes, and one.
SHORT_SIZES: tuple[Size, ...] = ((64, 64 * KI), (256, 4 * KI))
LARGE: tuple[Size, ...] = ((8, 4 * MI), (256, 64 * KI))  # of which most targets speak


def parse_size(text: str) -> Size:
    """A size from the command line, such as 8x4Mi.

    >>> parse_size("256x64Ki")
    (256, 65536)
    """
    match = re.fullmatch(r"\s*(\d+)\s*[x×]\s*(\d+)\s*(Ki|Mi)?\s*", text)
    if match is None or 0 in (int(match[1]), int(match[2])):
        raise ValueError(f"{text!r} is no size: expected REPLICASxELEMENTS, such as 8x4Mi")
    return int(match[1]), int(match[2]) * {"Ki": KI, "Mi": MI, None: 1}[match[3]]


def size_name(size: Size) -> str:
    """A size as people read it.

    >>> size_name((4096, 4096))
    '4,096 x 4 Ki'
    """
    replicas, elements = size
    for unit, name in ((MI, " Mi"), (KI, " Ki")):
        if elements % unit == 0:
            return f"{replicas:,} x {elements // unit:,}{name}"
    return f"{replicas:,} x {elements:,}"


# The inputs are windows of one strip of numbers, one window for each replica. The numbers are
# multiples of 2**-11 below 1: float16 holds them, and float32 adds thousands of them exactly, so
# that its results are equal in any order.
STRIP = 8192
STRIDE = 977


def strip_start(replica: Any) -> Any:
    """Where in the strip a replica's value begins."""
    return replica * STRIDE % STRIP


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    collective: str
    variant: str
    replicas: int
    elements: int  # of one replica's value

    @classmethod
    def of(cls, given: dict[str, Any]) -> Case:
        """The case that `describe` described."""
        return cls(**{name: given[name] for name in cls.__dataclass_fields__})

    def describe(self) -> dict[str, Any]:
        """The case for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.collective} {self.variant} {size_name(self.size)}"

    @property
    def size(self) -> Size:
        return self.replicas, self.elements

    @property
    def arithmetic(self) -> Variant:
        return VARIANTS[self.variant]

    @property
    def dtype(self) -> np.dtype[Any]:
        name = self.arithmetic.dtype
        return np.dtype(getattr(ml_dtypes, name, name))

    @property
    def ragged(self) -> bool:
        return self.collective in RAGGED

    @property
    def mapped(self) -> bool:
        """Whether the result differs between the replicas."""
        return self.collective not in UNMAPPED

    # ------------------------------------------------------------ shapes and bytes

    @cached_property
    def value_shape(self) -> tuple[int, ...]:
        """One replica's value."""
        if self.ragged:
            return self.plan.operand_rows, self.row
        if self.collective in CUT:
            return self.replicas, self.elements // self.replicas
        return (self.elements,)

    @property
    def result_size(self) -> int:
        """The elements of one replica's result."""
        if self.ragged:
            return self.plan.output_rows * self.row
        factor = {"all_gather": self.replicas}.get(self.collective, 1)
        divisor = {"psum_scatter": self.replicas}.get(self.collective, 1)
        return self.elements * factor // divisor

    @property
    def input_bytes(self) -> int:
        return self.replicas * math.prod(self.value_shape) * self.dtype.itemsize

    @property
    def moved_bytes(self) -> int:
        """The bytes to read once and write once; a replica's result is kept apart if it differs."""
        one = self.elements * self.dtype.itemsize
        if self.collective in FOLDS:
            return (self.replicas + 1) * one
        if self.collective == "pbroadcast":
            return 2 * one
        if self.ragged:
            return 2 * self.replicas * self.result_size * self.dtype.itemsize
        return 2 * self.replicas * one

    @property
    def separate_bytes(self) -> int:
        """The memory of a peer that stores each replica's value and result."""
        return self.input_bytes + self.replicas * self.result_size * self.dtype.itemsize

    # ------------------------------------------------------------ inputs

    @property
    def row(self) -> int:
        """The elements of a row of ragged_all_to_all: 1 KiB or 64 bytes, or fewer for small
        values."""
        size = SHORT_ROW_BYTES if self.collective == SHORT else ROW_BYTES
        return min(size // self.dtype.itemsize, self.elements // self.replicas)

    @cached_property
    def plan(self) -> RaggedSlices:
        pair = self.elements // self.row // self.replicas
        return RaggedSlices.make(self.replicas, pair, uneven=self.collective.endswith("uneven"))

    @cached_property
    def strip(self) -> NDArray[Any]:
        rng = np.random.default_rng(1)
        length = STRIP + math.prod(self.value_shape)
        numbers = rng.integers(-2048, 2048, length, dtype=np.int16)
        return (numbers.astype(np.float32) / 2048).astype(self.dtype)

    def value(self, replica: int) -> NDArray[Any]:
        """One replica's input, a view of the strip."""
        start = strip_start(replica)
        return self.strip[start : start + math.prod(self.value_shape)].reshape(self.value_shape)

    def values(self, replicas: Iterable[int] | None = None) -> NDArray[Any]:
        """The stacked inputs of these replicas, or of all."""
        chosen = list(range(self.replicas) if replicas is None else replicas)
        stacked = np.empty((len(chosen), *self.value_shape), self.dtype)
        for place, replica in enumerate(chosen):
            stacked[place] = self.value(replica)
        return stacked

    def forget(self) -> None:
        """Free the inputs; the next use makes them again."""
        for name in ("strip", "plan"):
            self.__dict__.pop(name, None)

    def permutation(self) -> list[tuple[int, int]]:
        """ppermute's pairs: a ring, one step up."""
        return [(r, (r + 1) % self.replicas) for r in range(self.replicas)]

    # ------------------------------------------------------------ expected results

    def sample(self) -> tuple[list[int], list[int]]:
        """Where results are compared: some replicas, and some elements of their results."""
        replicas = sorted({0, self.replicas // 3, self.replicas - 1})
        count = min(self.result_size, 512)
        positions = np.linspace(0, self.result_size - 1, count).astype(np.int64)
        return replicas, positions.tolist()

    def expected(self) -> NDArray[np.float64]:
        """The exact results at the sample, (replicas, positions)."""
        replicas, positions = self.sample()
        at = EXPECTED[self.collective]
        where = np.asarray(positions)
        return np.stack([at(self, replica, where) for replica in replicas])

    def tolerance(self) -> float:
        """How far a result may be from the exact one, relative to the largest.

        Moved values are equal. Sums that are rounded once differ by half a unit; those that are
        rounded after every addition, as a random walk. Half of the largest is wrong in any format.
        """
        if self.collective not in SUMS:
            return 0.0
        info: Any = ml_dtypes.finfo(self.dtype)
        return min(0.5, float(info.eps) * max(1.0, math.sqrt(self.replicas)))


@dataclass(frozen=True, eq=False)
class RaggedSlices:
    """The slices of a ragged_all_to_all: from every replica one to every other."""

    sizes: NDArray[np.int64]  # rows, by sender and receiver

    @classmethod
    def make(cls, replicas: int, pair: int, *, uneven: bool) -> RaggedSlices:
        """`pair` rows for every pair, or 0 to 2 * pair by chance."""
        shape = (replicas, replicas)
        if uneven:
            return cls(np.random.default_rng(2).integers(0, 2 * pair + 1, shape, dtype=np.int64))
        return cls(np.full(shape, pair, np.int64))

    @cached_property
    def operand_rows(self) -> int:
        return int(self.sizes.sum(axis=1).max())

    @cached_property
    def output_rows(self) -> int:
        return int(self.sizes.sum(axis=0).max())

    @cached_property
    def input_offsets(self) -> NDArray[np.int64]:
        """By sender: where the slice for each receiver starts in its operand."""
        return np.cumsum(self.sizes, axis=1) - self.sizes

    @cached_property
    def output_offsets(self) -> NDArray[np.int64]:
        """By sender: where its slice lands in each receiver's output."""
        return np.cumsum(self.sizes, axis=0) - self.sizes

    def arguments(self) -> tuple[NDArray[np.int32], ...]:
        """input_offsets, send_sizes, output_offsets and recv_sizes, stacked."""
        columns = (self.input_offsets, self.sizes, self.output_offsets, self.sizes.T)
        return tuple(np.ascontiguousarray(column, np.int32) for column in columns)


Where = NDArray[np.int64]


def _input(case: Case, replica: Any, at: Any) -> NDArray[np.float64]:
    return case.strip[strip_start(replica) + at].astype(np.float64)


def _all(case: Case, at: Where) -> NDArray[np.float64]:
    return _input(case, np.arange(case.replicas)[:, None], at)


def _ragged(case: Case, replica: int, at: Where) -> NDArray[np.float64]:
    plan = case.plan
    row, column = np.divmod(at, case.row)
    starts = plan.output_offsets[:, replica]
    sender = np.searchsorted(starts + plan.sizes[:, replica], row, side="right")
    written = sender < case.replicas
    sender = np.minimum(sender, case.replicas - 1)
    source = plan.input_offsets[sender, replica] + row - starts[sender]
    source = np.where(written, source, 0)
    return np.where(written, _input(case, sender, source * case.row + column), 0.0)


def _slice(case: Case) -> int:
    return case.elements // case.replicas


#: The results of replica r at some positions, by collective.
EXPECTED: dict[str, Callable[[Case, int, Where], NDArray[np.float64]]] = {
    "psum": lambda case, r, at: _all(case, at).sum(axis=0),
    "pmean": lambda case, r, at: _all(case, at).mean(axis=0),
    "pmax": lambda case, r, at: _all(case, at).max(axis=0),
    "psum_scatter": lambda case, r, at: _all(case, r * _slice(case) + at).sum(axis=0),
    "all_gather": lambda case, r, at: _input(case, at // case.elements, at % case.elements),
    "pbroadcast": lambda case, r, at: _input(case, SOURCE, at),
    "ppermute": lambda case, r, at: _input(case, (r - 1) % case.replicas, at),
    "all_to_all": lambda case, r, at: _input(
        case, at // _slice(case), r * _slice(case) + at % _slice(case)
    ),
    **dict.fromkeys(RAGGED, _ragged),
}


def select(
    collectives: Iterable[str] = COLLECTIVES,
    variants: Iterable[str] | None = None,
    sizes: Iterable[Size] | None = None,
) -> Iterator[Case]:
    """All cases that make sense, by size; `variants` and `sizes` None are the standard ones."""
    collectives = list(collectives)
    chosen = list(VARIANTS if variants is None else variants)
    for size in list(sizes or dict.fromkeys((*SIZES, *RAGGED_SIZES, *SHORT_SIZES))):
        for collective in collectives:
            if not sizes and size not in STANDARD_SIZES.get(collective, SIZES):
                continue
            for variant in chosen:
                case = Case(collective, variant, *size)
                if sensible(case) and (variants is not None or standard(case)):
                    yield case


STANDARD_SIZES = dict.fromkeys(RAGGED, RAGGED_SIZES) | {SHORT: SHORT_SIZES}


def sensible(case: Case) -> bool:
    """Whether the replicas can share the values evenly, and the variant differs from others."""
    if case.collective in CUT and case.elements % case.replicas:
        return False
    if case.ragged and (case.replicas > MAX_RAGGED_REPLICAS or case.elements < case.replicas):
        return False
    return case.collective in SUMS or case.arithmetic.plain


def standard(case: Case) -> bool:
    """Whether a run without `--dtypes` has the case.

    All collectives are measured in float32, float16 and bfloat16. pmean and psum_scatter are the
    fold that psum is: other variants and formats are measured for psum, most of them at the large
    sizes. A row of 64 bytes is the same in every dtype.
    """
    if case.collective == SHORT:
        return case.variant == "float32"
    if case.variant in ("float32", "float16", "bfloat16"):
        return True
    if case.collective != "psum":
        return False
    return case.variant in ("float16-f32", "float16-sr") or case.size in LARGE
