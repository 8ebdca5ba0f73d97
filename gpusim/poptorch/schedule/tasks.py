"""Pipeline schedules: the tasks of one update, or of one inference call, by IPU and time.

All stages take the same time. The unit is the forward pass of one stage. Copies between IPUs, and
to and from memory off the chip, take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

__all__ = ["KINDS", "PipelineSchedule", "PipelineStage", "Task", "phased", "pipelined", "sharded"]

FORWARD, BACKWARD, UPDATE = KINDS = ("forward", "backward", "update")
UPDATE_LENGTH = 1.0

DEPTH = (
    "For pipelining, depth ({}) must equal at least the number of pipeline stages ({})"  # PopART's
)
DEPTHS = {True: "gradient accumulation factor", False: "batchesPerStep"}


class PipelineStage(NamedTuple):
    """A part of a model that one IPU computes without a break.

    **Attributes**:

    - `ipu`: the number of the IPU in the replica.
    - `blocks`: the ids of its blocks.
    - `phase`: the number of its phase, in a phased model.
    """

    ipu: int
    blocks: tuple[str, ...] = ()
    phase: int = 0


@dataclass(frozen=True)
class Task:
    """A forward pass, backward pass or update of one IPU.

    **Attributes**:

    - `kind`: "forward", "backward" or "update".
    - `ipu`: the IPU.
    - `stage`: the index of the stage in the schedule; None for an update.
    - `micro_batch`: its number; None for an update.
    - `start`, `end`: in forward passes of one stage.
    """

    kind: str
    ipu: int
    stage: int | None
    micro_batch: int | None
    start: float
    end: float


@dataclass(frozen=True)
class PipelineSchedule:
    """The tasks of a replica's IPUs between two updates, or in one call of an inference model.

    **Attributes**:

    - `strategy`: "Pipelined", "Sharded" or "Phased".
    - `stages`: the stages of the forward pass, in order.
    - `steps`: the number of stages of both passes; for a phased model, the number of phases.
    - `micro_batches`: the number of micro-batches.
    - `backward`: the length of a stage's backward pass; 0 for inference.
    - `tasks`: by start time.
    """

    strategy: str
    stages: tuple[PipelineStage, ...]
    steps: int
    micro_batches: int
    backward: float
    tasks: tuple[Task, ...]

    @property
    def ipus(self) -> tuple[int, ...]:
        """The IPUs that have tasks."""
        return tuple(sorted({stage.ipu for stage in self.stages}))

    @property
    def length(self) -> float:
        """The end of the last task."""
        return max((task.end for task in self.tasks), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of the IPUs' time that they spend waiting."""
        busy = sum(task.end - task.start for task in self.tasks)
        total = self.length * len(self.ipus)
        return 1 - busy / total if total else 0.0


