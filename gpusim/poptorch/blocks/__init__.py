"""Blocks of a model: annotations of its operations, and what follows for its IPUs.

- `annotations`: Block, BeginBlock and BlockFunction, and models printed with their blocks.
- `placement`: the block, stage, phase and IPU of every operation of a compiled model.
- `plan`: checks, IPU counts, stages and the pipeline schedule, by the execution strategy.
"""

from .annotations import (
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    module_repr,
    removeBlocks,
)
from .placement import Recorder, compiling, recording
from .plan import PlacementPlan

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "LegacyBeginBlockFn",
    "PlacementPlan",
    "Recorder",
    "compiling",
    "module_repr",
    "recording",
    "removeBlocks",
]
