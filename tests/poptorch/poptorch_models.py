"""Models on a number of replicas, in lockstep or in threads, as tests of PopTorch's operations run
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gpusim.poptorch.replicas import Program, Step, compile_model

__all__ = ["EXECUTIONS", "REPLICAS", "Calling", "infer", "run"]

REPLICAS = [1, 2, 4]
EXECUTIONS = ["lockstep", "threads"]


class Calling(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def run(
    model: nn.Module, inputs: list[Tensor], execution: str, *, training: bool = False, **how: Any
) -> tuple[Program, Step]:
    """The model on as many replicas as the inputs are for."""
    replicas = len(inputs[0])
    program = compile_model(
        model,
        [x[0] for x in inputs],
        training=training,
        replicas=replicas,
        execution=execution,
        **how,
    )
    parameters = {n: x.detach().expand(replicas, *x.shape) for n, x in model.named_parameters()}
    buffers = {n: x.detach().expand(replicas, *x.shape) for n, x in model.named_buffers()}
    return program, program.run(parameters, buffers, inputs, counter=0, seed=3)


def infer(function: Callable[..., Any], inputs: list[Tensor], execution: str) -> Any:
    """What a function returns as a model, each tensor [replicas, ...]."""
    return run(Calling(function), inputs, execution)[1].outputs
