"""Timetables: the tasks of one update, or of an inference call, each with its IPU, start and end.

All stages take the same time, a forward pass of one being the unit; copies between IPUs, and to and
from memory off the chip, take none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

__all__ = ["KINDS", "Stage", "Task", "Timetable", "phased", "pipelined", "sharded"]

FORWARD, BACKWARD, UPDATE = KINDS = ("forward", "backward", "update")
UPDATE_LENGTH = 1.0

DEPTH = (
    "For pipelining, depth ({}) must equal at least the number of pipeline stages ({})"  # PopART's
)
DEPTHS = {True: "gradient accumulation factor", False: "batchesPerStep"}


class Stage(NamedTuple):
    """A part of a model that one IPU computes in one go.

    Attributes:
        ipu: which of the replica's IPUs.
        blocks: the ids of the blocks that are in it.
        phase: in which phase of a phased model.
    """

    ipu: int
    blocks: tuple[str, ...] = ()
    phase: int = 0


@dataclass(frozen=True)
class Task:
    """What one IPU does without a break.

    Attributes:
        kind: "forward", "backward" or "update".
        ipu: the IPU.
        stage: the number of the stage in the timetable; None for updates, which are the IPU's.
        micro_batch: its number; None for updates.
        start, end: in forward passes of one stage.
    """

    kind: str
    ipu: int
    stage: int | None
    micro_batch: int | None
    start: float
    end: float


@dataclass(frozen=True)
class Timetable:
    """The tasks of a replica's IPUs between two updates, or in one call of an inference model.

    Attributes:
        strategy: "Pipelined", "Sharded" or "Phased".
        stages: those of the forward pass, in order.
        steps: how many there are with those of the backward pass; of a phased model, of phases.
        micro_batches: how many go through them.
        backward: how long a stage's backward pass takes; 0 in inference.
        tasks: in the order in which they start.
    """

    strategy: str
    stages: tuple[Stage, ...]
    steps: int
    micro_batches: int
    backward: float
    tasks: tuple[Task, ...]

    @property
    def ipus(self) -> tuple[int, ...]:
        """The IPUs that have anything to do."""
        return tuple(sorted({stage.ipu for stage in self.stages}))

    @property
    def length(self) -> float:
        """When the last task ends."""
        return max((task.end for task in self.tasks), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of the IPUs' time in which they wait."""
        busy = sum(task.end - task.start for task in self.tasks)
        there = self.length * len(self.ipus)
        return 1 - busy / there if there else 0.0


def pipelined(
    stages: Sequence[Stage], micro_batches: int, *, training: bool = True, backward: float = 2.0
) -> Timetable:
    """Each stage works on another micro-batch; in every cycle all go on by one stage.

    Neighbouring stages of one IPU are one. The last stage's forward and backward pass are one step,
    so that n stages have 2n - 1 in training. A cycle takes as long as the IPU with most to do in
    it.

    Raises:
        ValueError: for fewer micro-batches than steps, and arguments that make no sense.

    >>> table = pipelined([Stage(0), Stage(1), Stage(2)], 6, training=False)
    >>> table.steps, table.length, round(table.bubble, 2)
    (3, 8.0, 0.25)
    """
    merged = merge(stages)
    check(merged, micro_batches, backward)
    passes = steps(len(merged), training)
    if micro_batches < len(passes):
        raise ValueError(DEPTH.format(DEPTHS[training], len(passes)))
    lengths = {FORWARD: 1.0, BACKWARD: backward}
    tasks: list[Task] = []
    begin = 0.0
    for cycle in range(micro_batches + len(passes) - 1):
        free = dict.fromkeys((stage.ipu for stage in merged), begin)
        for number, own in enumerate(passes):
            micro_batch = cycle - number
            if not 0 <= micro_batch < micro_batches:
                continue
            for kind, place in own:
                ipu = merged[place].ipu
                end = free[ipu] + lengths[kind]
                tasks.append(Task(kind, ipu, place, micro_batch, free[ipu], end))
                free[ipu] = end
        begin = max(free.values())
    return finished("Pipelined", merged, len(passes), micro_batches, training, backward, tasks)


