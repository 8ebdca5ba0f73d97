"""Models in blocks, compiled, and what there is to see of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpusim import poptorch
from gpusim.poptorch import Options
from gpusim.poptorch.blocks import Block, PlacementPlan

Strategy = Any


class Layers(nn.Module):
    """So many layers one after the other, `forward` of a test in between."""

    def __init__(self, count: int, run: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self._run = run

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        if self._run is not None:
            x = self._run(self, x)
        else:
            for layer in self.layers:
                x = layer(x)
        return x if y is None else (x, functional.mse_loss(x, y))


def in_blocks(*blocks: tuple[str | None, int | None]) -> Layers:
    """A model with a layer in each of the blocks."""

    def run(model: Any, x: Tensor) -> Tensor:
        Block.useAutoId()
        for layer, ids in zip(model.layers, blocks, strict=True):
            with Block(*ids):
                x = layer(x)
        return x

    return Layers(len(blocks), run)


def compiled(
    model: nn.Module,
    strategy: Strategy = None,
    *,
    iterations: int = 8,
    replicas: int = 1,
    threads: bool = False,
) -> poptorch.PoplarExecutor:
    """The model, compiled for inference on IPUs that are not attached to."""
    options = Options().deviceIterations(iterations).replicationFactor(replicas)
    options.autoRoundNumIPUs(True)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    if threads:
        options._Popart.set("gpusim.execution", "threads")
    executor = poptorch.inferenceModel(model, options)
    executor.compile(torch.ones(iterations * replicas, 4))
    return executor


def plan(*args: Any, **kwargs: Any) -> PlacementPlan:
    executor = compiled(*args, **kwargs)
    assert executor._executable is not None
    return executor._executable.plan


def places(*args: Any, **kwargs: Any) -> list[tuple[str, int, int]]:
    """Block, stage and IPU of each operation."""
    return [
        (one.place.block, one.place.stage, one.place.ipu)
        for one in plan(*args, **kwargs).operations
    ]


def message(text: str, kind: str = "poptorch_cpp_error") -> str:
    return "^" + re.escape(f"'{kind}': {text}") + "$"


def train(model: nn.Module, accumulation: int, strategy: Strategy = None) -> PlacementPlan:
    options = Options().autoRoundNumIPUs(True)
    options.Training.gradientAccumulation(accumulation)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    executor = poptorch.trainingModel(model, options)
    executor.compile(torch.ones(accumulation, 4), torch.ones(accumulation, 4))
    assert executor._executable is not None
    return executor._executable.plan


class Loss(nn.Module):
    """A model of `in_blocks`, its loss in the last block."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for ipu, layer in enumerate(self.layers):
            Block.start(f"block {ipu}", ipu)
            x = layer(x)
        return functional.mse_loss(x, y)
