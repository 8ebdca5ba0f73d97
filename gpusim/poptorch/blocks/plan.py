"""The plan of a compiled model: IPUs, stages, phases and a pipeline schedule from its blocks."""

from __future__ import annotations

import logging
from itertools import groupby
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

from .._logging import logger
from ..options import Options
from ..options.strategies import PHASED, PIPELINED
from ..poptorch_core import createPoptorchError, popart_error
from ..schedule import PipelineSchedule, PipelineStage, phased, picture, pipelined, sharded
from ..schedule.tasks import merge, steps
from .operators import result_name
from .placement import MODES, Compilation, Conflict, OperationPlace, PlacedOperation, Recorder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PlacementPlan"]

SAME_STAGE = (
    "Ops {} have the same pipeline stage {}, but different virtual graph ids {}. All ops with the "
    "same pipeline stage must also have the same virtual graph id"
)
TRAINING_DEPTH = (
    "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the number "
    "of pipeline stages ({}) when using poptorch.PipelinedExecution. Please note that a model with "
    "{} pipeline stages in PopTorch will have an additional {} stages when training."
)
INFERENCE_DEPTH = (
    "poptorch.Options().deviceIterations must be greater than or equal to the number of pipeline "
    "stages ({}) when using PopTorch.PipelinedExecution."
)
DESCENDING = (
    "The operation {} of {} ({}) uses a result of {} ({}), which runs after it. {}s must ascend in "
    "the order of the model; {}"
)
AUTO = "poptorch.AutoStage.AutoIncrement gives every block a stage of its own, in that order"
PHASES = "put the block into a later phase"


