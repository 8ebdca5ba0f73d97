"""The arithmetic of a fold: computing type, operator, roundings, division, conversion.
Everything here works on one block at a time and does not depend on the order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import limits
from .decode import decode, encode
from .draws import Draws
from .formats import (
    FLOAT16,
    FLOAT32,
    FLOAT64,
    SUB_32_BIT,
    FormatInfo,
    NumberFormat,
    computing_dtype,
    default_accumulator,
    kind_of,
    real_of,
)
from .operators import ARITHMETIC_OPS, LOGICAL_OPS, Operator, operator_for, running
from .rounding import Rounder, add_rows, rounder
from .workspace import Workspace

BOOL = np.dtype(np.bool_)
_COMPLEX: dict[np.dtype[Any], np.dtype[Any]] = {
    FLOAT32: np.dtype(np.complex64),
    FLOAT64: np.dtype(np.complex128),
}


class Arithmetic:
    """The arithmetic of a fold; for complex values dtypes are those of their real parts."""

    def __init__(
        self,
        op: str,
        source: np.dtype[Any],
        accumulate: NumberFormat | None,
        out: np.dtype[Any],
        divisor: int | None,
        stochastic: bool,
        final: bool = True,
        from_zero: bool = False,
        exact: bool = False,
    ) -> None:
        kind = kind_of(source)
        self.operator: Operator = operator_for(op, kind)
        accumulator = _accumulator(op, source, kind, accumulate)
        _check_out(op, kind, out)
        _check_divisor(kind, op, divisor)
        self.computing = _computing(op, kind, real_of(source), accumulator)
        self.partial = _partial(kind, source, accumulator, self.computing)
        self.result = out if final else self.partial
        self.divisor = self.computing.type(divisor) if divisor is not None and final else None
        self.from_zero = from_zero
        self._out = real_of(self.result)
        self._source, self.accumulator = real_of(source), accumulator
        # Complex values are always rounded to nearest.
        rounds = op in ARITHMETIC_OPS  # selections give one of their operands
        drawn = stochastic and kind == "float"
        self._sums = op == "sum"
        step = accumulator if rounds else self.computing
        # Partial results may come from elsewhere: their dtype's values are counted in.
        ulp = _common_ulp(op, self._source, accumulator, real_of(self.partial))
        self._step = rounder(self.computing, step, drawn, _holds(step, ulp))
        whole = self.divisor is None and _holds(self._out, ulp)
        last = rounder(self.computing, real_of(out), drawn, whole)
        # Partial results are of their dtype already.
        self._final = last if final else rounder(self.computing, self.computing, False)
        #: Whether all members are added exactly, and only the sum is rounded.
        self.exact = exact
        self._sum = rounder(FLOAT64, accumulator, drawn) if exact else None
        #: Whether the fold, once it is finished, has drawn random numbers.
        self.draws = self._step.stochastic or last.stochastic
        #: Whether a rounding that is done here draws random numbers.
        self.stochastic = self._step.stochastic or self._final.stochastic

    @property
    def rounds_steps(self) -> bool:
        """Whether partial results are rounded."""
        return not self._step.exact

    @property
    def draws_steps(self) -> bool:
        """Whether that draws random numbers."""
        return self._step.stochastic

    @property
    def direct(self) -> bool:
        """Whether the output itself can hold the partial results."""
        return self._out == self.computing and self._step.exact

    def running(self, width: int) -> tuple[np.ufunc, np.dtype[Any]] | None:
        """The ufunc whose loop over rows of `width` elements does all steps, and the rows' dtype.

        NumPy rounds each float16 sum and product as the contract does: slowly per element, but in
        one call.
        """
        ufunc = running(self.operator)
        if ufunc is None or width >= limits.ACCUMULATE_WIDTH:
            return None
        if self._step.exact:
            return ufunc, self.computing
        native = self.accumulator == FLOAT16 and not self._step.stochastic
        fits = self._source.itemsize == 1 or self._source == FLOAT16
        return (ufunc, FLOAT16) if native and fits and width < limits.HALF_WIDTH else None

    @property
    def converts(self) -> bool:
        """Whether members or partial results are converted."""
        return self._source != self.computing or not self._step.exact

    def add_rows(
        self,
        partial: NDArray[Any],
        rows: Sequence[NDArray[Any]] | NDArray[Any],
        bound: float,
        reach: float,
        workspace: Workspace,
    ) -> float | None:
        """All steps of these rows, if it can be done in a few calls; see `rounding.add_rows`."""
        return add_rows(self._step, partial, rows, bound, reach, workspace)

    def keeps(self, dtype: np.dtype[Any]) -> bool:
        """Whether the output is of this dtype, and takes the last partial result as it is."""
        return dtype == self._out and self.divisor is None and not self.from_zero

    def operand(
        self, view: NDArray[Any], workspace: Workspace
    ) -> tuple[NDArray[Any], NDArray[Any] | None, float]:
        """The block in the computing type, the buffer it occupies (None: it is `view`), and a bound
        of its magnitudes."""
        if view.dtype == self.computing:
            return view, None, math.inf
        buffer = workspace.take(self.computing, view.shape)
        return buffer, buffer, decode(view, buffer)

    def round_step(
        self,
        block: NDArray[Any],
        step: int,
        draws: Draws | None,
        workspace: Workspace,
        bound: float = math.inf,
    ) -> float:
        """Round partial results to the accumulator, in place.

        `bound` is one of the magnitudes if they are sums; what is returned is one afterwards.
        """
        bound = bound if self._sums else math.inf
        return self._round(self._step, block, step, draws, workspace, bound)

    def round_sum(
        self, block: NDArray[np.float64], draws: Draws | None, workspace: Workspace
    ) -> None:
        """Round exact sums, which are float64 rounded to odd, to the accumulator: step 1."""
        assert self._sum is not None
        self._round(self._sum, block, 1, draws, workspace, math.inf)

    def finish(
        self,
        block: NDArray[Any],
        out: NDArray[Any],
        members: int,
        draws: Draws | None,
        workspace: Workspace,
        bound: float = math.inf,
    ) -> None:
        """Divide, and convert to the output in one rounding, step `members`; spoils `block`."""
        held = self.accumulator if members > 1 else self._source  # one member is never rounded
        if self.from_zero:  # added at the end: no sum but -0 tells the difference
            np.add(block, 0, out=block)
        if self.divisor is not None:
            np.divide(block, self.divisor, out=block)
            bound = math.inf
        if self.divisor is not None or held != self._out:
            self._round(self._final, block, members, draws, workspace, bound)
        if block is not out:
            encode(block, out, workspace)

    @staticmethod
    def _round(
        rounder: Rounder,
        block: NDArray[Any],
        step: int,
        draws: Draws | None,
        workspace: Workspace,
        bound: float,
    ) -> float:
        if rounder.exact:
            return bound
        if draws is None or not rounder.stochastic:
            return rounder(block, None, workspace, bound)
        return rounder(block, draws.draw(block.shape, step), workspace, bound)


def partial_dtype(
    member_dtype: DTypeLike, accumulate: DTypeLike | FormatInfo | None = None, op: str = "sum"
) -> np.dtype[Any]:
    """The dtype of the partial results that `fold` takes as `partial` and gives with final=False.

    It holds all values of the members (the first is not rounded) and of the accumulator. It is the
    accumulator's dtype if that holds the members' values too, else the members' dtype or float16 if
    that holds both, and else the computing type (always for a FormatInfo). For complex members the
    same holds for their parts. Partial results of integers have their accumulator's dtype, those of
    selections (max, min) the members' dtype, and those of logical operators bool.

    **Raises**: TypeError and ValueError as `fold`.

    >>> partial_dtype(np.float16), partial_dtype("float8_e4m3fn"), partial_dtype(np.complex64)
    (dtype('float16'), dtype('float16'), dtype('complex64'))
    >>> partial_dtype(np.float32, accumulate=np.float16)
    dtype('float32')
    >>> partial_dtype(np.int16, accumulate=np.int64), partial_dtype(np.int16, op="logical_or")
    (dtype('int64'), dtype('bool'))
    """
    source = np.dtype(member_dtype)
    if accumulate is not None and not isinstance(accumulate, FormatInfo):
        accumulate = np.dtype(accumulate)
    return _partial_dtype(source, accumulate, op)


@lru_cache(maxsize=256)
def _partial_dtype(
    source: np.dtype[Any], accumulate: NumberFormat | None, op: str
) -> np.dtype[Any]:
    return Arithmetic(op, source, accumulate, source, None, False).partial


def _min_ulp(given: NumberFormat) -> int | None:
    """All finite values of the format are multiples of 2 to this power; None: not known."""
    if isinstance(given, FormatInfo):
        return None
    if given in SUB_32_BIT:
        return SUB_32_BIT[given].min_ulp
    return {FLOAT32: -149, FLOAT64: -1074}.get(given)


def _common_ulp(op: str, *formats: NumberFormat) -> int | None:
    """All numbers that are added are multiples of 2 to this power; None: not known."""
    ulps = [_min_ulp(given) for given in formats]
    known = [ulp for ulp in ulps if ulp is not None]
    return min(known) if op != "prod" and len(known) == len(ulps) else None


def _holds(target: NumberFormat, ulp: int | None) -> bool:
    """Whether multiples of 2**ulp, where small enough, are values of `target`."""
    finest = _min_ulp(target)
    return finest is not None and ulp is not None and finest <= ulp


def _accumulator(
    op: str, source: np.dtype[Any], kind: str, accumulate: NumberFormat | None
) -> NumberFormat:
    """The type that partial results are rounded to (a real part's, where values are complex)."""
    if isinstance(accumulate, FormatInfo):
        return accumulate if op in ARITHMETIC_OPS and kind != "int" else real_of(source)
    given = None if accumulate is None else kind_of(accumulate)
    if op not in ARITHMETIC_OPS or (kind == "int" and given != "int"):
        return real_of(source)  # selections do not round, and integers wrap in their own dtype
    if accumulate is None:
        return default_accumulator(real_of(source))
    allowed = {"int": ("int",), "float": ("float",), "complex": ("float", "complex")}[kind]
    if given not in allowed:
        raise TypeError(
            f"accumulate={accumulate.name}: {source.name} values cannot be accumulated in it; "
            f"expected a dtype of kind {' or '.join(allowed)}"
        )
    return real_of(accumulate)


def _computing(
    op: str, kind: str, source: np.dtype[Any], accumulator: NumberFormat
) -> np.dtype[Any]:
    if op in LOGICAL_OPS:
        return BOOL
    held = accumulator.carrier if isinstance(accumulator, FormatInfo) else accumulator
    return held if kind in ("int", "bool") else computing_dtype(source, held)


def _partial(
    kind: str,
    source: np.dtype[Any],
    accumulator: NumberFormat,
    computing: np.dtype[Any],
) -> np.dtype[Any]:
    """The smallest dtype that is known to hold all partial results exactly."""
    if kind in ("int", "bool") or computing == BOOL:
        return computing
    held: np.dtype[Any] = computing
    if not isinstance(accumulator, FormatInfo):
        both = accumulator, real_of(source)
        candidates: tuple[np.dtype[Any], ...] = (*both, FLOAT16, computing)
        held = next(c for c in candidates if all(_includes(c, other) for other in both))
    return _COMPLEX[held] if kind == "complex" else held


def _includes(target: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether a floating-point dtype has all values of another one."""
    if other == target or target == FLOAT64:
        return True
    if other not in SUB_32_BIT or target not in SUB_32_BIT:
        return target == FLOAT32 and other in SUB_32_BIT
    wide, small = SUB_32_BIT[target], SUB_32_BIT[other]
    return (
        wide.fraction_bits >= small.fraction_bits
        and wide.min_exponent - wide.fraction_bits <= small.min_exponent - small.fraction_bits
        and wide.largest >= small.largest
        and wide.has_infinity >= small.has_infinity
        and wide.has_negative_zero >= small.has_negative_zero
    )


def _check_out(op: str, kind: str, out: np.dtype[Any]) -> None:
    allowed = {"bool": ("bool", "int")}.get(kind, (kind,))
    if op not in LOGICAL_OPS and kind_of(out) not in allowed:
        raise TypeError(
            f"out_dtype={out.name}: expected a dtype of kind {' or '.join(allowed)}, as the members"
        )


def _check_divisor(kind: str, op: str, divisor: int | None) -> None:
    if divisor is None:
        return
    if kind not in ("float", "complex") or op in LOGICAL_OPS:
        raise TypeError(f"divisor={divisor!r}: only floating-point and complex folds are divided")
    if divisor < 1:
        raise ValueError(f"divisor={divisor!r}: expected a positive integer")
