"""Recorded operands through another fold, without the program."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.reduction import Reduction, ReductionLike, as_reduction
from gpusim.tools.compare.causes import Cause
from gpusim.tools.compare.chains import Interval
from gpusim.tools.compare.comparing import Comparison, Verdict
from gpusim.tools.compare.difference import difference
from gpusim.tools.compare.folds import in_lists, reduced
from gpusim.tools.compare.pairing import describe
from gpusim.tools.compare.rows import Row
from gpusim.tools.compare.runs import Event, Run

__all__ = ["replay"]

Leaves = list[tuple[NDArray[Any], NDArray[Any]]]


def replay(run: Run, reduction: ReductionLike) -> Comparison:
    """Reduce the operands of each reduction again, by this Reduction, and compare the results.

    Each call gets the operands that were recorded: differences do not grow from call to call.

    **Raises**: ValueError if no call has whole operands and results, and for a Reduction that lacks
    the operation; and as `as_reduction`.
    """
    chosen = as_reduction(reduction, "--reduction")
    rows: list[Row] = []
    verdict: Verdict | None = None
    for event in run.events:
        leaves = reduced(run, event)
        if not leaves:
            continue
        found = difference([total for _, total in leaves], _fold(event, leaves, chosen))
        first = event.first
        row = Row(
            event.index,
            event.index,
            describe(first),
            first.site,
            first.site,
            0,
            len(event.ranks) * bool(found.differing),
            found if found.differing else None,
            "rounding" if found.differing else "equal",
        )
        rows.append(row)
        if found.differing and verdict is None:
            reductions = {"a": first.reduction, "b": str(chosen)}
            verdict = Verdict(
                "collective",
                Interval("call", {"a": first, "b": first}, {}),
                Cause("rounding", "proven", about={"where": "collective"}),
                first,
                first,
                ranks=event.ranks,
                difference=found,
                reductions=reductions,
            )
    if not rows:
        raise ValueError(
            f"{run.path}: no reduction with whole operands and results; record with --arrays all"
        )
    replayed = copy(run)
    replayed.path = run.path.with_name(f"{run.path.name}, {chosen}")
    return Comparison(run, replayed, verdict, rows)


def _fold(event: Event, leaves: Leaves, reduction: Reduction) -> list[Any]:
    """The results of an event's tensors, by the rules of gpusim.torch.distributed."""
    from gpusim.torch.distributed.calls.folds import fold, fold_lists, fold_slices, fold_together

    op, operation = event.first.op or "SUM", event.first.operation
    members = [list(operands) for operands, _ in leaves]
    ranks = len(event.ranks)
    if operation == "all_reduce":
        return fold_together(members, op, operation, reduction, 0)
    if operation == "reduce":
        return [fold(each, op, operation, reduction, 0) for each in members]
    if in_lists(event):
        return fold_lists(list(zip(*members, strict=True)), op, operation, reduction, 0)
    sliced = [[x.reshape(ranks, -1) for x in each] for each in members]
    return [np.concatenate(fold_slices(each, op, operation, reduction, 0)) for each in sliced]
