"""Blocks of a model: what says where its operations belong, and what follows for its IPUs.

- `annotations`: Block, BeginBlock, BlockFunction. `printing`: models shown with their blocks.
- `placement`: which block, stage, phase and IPU every operation of a compiled model has.
- `plan`: what the strategy makes of that: checks, IPU counts, stages, the schedule.
"""

from .annotations import BeginBlock, Block, BlockFunction, LegacyBeginBlockFn, removeBlocks
from .placement import Recorder, compiling, recording
from .plan import Plan
from .printing import module_repr

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "LegacyBeginBlockFn",
    "Plan",
    "Recorder",
    "compiling",
    "module_repr",
    "recording",
    "removeBlocks",
]
