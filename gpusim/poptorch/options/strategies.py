"""How the blocks of a model are spread over IPUs: stages, phases and the four strategies.

All IPUs of a replica are one here, so a strategy says how many there are, and nothing runs apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Self

from gpusim.poptorch._logging import logger
from gpusim.poptorch.enums import AutoStage, Liveness

__all__ = [
    "BlockId",
    "IStageManager",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "_IExecutionStrategy",
]

BlockId = str

PIPELINED, SHARDED, PHASED = 0, 1, 2  # the backend's execution_mode


class Plain:
    """Equal if the same was said to them, and shown with it."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        said = ", ".join(f"{name.lstrip('_')}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({said})"


class Stage(Plain):
    """Blocks that run on one IPU, one after the other.

    AssertionError if an id is not a string.

    >>> Stage("encoder", "decoder").ipu(1).blocks
    ['encoder', 'decoder']
    """

    def __init__(self, *block_ids: BlockId) -> None:
        assert all(isinstance(block, str) for block in block_ids), (
            f"Block IDs are supposed to be strings but got {block_ids}"
        )
        self._blocks = block_ids
        self._stage_id = -1
        self._phase_id = -1
        self._ipu: int | None = None

    @property
    def blocks(self) -> list[BlockId]:
        """The ids of its blocks."""
        return list(self._blocks)

    def ipu(self, ipu: int) -> Self:
        """Which IPU of the replica runs it."""
        assert isinstance(ipu, int)
        self._ipu = ipu
        return self

    def __repr__(self) -> str:
        on = "" if self._ipu is None else f".ipu({self._ipu})"
        return f"Stage({', '.join(map(repr, self._blocks))}){on}"


class Phase(Plain):
    """Stages that run at the same time: given as stages, or as the blocks of a single one.

    AssertionError for a mixture, or anything else.
    """

    def __init__(self, *arg: BlockId | Stage) -> None:
        if all(isinstance(element, Stage) for element in arg):
            self.stages = [stage for stage in arg if isinstance(stage, Stage)]
        else:
            assert all(isinstance(element, str) for element in arg), (
                "All arguments must either be block IDs (strings) or Stages: "
                f"{[type(element) for element in arg]}"
            )
            self.stages = [Stage(*map(str, arg))]

    def stage(self, idx: int) -> Stage:
        """One of its stages."""
        return self.stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Give each stage its IPU. AssertionError for another number of IPUs."""
        assert len(ipus) == len(self.stages), (
            f"Phase contains {len(self.stages)} stages but you provided {len(ipus)} ipus"
        )
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)


# ---------------------------------------------------------------- who knows a block's stage


class IStageManager(Plain, ABC):
    """Finds the stage and the IPU of a block while a model's blocks are entered."""

    def __init__(self) -> None:
        self._next_auto_id = 0

    @abstractmethod
    def getStage(self, block_id: BlockId, ipu: int | None = None) -> Stage:
        """The block's stage; `ipu` is what the block itself asks for."""

    def nextAutoId(self) -> BlockId:
        """An id for a block that has none: "0", "1", ..."""
        self._next_auto_id += 1
        return str(self._next_auto_id - 1)

    def resetAutoId(self) -> None:
        """Start again at "0"."""
        self._next_auto_id = 0

    def beginStage(
        self, user_id: BlockId | None, ipu_id_from_block: int | None
    ) -> tuple[Stage, int]:
        """The stage of a block that begins, and its IPU: the stage's, else the block's own.

        A block without an IPU runs on the one with its stage's number.
        """
        block = user_id or self.nextAutoId()
        stage = self.getStage(block, ipu_id_from_block)
        ipu = ipu_id_from_block if stage._ipu is None else stage._ipu
        if ipu is None:
            ipu = stage._stage_id
            logger.debug("No IPU specified for block %s: default to stage_id %d", block, ipu)
        return stage, ipu


class AutomaticStages(IStageManager):
    """Makes a stage for each block that it meets."""

    def __init__(self, auto_stage: AutoStage) -> None:
        super().__init__()
        self._auto_stage = auto_stage
        self._block_map: dict[BlockId, Stage] = {}

    def getStage(self, block_id: BlockId, ipu: int | None = None) -> Stage:
        if block_id not in self._block_map:
            stage = Stage(block_id)
            if self._auto_stage == AutoStage.SameAsIpu:
                assert ipu is not None, (
                    "poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for "
                    f"block {block_id}"
                )
                stage._stage_id = ipu
            else:
                stage._stage_id = len(self._block_map) + 1
            self._block_map[block_id] = stage
        return self._block_map[block_id]


class GivenStages(IStageManager):
    """Knows the stages that a strategy was made with, and no others."""

    def __init__(self, block_map: dict[BlockId, Stage]) -> None:
        super().__init__()
        self._block_map = block_map

    def getStage(self, block_id: BlockId, ipu: int | None = None) -> Stage:
        assert block_id in self._block_map, (
            f"Unknown Block '{block_id}' list of expected Blocks: {list(self._block_map)}"
        )
        return self._block_map[block_id]


# ---------------------------------------------------------------- strategies


