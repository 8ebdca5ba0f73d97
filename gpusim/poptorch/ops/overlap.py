"""Inputs and outputs that are copied while an IPU computes.

Copies take no time here, but PopTorch's conditions are checked.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..enums import OutputMode, OverlapMode
from ..options.strategies import PIPELINED
from ..poptorch_core import compiler_error, createPoptorchError
from ..replicas.forward import ForwardMode, forward_mode, model_context
from ..replicas.structures import map_leaves
from .operation import operation

__all__ = ["set_overlap_for_input", "set_overlap_for_output"]

PIPELINES = (
    "Overlapped IO is not supported with poptorch.PipelinedExecution. If you are using only one "
    "IPU, please switch to poptorch.ShardedExecution."
)
NO_TILES = (
    "No IO tiles allocated. You must allocate at least 32 IO tiles using "
    "poptorch.Options().TensorLocations.numIOTiles."
)
OUTPUT_MODE = (
    "Unsupported output mode for overlapped IO. Please switch output mode to "
    "poptorch.OutputMode.All or poptorch.OutputMode.Sum."
)
NO_INPUT = (
    "poptorch.set_overlap_for_input applied on a node which is not a tensor input to the model."
)
NOT_ALONE = (
    "poptorch.set_overlap_for_input must be the only op applied to an input. This is not the case "
    "for input {number} to the model."
)
NO_OUTPUT = (
    "poptorch.set_overlap_for_output applied on a node which is not a tensor output to the model."
)
TWICE = (
    "poptorch.set_overlap_for_output cannot be used with a tensor that is returned twice. Please "
    "check all returned tensors including those nested in tuples/lists."
)


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Copy inputs to the IPU while it computes.

    **Arguments**

    - `input_tensors`: a tensor, or lists, tuples and dictionaries of them; poptorch.Error for
      anything else. In a model they must be its inputs, which no other operation may use.
    - `mode`: an OverlapMode, else an AssertionError. With overlap a model needs IO tiles and a
      strategy other than PipelinedExecution; poptorch.Error otherwise.

    **Returns**

    The same structure of new tensors with the same values.

    >>> import torch
    >>> set_overlap_for_input([torch.ones(2)], OverlapMode.OverlapAccumulationLoop)
    [tensor([1., 1.])]
    """
    assert isinstance(mode, OverlapMode), f"mode must be an OverlapMode, got {mode!r}"

    def of_input(tensor: Any) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise createPoptorchError(
                f"You may only set overlap for torch.tensor inputs. {type(tensor)} is not supported"
                "."
            )
        forward = forward_mode()
        if forward is not None:
            _check_input(forward, tensor)
            forward.option_checks.append(lambda: _check_options(mode))
        return overlapped_input(tensor)

    return map_leaves(of_input, input_tensors)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Copy outputs from the IPU while it computes.

    **Arguments**

    - `output_tensors`: a tensor, or lists, tuples and dictionaries of them; poptorch.Error for
      anything else. The model must return each result once.
    - `mode`: as for `set_overlap_for_input`. The output mode must be All or Sum.

    **Returns**

    The same structure of new tensors with the same values.

    >>> import torch
    >>> set_overlap_for_output({"y": torch.ones(2)}, OverlapMode.NoOverlap)
    {'y': tensor([1., 1.])}
    """
    assert isinstance(mode, OverlapMode), f"mode must be an OverlapMode, got {mode!r}"

    def of_output(tensor: Any) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise createPoptorchError(
                "You may only set overlap for torch.tensor outputs. "
                f"{type(tensor)} is not supported."
            )
        result = overlapped_output(tensor)
        forward = forward_mode()
        if forward is not None:
            forward.checks.append(lambda outputs: _check_output(result, outputs))
            forward.option_checks.append(lambda: _check_options(mode, output=True))
        return result

    return map_leaves(of_output, output_tensors)


@operation
def overlapped_input(tensor: Tensor) -> Tensor:
    return tensor.clone()


@operation
def overlapped_output(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _check_options(mode: OverlapMode, *, output: bool = False) -> None:
    now = model_context()
    if mode is OverlapMode.NoOverlap or now is None or now.options is None:
        return
    options = now.options
    if options._execution_strategy.backendOptions()["execution_mode"] == PIPELINED:
        raise compiler_error(PIPELINES)
    if not options.TensorLocations.exists("numIOTiles"):
        raise compiler_error(NO_TILES)
    if output and options.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise compiler_error(OUTPUT_MODE)


def _check_input(forward: ForwardMode, tensor: Tensor) -> None:
    numbers = [number for number, own in enumerate(forward.inputs) if own is tensor]
    if not numbers:
        raise compiler_error(NO_INPUT)

    def alone(outputs: list[Tensor]) -> None:
        returned = sum(output is tensor for output in outputs)
        if forward.uses[id(tensor)] + returned > 1:
            raise compiler_error(NOT_ALONE.format(number=numbers[0]))

    forward.checks.append(alone)


def _check_output(result: Tensor, outputs: list[Tensor]) -> None:
    count = sum(output is result for output in outputs)
    if count != 1:
        raise compiler_error(TWICE if count else NO_OUTPUT)
