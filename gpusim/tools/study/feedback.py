"""Error feedback: each replica keeps what its own message lost, and sends it with the next value.

The sums of several steps are accumulated exactly, as an optimizer with a wide format would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.collectives.fold import fold_spec
from gpusim.fallback.formats import FLOAT32, FLOAT64
from gpusim.fallback.philox import Lanes
from gpusim.fallback.sends import edges_of, plan_of
from gpusim.fallback.wires import round_message
from gpusim.reduction import Reduction
from gpusim.tools.study.reference import ExactSum
from gpusim.tools.study.settings import Setting, carrier
from gpusim.wires import as_wire

__all__ = ["Residuals", "accumulated"]


class Residuals:
    """The residuals of all replicas' messages so far: `send` rounds the next values with them.

    A replica's message is what it sends in a wire at "ends" or "members": the parts that the order
    cuts a value into, each with scales of its own. The first step without residuals sends the bits
    of the same wire without feedback.
    """

    def __init__(self, setting: Setting, seed: int) -> None:
        self.reduction = setting.reduction(seed)
        wide = FLOAT64 in (carrier(setting.dtype), setting.accumulate)
        self.dtype = FLOAT64 if wide else FLOAT32
        self.kept: NDArray[Any] | None = None

    @property
    def rest(self) -> Reduction:
        """The Reduction of what was sent: members are rounded already, results are not."""
        wire = as_wire(self.reduction.wire)
        assert wire is not None
        above = replace(wire, at="result") if wire.at == "ends" else None
        return replace(self.reduction, wire=above)

    def send(self, members: NDArray[Any], call: int) -> NDArray[Any]:
        """Return the members and their residuals as they arrive; keep what was lost."""
        wanted: NDArray[Any] = members.astype(self.dtype)
        wanted = wanted if self.kept is None else wanted + self.kept
        sent = np.empty_like(wanted)
        size = self.reduction.groups_of or len(members)
        for number, first in enumerate(range(0, len(members), size)):
            rows = slice(first, first + size)
            sent[rows] = self._group(wanted[rows], members.dtype, call, number)
        with np.errstate(invalid="ignore", over="ignore"):
            self.kept = wanted - sent
        return sent

    def _group(
        self, rows: NDArray[Any], dtype: np.dtype[Any], call: int, number: int
    ) -> NDArray[Any]:
        """The messages of one group; a lone member sends none."""
        count, elements = rows.shape
        if count == 1:
            return rows
        wire = as_wire(self.reduction.wire)
        assert wire is not None
        info = wire.info
        spec = fold_spec(replace(self.reduction, groups_of=None, across=None))
        edges = edges_of(spec, plan_of(spec, dtype, count, (1, elements)), dtype)
        edges = sorted({*edges})
        starts, messages = info.starts(edges, elements), np.array(edges[:-1], np.intp)
        lanes = Lanes(self.reduction.seed, call, 1)
        found = np.empty_like(rows)
        for member in range(count):
            drawn = None
            if info.draws:  # the step of a member, as in a fold
                step = count + 1 + member
                drawn = lanes.draw(elements, start=0, step=step, batch_offset=number)[np.newaxis]
            with np.errstate(all="ignore"):
                row = rows[member : member + 1].copy()
                found[member] = round_message(row, info, starts, drawn, messages)
        return found


def accumulated(
    setting: Setting,
    seed: int,
    members: Callable[[int], NDArray[Any]],
    fold: Callable[[Reduction, NDArray[Any], int], NDArray[Any]],
) -> NDArray[np.float64]:
    """The exact sum of the results of all steps, rounded to float64 once.

    **Arguments**:

    - `members`: the values of a step, in the setting's format.
    - `fold`: the result of a Reduction of members, with the number of the call.
    """
    residuals = Residuals(setting, seed) if setting.feedback else None
    total: ExactSum | None = None
    for step in range(setting.steps):
        values = members(step)
        call = 2 * step  # the odd ones are of the last rounding
        if residuals is None:
            result = fold(setting.reduction(seed), values, call)
        else:
            result = fold(residuals.rest, residuals.send(values, call), call)
        total = ExactSum(result.shape[-1]) if total is None else total
        total.add(result[np.newaxis])
    assert total is not None
    return total.total().high
