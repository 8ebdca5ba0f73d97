"""Models on a number of replicas, in lockstep or in threads, as tests of PopTorch's operations run
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from gpusim.poptorch.replicas import Program, Step, compile_model

__all__ = ["EXECUTIONS", "REPLICAS", "Calling", "infer", "run", "spread"]

REPLICAS = [1, 2, 4]
EXECUTIONS = ["lockstep", "threads"]


class Calling(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def spread(named: Iterable[tuple[str, Tensor]], replicas: int) -> dict[str, Tensor]:
    """The same on all replicas."""
    return {name: x.detach().expand(replicas, *x.shape) for name, x in named}


def run(
    model: nn.Module,
    inputs: list[Tensor],
    execution: str | None,
    *,
    training: bool = False,
    counter: int = 0,
    seed: int = 3,
    loss_scale: Any = 1.0,
    **how: Any,
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
    step = program.run(
        spread(model.named_parameters(), replicas),
        spread(model.named_buffers(), replicas),
        inputs,
        counter=counter,
        seed=seed,
        loss_scale=loss_scale,
    )
    return program, step


def infer(function: Callable[..., Any], inputs: list[Tensor], execution: str) -> Any:
    """What a function returns as a model, each tensor [replicas, ...]."""
    return run(Calling(function), inputs, execution)[1].outputs
