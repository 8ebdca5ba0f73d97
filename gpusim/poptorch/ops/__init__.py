"""poptorch.ops: PopTorch's own operations, for models on simulated replicas and outside of them."""

from __future__ import annotations

from ..blocks import BeginBlock, Block, BlockFunction, LegacyBeginBlockFn, removeBlocks
from ..losses import identity_loss
from .control import cond, for_loop
from .cpu import CPU
from .ctc import ctc_beam_search_decoder
from .custom import custom_op, register_custom_op
from .hints import (
    MultiConv,
    NameScope,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
)
from .overlap import set_overlap_for_input, set_overlap_for_output
from .points import fps, nearest
from .printing import ipu_print_tensor
from .slices import dynamic_slice, dynamic_update

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CPU",
    "LegacyBeginBlockFn",
    "MultiConv",
    "NameScope",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "register_custom_op",
    "removeBlocks",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