class _IExecutionStrategy(Plain):
    """The base class of strategies."""

    def __init__(self, stages_manager: IStageManager, block_map: dict[BlockId, Stage]) -> None:
        self._block_map = block_map
        self._stages_manager = stages_manager

    def stage(self, block_id: BlockId) -> Stage:
        """The stage that a block was put into. AssertionError for one that was not."""
        assert block_id in self._block_map, f"Unknown block {block_id}"
        return self._block_map[block_id]

    def backendOptions(self) -> dict[str, int | bool]:
        """The strategy's items of `Options.toDict`."""
        return {}


class PipelinedExecution(_IExecutionStrategy):
    """Each stage on its IPU, all at work at once on successive micro-batches.

    **Arguments**

    - `args`: stages, block ids or lists of block ids, each of which is a stage, in order; or an
      AutoStage, which says which stage a block is in; nothing is `AutoStage.SameAsIpu`.

    AssertionError for a block in two stages.

    >>> PipelinedExecution("A", Stage("B", "C")).stage("C")
    Stage('B', 'C')
    """

    def __init__(self, *args: Any) -> None:
        block_map: dict[BlockId, Stage] = {}
        auto_stage = AutoStage.SameAsIpu
        if len(args) == 1 and isinstance(args[0], AutoStage):
            auto_stage = args[0]
        else:
            for stage_id, argument in enumerate(args):
                stage = stage_from(argument)
                stage._stage_id = stage_id
                add_blocks(block_map, stage, f"stage {stage_id}")
        manager = GivenStages(block_map) if block_map else AutomaticStages(auto_stage)
        super().__init__(manager, block_map)

    def backendOptions(self) -> dict[str, int | bool]:
        return {"execution_mode": PIPELINED}


class ShardedExecution(PipelinedExecution):
    """Each stage on its IPU, one after the other. Arguments as for `PipelinedExecution`."""

    def backendOptions(self) -> dict[str, int | bool]:
        return {"execution_mode": SHARDED}


class _IPhasedExecution(_IExecutionStrategy):
    """Phases one after the other; between them tensors may leave the chip."""

    def __init__(self, *phases: Phase | list[Any] | Stage | BlockId) -> None:
        assert phases, (
            "There is currently no AutoStage for PhasedExecution, please explicitly specify the "
            "phases"
        )
        self._tensors_liveness = Liveness.AlwaysLive
        self._separate_backward_phase = False
        self._phases = [phase_from(argument) for argument in unpacked(phases)]
        block_map: dict[BlockId, Stage] = {}
        for phase_id, phase in enumerate(self._phases):
            for stage in phase.stages:
                stage._phase_id = phase_id
                add_blocks(block_map, stage, f"phase {phase_id}")
        super().__init__(GivenStages(block_map), block_map)

    def phase(self, phase: int) -> Phase:
        """A phase by its number, from 0. AssertionError for other numbers."""
        assert isinstance(phase, int) and phase >= 0, "Phases are identified by positive integers"
        return self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        """Whether the last forward phase is apart from the first backward one."""
        assert isinstance(use, bool)
        self._separate_backward_phase = use
        return self

    def backendOptions(self) -> dict[str, int | bool]:
        return {
            "execution_mode": PHASED,
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": self._tensors_liveness.value,
        }


class ParallelPhasedExecution(_IPhasedExecution):
    """Phases that alternate between two groups of IPUs: each is a Phase, or a list for one.

    AssertionError without phases, and for a block in two stages.
    """

    def backendOptions(self) -> dict[str, int | bool]:
        return {**super().backendOptions(), "serial_phases_execution": False}

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> Self:
        """Whether tensors wait for the backward pass off the chip."""
        assert isinstance(off_chip, bool)
        self._tensors_liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        return self


class SerialPhasedExecution(_IPhasedExecution):
    """Phases one after the other on the same IPUs. Arguments as for `ParallelPhasedExecution`."""

    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        """How long tensors stay on the chip."""
        assert isinstance(liveness, Liveness)
        self._tensors_liveness = liveness
        return self

    def backendOptions(self) -> dict[str, int | bool]:
        return {**super().backendOptions(), "serial_phases_execution": True}


# ---------------------------------------------------------------- what users may write


def stage_from(argument: Any) -> Stage:
    """A stage as it is, or of a block's id, or of several."""
    if isinstance(argument, Stage):
        return argument
    return Stage(argument) if isinstance(argument, str) else Stage(*argument)


def phase_from(argument: Any) -> Phase:
    """A phase as it is, or of a stage, a block's id, or a list of either."""
    if isinstance(argument, Phase):
        return argument
    return Phase(*argument) if isinstance(argument, list) else Phase(argument)


def unpacked(phases: tuple[Any, ...]) -> Iterable[Any]:
    """PopTorch's documentation writes one list of Phases where its code expects several."""
    if len(phases) == 1 and isinstance(phases[0], list):
        (inner,) = phases
        if inner and all(isinstance(element, Phase | list) for element in inner):
            return inner
    return phases


def add_blocks(block_map: dict[BlockId, Stage], stage: Stage, place: str) -> None:
    for block in stage.blocks:
        assert block not in block_map, f"{block} associated with more than one stage"
        on = "" if stage._ipu is None else f" on IPU {stage._ipu}"
        logger.debug("block %s added to %s%s", block, place, on)
        block_map[block] = stage
