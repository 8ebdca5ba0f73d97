"""Plain NumPy on stacked arrays, as a careful user writes it: results in arrays made beforehand,
16-bit values added in float32, block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.cases import SOURCE, Case

from .base import LocalPeer
from .inputs import stacked

BLOCK = 2**18  # elements that are converted at once


class NumPy(LocalPeer):
    """No map, no library of collectives."""

    name = "NumPy"

    def operation(self, case: Case) -> Callable[[], Any]:
        x, *rest = stacked(case)
        if case.ragged:
            return _ragged(case, x, rest[0])
        makers: dict[str, Callable[[Case, NDArray[Any]], Callable[[], Any]]] = {
            "psum": _sum,
            "pmean": _mean,
            "pmax": _max,
            "psum_scatter": _sum,  # row r of the sum is replica r's
            "all_gather": _copy,
            "pbroadcast": lambda case, x: _copy(case, x[SOURCE]),
            "all_to_all": lambda case, x: _copy(case, x.swapaxes(0, 1)),
            "ppermute": _roll,
        }
        return makers[case.collective](case, x)


def _sum(case: Case, x: NDArray[Any]) -> Callable[[], Any]:
    out = np.empty_like(x[0])
    if case.dtype.itemsize > 2:
        return lambda: np.add.reduce(x, axis=0, out=out)
    total = np.empty(x.shape[1:], np.float32)
    rows = max(1, BLOCK // case.elements)

    def add() -> NDArray[Any]:
        total.fill(0)
        for start in range(0, case.replicas, rows):
            block = x[start : start + rows].astype(np.float32)
            np.add(total, np.add.reduce(block, axis=0) if rows > 1 else block[0], out=total)
        np.copyto(out, total, casting="same_kind")
        return out

    return add


def _mean(case: Case, x: NDArray[Any]) -> Callable[[], Any]:
    add = _sum(case, x)

    def mean() -> NDArray[Any]:
        total: NDArray[Any] = add()
        total /= case.dtype.type(case.replicas)
        return total

    return mean


def _max(case: Case, x: NDArray[Any]) -> Callable[[], Any]:
    out = np.empty_like(x[0])
    return lambda: np.maximum.reduce(x, axis=0, out=out)


def _copy(case: Case, view: NDArray[Any]) -> Callable[[], Any]:
    out = np.empty(view.shape, view.dtype)

    def copy() -> NDArray[Any]:
        np.copyto(out, view)
        return out

    return copy


def _roll(case: Case, x: NDArray[Any]) -> Callable[[], Any]:
    out = np.empty_like(x)

    def roll() -> NDArray[Any]:
        out[1:], out[0] = x[:-1], x[-1]
        return out

    return roll


def _ragged(case: Case, x: NDArray[Any], output: NDArray[Any]) -> Callable[[], Any]:
    out = np.empty_like(output)
    plan = case.plan
    tables = [
        table.tolist() for table in (plan.input_offsets, plan.output_offsets, plan.sizes)
    ]  # Python's own integers index faster

    def exchange() -> NDArray[Any]:
        np.copyto(out, output)
        for sender, (starts, targets, sizes) in enumerate(zip(*tables, strict=True)):
            values = x[sender]
            for receiver, (start, target, rows) in enumerate(
                zip(starts, targets, sizes, strict=True)
            ):
                out[receiver, target : target + rows] = values[start : start + rows]
        return out

    return exchange
