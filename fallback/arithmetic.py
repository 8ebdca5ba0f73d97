"""What one fold does to numbers: computing type, operator, roundings, division, conversion.
Everything here works on one block at a time and knows nothing of orders."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fallback.decode import decode
from fallback.draws import Draws
from fallback.formats import computing_dtype, default_accumulator, kind_of, real_of
from fallback.general import Grid
from fallback.operators import ARITHMETIC_OPS, LOGICAL_OPS, Operator, operator_for, running
from fallback.rounding import Rounder, rounder
from fallback.workspace import Workspace

BOOL = np.dtype(np.bool_)


class Arithmetic:
    """The numbers' side of a fold; dtypes are those of real parts where values are complex."""

    def __init__(
        self,
        op: str,
        source: np.dtype[Any],
        accumulate: np.dtype[Any] | Grid | None,
        out: np.dtype[Any],
        divisor: int | None,
        stochastic: bool,
    ) -> None:
        kind = kind_of(source)
        self.operator: Operator = operator_for(op, kind)
        accumulator = _accumulator(op, source, kind, accumulate)
        _check_out(op, kind, out)
        _check_divisor(kind, op, divisor)
        self.computing = _computing(op, kind, real_of(source), accumulator)
        self.divisor = None if divisor is None else self.computing.type(divisor)
        self._out = real_of(out)
        self._source, self._accumulator = real_of(source), accumulator
        # Complex values are rounded to nearest, whatever was asked for.
        rounds = op in ARITHMETIC_OPS  # selections give one of their operands
        drawn = stochastic and kind == "float"
        self._step = rounder(self.computing, accumulator if rounds else self.computing, drawn)
        self._final = rounder(self.computing, self._out, drawn)

    @property
    def stochastic(self) -> bool:
        """Whether any rounding of this fold draws random numbers."""
        return self._step.stochastic or self._final.stochastic

    @property
    def running(self) -> np.ufunc | None:
        """The ufunc whose `accumulate` does all steps, if nothing is rounded in between."""
        return running(self.operator) if self._step.exact else None

    @property
    def direct(self) -> bool:
        """Whether the output itself can hold the partial results."""
        return self._out == self.computing and self._step.exact

    def operand(
        self, view: NDArray[Any], workspace: Workspace
    ) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """The block in the computing type, and the buffer it occupies (None: it is `view`)."""
        if view.dtype == self.computing:
            return view, None
        buffer = workspace.take(self.computing, view.shape)
        decode(view, buffer)
        return buffer, buffer

    def round_step(
        self, block: NDArray[Any], step: int, draws: Draws | None, workspace: Workspace
    ) -> None:
        """Round partial results to the accumulator, in place."""
        self._round(self._step, block, step, draws, workspace)

    def finish(
        self,
        block: NDArray[Any],
        out: NDArray[Any],
        members: int,
        draws: Draws | None,
        workspace: Workspace,
    ) -> None:
        """Divide, and convert to the output in one rounding, step `members`; spoils `block`."""
        held = self._accumulator if members > 1 else self._source  # one member is never rounded
        if self.divisor is not None:
            np.divide(block, self.divisor, out=block)
        if self.divisor is not None or held != self._out:
            self._round(self._final, block, members, draws, workspace)
        if block is not out:
            np.copyto(out, block, casting="unsafe")

    @staticmethod
    def _round(
        rounder: Rounder,
        block: NDArray[Any],
        step: int,
        draws: Draws | None,
        workspace: Workspace,
    ) -> None:
        if rounder.exact:
            return
        if draws is None or not rounder.stochastic:
            rounder(block, None)
            return
        lanes = workspace.take(np.dtype(np.uint32), block.shape)
        draws.fill(lanes, step)
        rounder(block, lanes)
        workspace.give(lanes)


def _accumulator(
    op: str, source: np.dtype[Any], kind: str, accumulate: np.dtype[Any] | Grid | None
) -> np.dtype[Any] | Grid:
    """The type that partial results are rounded to (a real part's, where values are complex)."""
    if isinstance(accumulate, Grid):
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
    op: str, kind: str, source: np.dtype[Any], accumulator: np.dtype[Any] | Grid
) -> np.dtype[Any]:
    if op in LOGICAL_OPS:
        return BOOL
    held = accumulator.carrier if isinstance(accumulator, Grid) else accumulator
    return held if kind in ("int", "bool") else computing_dtype(source, held)


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
