"""Models and files for the tests of saved models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpusim import poptorch

X = torch.linspace(-1.0, 1.0, 16).reshape(8, 2)


class Model(nn.Module):
    """Dropout, a buffer that changes, and a weight that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.again = self.last.bias

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.3, self.training)
        out = self.last(hidden) + self.again
        return out if y is None else (out, nn.functional.cross_entropy(out, y))


class Line(nn.Module):
    def __init__(self, groups: int = 0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(groups, 1) if groups else torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return poptorch.identity_loss(self.w * x, reduction="mean")


def line(tmp_path: Path, **how: Any) -> Path:
    """A small file."""
    executor = poptorch.inferenceModel(Line())
    executor.compileAndExport(tmp_path / "line", torch.ones(1), **how)
    executor.destroy()
    return tmp_path / "line"