def sharded(
    stages: Sequence[Stage], micro_batches: int, *, training: bool = True, backward: float = 2.0
) -> Timetable:
    """One stage after the other, one micro-batch after the other. ValueError as for `pipelined`."""
    merged = merge(stages)
    check(merged, micro_batches, backward)
    slots = [[place] for place in range(len(merged))]
    tasks = in_turn(merged, slots, micro_batches, training, backward)
    count = len(steps(len(merged), training))
    return finished("Sharded", merged, count, micro_batches, training, backward, tasks)


def phased(
    stages: Sequence[Stage],
    micro_batches: int,
    *,
    training: bool = True,
    backward: float = 2.0,
    separate: bool = False,
) -> Timetable:
    """One phase after the other, its stages at once; the backward pass in reverse.

    Stages of the same phase on the same IPU are one after the other. The last phase's forward and
    backward pass are one phase unless `separate`. ValueError as for `pipelined`.
    """
    order = sorted(stages, key=lambda stage: stage.phase)
    check(order, micro_batches, backward)
    places = range(len(order))
    slots = [list(own) for _, own in groupby(places, key=lambda place: order[place].phase)]
    tasks = in_turn(order, slots, micro_batches, training, backward)
    count = len(steps(len(slots), training)) + (training and separate)
    return finished("Phased", order, count, micro_batches, training, backward, tasks)


def merge(stages: Sequence[Stage]) -> list[Stage]:
    """Neighbours on the same IPU made one.

    >>> merge([Stage(0, ("A",)), Stage(0, ("B",)), Stage(1, ("C",))])
    [Stage(ipu=0, blocks=('A', 'B'), phase=0), Stage(ipu=1, blocks=('C',), phase=0)]
    """
    merged: list[Stage] = []
    for ipu, group in groupby(stages, key=lambda stage: stage.ipu):
        own = list(group)
        blocks = dict.fromkeys(block for stage in own for block in stage.blocks)
        merged.append(Stage(ipu, tuple(blocks), own[0].phase))
    return merged


def steps(count: int, training: bool) -> list[list[tuple[str, int]]]:
    """The steps of a micro-batch through so many stages: what each does, and of which stage.

    >>> steps(2, training=True)
    [[('forward', 0)], [('forward', 1), ('backward', 1)], [('backward', 0)]]
    """
    forward = [[(FORWARD, place)] for place in range(count)]
    if not training:
        return forward
    forward[-1].append((BACKWARD, count - 1))
    return forward + [[(BACKWARD, place)] for place in reversed(range(count - 1))]


def check(stages: Sequence[Stage], micro_batches: int, backward: float) -> None:
    """ValueError for arguments that make no sense."""
    if not stages:
        raise ValueError("stages=[]: expected at least one stage")
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: expected at least 1")
    if not 0 < backward < float("inf"):
        raise ValueError(f"backward={backward}: expected a positive number")


def in_turn(
    stages: Sequence[Stage],
    slots: list[list[int]],
    micro_batches: int,
    training: bool,
    backward: float,
) -> list[Task]:
    """The slots one after the other, each a number of stages at once; then all in reverse."""
    tasks: list[Task] = []
    begin = 0.0
    passes = [(FORWARD, own, 1.0) for own in slots]
    if training:
        passes += [(BACKWARD, own[::-1], backward) for own in reversed(slots)]
    for micro_batch in range(micro_batches):
        for kind, own, length in passes:
            free = dict.fromkeys((stages[place].ipu for place in own), begin)
            for place in own:
                ipu = stages[place].ipu
                tasks.append(Task(kind, ipu, place, micro_batch, free[ipu], free[ipu] + length))
                free[ipu] += length
            begin = max(free.values())
    return tasks


def finished(
    strategy: str,
    stages: Sequence[Stage],
    count: int,
    micro_batches: int,
    training: bool,
    backward: float,
    tasks: list[Task],
) -> Timetable:
    """The timetable of these tasks; in training, after the update that follows them."""
    end = max(task.end for task in tasks)
    if training:
        ipus = sorted({stage.ipu for stage in stages})
        tasks += [Task(UPDATE, ipu, None, None, end, end + UPDATE_LENGTH) for ipu in ipus]
    tasks.sort(key=lambda task: (task.start, task.ipu))
    kept = backward if training else 0.0
    return Timetable(strategy, tuple(stages), count, micro_batches, kept, tuple(tasks))
