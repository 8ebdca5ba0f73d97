"""Reductions of a record: their operands and totals, and the known folds that give these totals."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..twins.inferring import infer
from .runs import Event, Run

__all__ = ["REDUCING", "folds_of", "in_lists", "reduced"]

REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def folds_of(run: Run, event: Event) -> list[str] | None:
    """The known folds that give an event's result; None without arrays, or for other operators."""
    leaves = reduced(run, event)
    if not leaves or event.first.op not in ("SUM", "AVG", "PRODUCT"):
        return None
    if leaves[0][0].dtype.kind not in "fcV":
        return None
    keywords: dict[str, Any] = {"op": "prod"} if event.first.op == "PRODUCT" else {}
    if event.first.op == "AVG":
        keywords["divisor"] = len(event.ranks)
    tried = [max(leaves, key=lambda leaf: leaf[1].size)]
    if len(leaves) > 1 and len({total.dtype for _, total in leaves}) == 1:  # as gloo joins them
        operands, totals = zip(*leaves, strict=True)
        tried.insert(0, (np.concatenate(operands, axis=1), np.concatenate(totals)))
    for inputs, total in tried:
        found = [match.candidate.name for match in infer(inputs, total, **keywords) if match.equal]
        if found:
            recorded = (event.first.reduction or "").partition(" ")[0]
            return sorted(found, key=lambda name: name != recorded)
    return []


def reduced(run: Run, event: Event) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Operands (R, N) and result (N,) of each tensor of a reduction; none without all arrays."""
    calls = [event.calls[rank] for rank in event.ranks if rank in event.calls]
    if event.first.operation not in REDUCING or not event.complete:
        return []
    operands = [run.arrays(call.operands) for call in calls]
    received = calls
    if event.first.operation != "reduce_scatter":
        received = [next((call for call in calls if call.rank == call.root), calls[0])]
    results = [run.arrays(call.results) for call in received]
    if not all(operands) or not all(results):
        return []
    members, parts = (
        [[x.reshape(-1) for x in each or ()] for each in side] for side in (operands, results)
    )
    tensors = [np.stack(row) for row in zip(*members, strict=True)]
    if in_lists(event):
        totals = [part for (part,) in parts]
    else:
        totals = [np.concatenate(row) for row in zip(*parts, strict=True)]
    return list(zip(tensors, totals, strict=True))


def in_lists(event: Event) -> bool:
    """Whether a reduce_scatter has a list of tensors, one for each rank, and not one of all."""
    call = event.first
    one = call.operation == "reduce_scatter" and len(call.results or ()) == 1
    return one and [t[:2] for t in call.operands or ()] == [
        t[:2] for t in call.results or ()
    ] * len(event.ranks)