def pipelined(
    stages: Sequence[PipelineStage],
    micro_batches: int,
    *,
    training: bool = True,
    backward: float = 2.0,
) -> PipelineSchedule:
    """Schedule a pipeline: each stage works on another micro-batch, all advance at once.

    Neighbouring stages on one IPU are merged. The last stage's forward and backward pass are one
    step, so n stages have 2n - 1 steps in training. A cycle takes as long as its busiest IPU.

    **Arguments**:

    - `stages`: the stages of the forward pass, in order.
    - `micro_batches`: how many go through them.
    - `training`: whether there are backward passes and an update.
    - `backward`: the length of a stage's backward pass, in forward passes.

    **Raises**: ValueError if there are fewer micro-batches than steps, or for an empty list of
    stages or a number that is not positive.

    >>> schedule = pipelined([PipelineStage(ipu) for ipu in range(3)], 6, training=False)
    >>> schedule.steps, schedule.length, round(schedule.bubble, 2)
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
    return with_update("Pipelined", merged, len(passes), micro_batches, training, backward, tasks)


def sharded(
    stages: Sequence[PipelineStage],
    micro_batches: int,
    *,
    training: bool = True,
    backward: float = 2.0,
) -> PipelineSchedule:
    """Schedule one stage after the other, one micro-batch after the other.

    Arguments and errors are those of `pipelined`.
    """
    merged = merge(stages)
    check(merged, micro_batches, backward)
    slots = [[place] for place in range(len(merged))]
    tasks = sequential(merged, slots, micro_batches, training, backward)
    count = len(steps(len(merged), training))
    return with_update("Sharded", merged, count, micro_batches, training, backward, tasks)


def phased(
    stages: Sequence[PipelineStage],
    micro_batches: int,
    *,
    training: bool = True,
    backward: float = 2.0,
    separate: bool = False,
) -> PipelineSchedule:
    """Schedule one phase after the other; the stages of a phase run at once.

    Stages of one phase on the same IPU run one after the other. The backward pass takes the phases
    in reverse. Its first phase is the forward pass's last one unless `separate` is True. The other
    arguments and the errors are those of `pipelined`.
    """
    order = sorted(stages, key=lambda stage: stage.phase)
    check(order, micro_batches, backward)
    places = range(len(order))
    slots = [list(own) for _, own in groupby(places, key=lambda place: order[place].phase)]
    tasks = sequential(order, slots, micro_batches, training, backward)
    count = len(steps(len(slots), training)) + (training and separate)
    return with_update("Phased", order, count, micro_batches, training, backward, tasks)


def merge(stages: Sequence[PipelineStage]) -> list[PipelineStage]:
    """Merge neighbours on the same IPU.

    >>> merge([PipelineStage(0, ("A",)), PipelineStage(0, ("B",)), PipelineStage(1, ("C",))])
    [PipelineStage(ipu=0, blocks=('A', 'B'), phase=0), PipelineStage(ipu=1, blocks=('C',), phase=0)]
    """
    merged: list[PipelineStage] = []
    for ipu, group in groupby(stages, key=lambda stage: stage.ipu):
        own = list(group)
        blocks = dict.fromkeys(block for stage in own for block in stage.blocks)
        merged.append(PipelineStage(ipu, tuple(blocks), own[0].phase))
    return merged


def steps(count: int, training: bool) -> list[list[tuple[str, int]]]:
    """The steps of a micro-batch through `count` stages: the kind and the stage of each task.

    >>> steps(2, training=True)
    [[('forward', 0)], [('forward', 1), ('backward', 1)], [('backward', 0)]]
    """
    forward = [[(FORWARD, place)] for place in range(count)]
    if not training:
        return forward
    forward[-1].append((BACKWARD, count - 1))
    return forward + [[(BACKWARD, place)] for place in reversed(range(count - 1))]


def check(stages: Sequence[PipelineStage], micro_batches: int, backward: float) -> None:
    """Raise ValueError for an empty list or numbers out of range."""
    if not stages:
        raise ValueError("stages=[]: expected at least one stage")
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: expected at least 1")
    if not 0 < backward < float("inf"):
        raise ValueError(f"backward={backward}: expected a positive number")


def sequential(
    stages: Sequence[PipelineStage],
    slots: list[list[int]],
    micro_batches: int,
    training: bool,
    backward: float,
) -> list[Task]:
    """Run the slots one after the other, the stages of a slot at once; then all in reverse."""
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


def with_update(
    strategy: str,
    stages: Sequence[PipelineStage],
    count: int,
    micro_batches: int,
    training: bool,
    backward: float,
    tasks: list[Task],
) -> PipelineSchedule:
    """The schedule of these tasks, with an update at the end in training."""
    end = max(task.end for task in tasks)
    if training:
        ipus = sorted({stage.ipu for stage in stages})
        tasks += [Task(UPDATE, ipu, None, None, end, end + UPDATE_LENGTH) for ipu in ipus]
    tasks.sort(key=lambda task: (task.start, task.ipu))
    length = backward if training else 0.0
    return PipelineSchedule(strategy, tuple(stages), count, micro_batches, length, tuple(tasks))
