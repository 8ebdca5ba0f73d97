"""The compiled kernels of whole folds. They read plans, which are made of what `kernels` serves:
so they have a module of their own above the plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from numpy.typing import NDArray

from . import kernels
from .kernels import Offsets
from .members import Members
from .plan import FoldPlan, SentPlan

__all__ = ["FoldKernel", "FoldKernels", "compiled_folds"]

#: Folds members (and a partial result) into `out`, with a call counter and batch offsets.
FoldKernel = Callable[[Members, Members | None, NDArray[Any], int, Offsets], None]


class FoldKernels(kernels.Kernels, Protocol):
    """All compiled kernels, those of folds included."""

    def plan_fold(
        self, plan: FoldPlan, strides: tuple[int, ...], stacked: bool
    ) -> FoldKernel | None:
        """The kernel for members of these strides, in one array or several.

        None: the case is left to NumPy.
        """

    def plan_sent(self, plan: SentPlan, strides: tuple[int, ...]) -> FoldKernel | None:
        """The kernel for members of these strides. None: the case is left to those below."""


def compiled_folds() -> FoldKernels | None:
    """`kernels.compiled()`, as kernels of folds: the module that provides some has all of them."""
    return cast(FoldKernels | None, kernels.compiled())
