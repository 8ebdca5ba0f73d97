"""A model with its data, and what tests of PoplarExecutor make of it."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import Options

X, Y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [0.0]])


class Model(nn.Module):
    """A layer that is normalised, and a weight that is there twice."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.again = self.scale
        self.norm = nn.BatchNorm1d(1) if normalised else None

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.lin(x) * self.scale
        if self.norm is not None:
            out = self.norm(out)
        return out if y is None else (out, nn.functional.mse_loss(out, y))


def training(
    model: nn.Module, options: Options | None = None, lr: float = 0.1
) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=lr))


def message(text: str) -> str:
    return "^" + re.escape(f"'poptorch_py_error': {text}")
