"""Which kernels run: NumPy's, or compiled ones with the same bits, where a module provides them.
GPUSIM_KERNELS chooses: "auto" (compiled where they are installed), "numpy" or "compiled"."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from . import limits

if TYPE_CHECKING:
    from .formats import FormatInfo, NumberFormat
    from .wire_info import WireInfo

SETTING = "GPUSIM_KERNELS"
CHOICES = ("auto", "numpy", "compiled")

#: Functions that clear the caches of plans, which hold the kernels that were chosen.
plan_caches: list[Callable[[], None]] = []

Offsets = NDArray[np.uint64] | None


class Kernels(Protocol):
    """Compiled kernels. Each may decline a case, which NumPy's then do.

    Those of whole folds are `fold_kernels.FoldKernels`.
    """

    def problem(self) -> str | None:
        """The reason why they cannot run here, or None."""

    def round_to(
        self,
        x: NDArray[Any],
        target: np.dtype[Any] | FormatInfo,
        out: NDArray[Any],
        *,
        stochastic: bool,
        counters: tuple[int, int, int],
        place: int,
        places: Offsets,
        batch_ndim: int,
    ) -> bool:
        """Round into `out`. False: nothing is done."""

    def draw(
        self, count: int, start: int, key: tuple[int, int], counters: tuple[int, int, int]
    ) -> NDArray[np.uint32] | None:
        """Lanes of random numbers."""

    def send(
        self,
        rows: NDArray[Any],
        wire: WireInfo,
        starts: NDArray[np.intp],
        lanes: NDArray[np.uint32] | None,
    ) -> bool:
        """`fallback.wires.round_message` in place. False: nothing is done."""

    def add(
        self,
        sent: NDArray[Any],
        kept: NDArray[Any],
        wire: WireInfo | None,
        starts: NDArray[np.intp] | None,
        lanes: NDArray[np.uint32] | None,
        accumulator: NumberFormat | None,
        sum_lanes: NDArray[np.uint32] | None,
    ) -> bool:
        """Add `kept` to what arrives of `sent`, in place, and round to the accumulator."""

    def fold_chain(
        self,
        out: NDArray[Any],
        addresses: NDArray[np.uint64],
        numbers: NDArray[np.int64],
        like: NDArray[Any],
        wire: WireInfo,
        starts: NDArray[np.intp],
        accumulator: NumberFormat | None,
        *,
        draws: bool,
        seed: int,
        call: int,
        streams: tuple[int, int],
        places: NDArray[np.uint64],
        index: int,
    ) -> bool:
        """Fold the members of one message, whose hops are rounded. False: nothing is done."""

    def draw_rows(
        self, rows: NDArray[np.int64], first: int, count: int, key: tuple[int, int], stream: int
    ) -> NDArray[np.uint64] | None:
        """Words first, first + 1, ... of Philox, at the counters (., row, stream, 0)."""

    def normal_quantile(self, words: NDArray[np.uint64], out: NDArray[np.float64]) -> bool:
        """`fallback.quantile.normal_quantile` into `out`. False: nothing is done."""

    def add_exactly(
        self, rows: NDArray[Any], levels: NDArray[np.float64], special: NDArray[np.float64]
    ) -> bool:
        """Add rows to sums of several numbers each, and what is not finite to `special`."""

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> bool:
        """Part of a copy that is larger than the caches. False: nothing is done."""

    def check_slices(
        self,
        table: NDArray[np.int64],
        members: NDArray[np.int64],
        source_rows: int,
        target_rows: int,
    ) -> NDArray[np.int64] | None:
        """The segments of a ragged_all_to_all's slices, all of them right."""

    def exchange_rows(
        self,
        target: NDArray[Any],
        source: NDArray[Any],
        output: NDArray[Any],
        tables: Sequence[NDArray[Any]],
        members: NDArray[np.int64],
    ) -> bool:
        """A ragged_all_to_all into a new array. False: a slice is wrong, or the case is left to
        NumPy; what the array holds is undefined."""

    def copy_segments(
        self, source: NDArray[Any], target: NDArray[Any], segments: NDArray[np.int64], size: int
    ) -> bool:
        """`ragged_copy` of `size` bytes; arrays (replicas, rows, row). False: nothing is done."""


class _Choice:
    """The choice, and the kernels once they were asked for."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.found: Kernels | None = None
        self.asked = False


_choice = _Choice()
_provider: str | None = None


def provide(module: str) -> None:
    """Name the module that has compiled kernels. It is imported when they are first wanted."""
    global _provider
    _provider = module


def compiled() -> Kernels | None:
    """The compiled kernels, or None: NumPy's run.

    **Raises**: ValueError for a GPUSIM_KERNELS outside the choices; RuntimeError if it asks for
    compiled kernels that cannot run here.
    """
    if not _choice.asked:
        _choice.name = _choice.name or setting()
        _choice.found = _find(_choice.name)
        _choice.asked = True
    return _choice.found


def setting() -> str:
    """The environment's choice; ValueError if it is none of the choices."""
    given = os.environ.get(SETTING, "").strip() or "auto"
    if given not in CHOICES:
        raise ValueError(f"{SETTING}={given!r}: expected one of {', '.join(CHOICES)}")
    return given


def _find(name: str) -> Kernels | None:
    if name == "numpy":
        return None
    problem: str | None = "no module provides them: import gpusim"
    if _provider is not None:
        kernels: Any = import_module(_provider)
        problem = kernels.problem()
        if problem is None:
            found: Kernels = kernels
            return found
    if name == "compiled":
        raise RuntimeError(f"{SETTING}=compiled: {problem}")
    return None


def least_work() -> int:
    """Work, in elements of all members, that is worth compiling a kernel for."""
    return 1 if _choice.name == "compiled" else limits.COMPILED_WORK


def give_up(reason: str) -> None:
    """Go on with NumPy's kernels, with a warning, or raise where compiled ones were asked for.

    **Raises**: RuntimeError if GPUSIM_KERNELS=compiled.
    """
    if _choice.name == "compiled":
        raise RuntimeError(reason)
    _choice.found = None
    _forget_plans()
    warnings.warn(f"{reason}; NumPy's kernels run instead", RuntimeWarning, stacklevel=2)


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """Inside the `with` block the whole process uses these kernels: one of the choices.

    >>> with chosen("numpy"):
    ...     compiled() is None
    True
    """
    global _choice
    if name not in CHOICES:
        raise ValueError(f"kernels {name!r}: expected one of {', '.join(CHOICES)}")
    before, _choice = _choice, _Choice(name)
    _forget_plans()
    try:
        yield
    finally:
        _choice = before
        _forget_plans()


def _forget_plans() -> None:
    for clear in plan_caches:
        clear()