class PlacementPlan:
    """The checked placements of a compiled model's operations.

    **Arguments**

    - `recorder`: the record of the compilation.
    - `options`: the strategy, gradient accumulation, and device iterations.
    - `training`: whether there is a backward pass.

    **Raises**: poptorch.Error, with PopTorch's or PopART's message, for a pipeline with several
    IPUs in one stage, and if a stage or phase uses a result of a later one.
    """

    def __init__(self, recorder: Recorder, options: Options, training: bool) -> None:
        self.mode = recorder.mode
        self.training = training
        self.operations = tuple(recorder.operations)
        self.separate = bool(
            options._execution_strategy.backendOptions().get("separate_backward_phase", False)
        )
        if training:
            self.micro_batches = int(options.Training.gradient_accumulation)
        else:
            self.micro_batches = int(options.device_iterations)
        self.iterations = int(options.device_iterations)
        self.highest_ipu = max((one.place.ipu for one in self.operations), default=0)
        self.pipelined = self.mode == PIPELINED and self.highest_ipu > 0
        self._check(recorder.conflict)
        self.stages = tuple(self._stages())

    @classmethod
    def of(cls, compilation: Compilation, options: Options, training: bool) -> Self:
        """The plan of a model that was compiled, logged at DEBUG."""
        assert compilation.recorder is not None, "no run of the model was recorded"
        plan = cls(compilation.recorder, options, training)
        plan.log()
        return plan

    # ---------------------------------------------------------------- stages

    @property
    def ipus(self) -> int:
        """How many IPUs a replica has: the highest number of an IPU with operations, plus one."""
        return self.highest_ipu + 1

    @property
    def pipeline_stages(self) -> int:
        """The number of pipeline stages, neighbours on one IPU merged; 2n - 1 for n in training."""
        return len(steps(len(merge(self.stages)), self.training))

    def _stages(self) -> list[PipelineStage]:
        """The stages of the forward pass, in the order in which they run."""
        places = [one.place for one in self.operations] or [OperationPlace()]
        if self.mode == PIPELINED:
            places.sort(key=lambda place: place.stage)
        elif self.mode == PHASED:
            places.sort(key=lambda place: (place.phase, place.ipu))
        stages = [
            PipelineStage(
                ipu, tuple(dict.fromkeys(place.block for place in own if place.block)), phase
            )
            for (phase, ipu), own in groupby(places, key=lambda place: (place.phase, place.ipu))
        ]
        return stages if self.mode == PHASED else merge(stages)

    # ---------------------------------------------------------------- checks

    def _check(self, conflict: Conflict | None) -> None:
        if self.pipelined:
            self._check_one_ipu_each()
        if conflict is not None and (self.pipelined or self.mode == PHASED):
            raise self._descending(conflict)

    def check_depth(self) -> None:
        """Raise poptorch.Error for a pipeline with fewer micro-batches than stages."""
        if not self.pipelined or self.micro_batches >= self.pipeline_stages:
            return
        stages, needed = len(merge(self.stages)), self.pipeline_stages
        if self.training:
            raise createPoptorchError(TRAINING_DEPTH.format(needed, stages, needed - stages))
        raise createPoptorchError(INFERENCE_DEPTH.format(needed))

    def _check_one_ipu_each(self) -> None:
        ipus: dict[int, dict[int, str]] = {}
        for one in self.operations:
            ipus.setdefault(one.place.stage, {}).setdefault(one.place.ipu, name_of(one))
        for stage, found in ipus.items():
            if len(found) > 1:
                message = SAME_STAGE.format([*found.values()], stage, sorted(found))
                raise popart_error(message)

    def _descending(self, conflict: Conflict) -> Exception:
        phases = self.mode == PHASED
        kind = "phase" if phases else "stage"
        own, source = conflict.place, conflict.source
        where = [f"{kind} {place.phase if phases else place.stage}" for place in (own, source)]
        message = DESCENDING.format(
            conflict.function,
            where[0],
            block_of(own),
            where[1],
            block_of(source),
            kind.capitalize(),
            PHASES if phases else AUTO,
        )
        return popart_error(message)

    # ---------------------------------------------------------------- the schedule and the listing

    def schedule(self, backward: float = 2.0) -> PipelineSchedule:
        """The pipeline schedule from one update to the next, or of one inference call.

        `backward` is the length of a stage's backward pass, in forward passes. ValueError if it is
        not positive.
        """
        how: Any = {"training": self.training, "backward": backward}
        if self.mode == PHASED:
            return phased(self.stages, self.micro_batches, separate=self.separate, **how)
        make = pipelined if self.mode == PIPELINED else sharded
        return make(self.stages, self.micro_batches, **how)

    def plot(
        self, path: str | PathLike[str] | None, name: str = "", backward: float = 2.0
    ) -> Figure:
        """Draw the schedule of the model `name`, and write it to a file if `path` is given.

        Raises what `gpusim.poptorch.schedule.picture.write` raises.
        """
        schedule = self.schedule(backward)
        repeated = self.training and self.iterations > 1
        note = name + (f", one of {self.iterations} device iterations" if repeated else "")
        if path is None:
            return picture.draw(schedule, note=note)
        return picture.write(schedule, path, note=note)

    def listing(self) -> list[str]:
        """A line for each operation: its results, mode, IPU and stage or phase.

        Results have PopART's names.
        """
        found, counts = [], dict[str, int]()
        for one in self.operations:
            given = [result_name(name, one.operator, counts) for name, _ in one.results]
            names = ", ".join(given) or one.function
            about = ", ".join([*(kind for _, kind in one.results), self._where(one.place)])
            found.append(f"  {one.function} was lowered to {names} [{about}]")
        return found

    def _where(self, place: OperationPlace) -> str:
        last = f"phase({place.phase})" if self.mode == PHASED else f"stage({place.stage})"
        return f"mode({MODES[self.mode]}), ipu({place.ipu}), {last}"

    def log(self) -> None:
        """Log the listing, at DEBUG."""
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("enablePipelining set to value %d", self.pipelined)
            logger.debug("Graph lowered to PopART {")
            for line in self.listing():
                logger.debug("%s", line)
            logger.debug("}")
        if not self.operations:
            logger.info("No IPUs are used by this model. This may happen if the model is trivial")


def name_of(operation: PlacedOperation) -> str:
    return operation.results[0][0] if operation.results else operation.function


def block_of(place: OperationPlace) -> str:
    return f"block {place.block}" if place.block else "before the first block"
