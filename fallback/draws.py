"""The random lanes of a box: runs of consecutive elements, each with its batch offset.
A run is as long as the box stays contiguous in the flattened value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .layout import Index
from .philox import Lanes


class Draws:
    """The lanes of one box, in the box's C order.

    `box` spans the batch axes, whose entries have the batch `offsets`, then the axes of a value of
    shape `value`, whose first element has the index `first`.
    """

    def __init__(
        self,
        lanes: Lanes,
        box: Index,
        value: Sequence[int],
        offsets: NDArray[np.uint64],
        first: int = 0,
    ) -> None:
        self._lanes = lanes
        axes = offsets.ndim
        starts, self._run = _runs(box[axes:], value)
        self._rows = [
            (first + start, offset)
            for offset in offsets[box[:axes]].ravel().tolist()
            for start in starts
        ]

    def draw(self, shape: tuple[int, ...], step: int) -> NDArray[np.uint32]:
        """The lanes of a block of this shape, the box once or for several steps, in new memory."""
        if math.prod(shape) == self._run:
            ((start, offset),) = self._rows
            drawn = self._lanes.draw(self._run, start=start, step=step, batch_offset=offset)
            return drawn.reshape(shape)
        lanes = np.empty(shape, np.uint32)
        self.fill(lanes, step)
        return lanes

    def fill(self, out: NDArray[np.uint32], step: int) -> None:
        """Fill C-contiguous `out`: the box once for each step from `step` on, as often as fits."""
        rows = out.reshape(-1, self._run)
        for index, row in enumerate(rows):
            later, position = divmod(index, len(self._rows))
            start, offset = self._rows[position]
            self._lanes.fill(row, start=start, step=step + later, batch_offset=offset)


def _runs(box: Index, value: Sequence[int]) -> tuple[list[int], int]:
    """The flat indices at which the box's runs start, in C order, and their common length."""
    axis = len(box)
    run = 1
    while axis:
        axis -= 1
        length = box[axis].stop - box[axis].start
        run *= length
        if length != value[axis]:
            break
    starts = np.zeros(1, np.int64)
    for outer in range(axis):
        steps = np.arange(box[outer].start, box[outer].stop) * math.prod(value[outer + 1 :])
        starts = np.add.outer(starts, steps).ravel()
    if box:
        starts = starts + box[axis].start * math.prod(value[axis + 1 :])
    return starts.tolist(), run
