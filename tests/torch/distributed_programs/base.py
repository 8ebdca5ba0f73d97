"""How a program is registered, and what several train: a network, its data and a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Results = dict[str, Tensor]
legacy: Any = np.random  # the global generator
PROGRAMS: dict[str, Callable[..., Results]] = {}


def program(function: Callable[..., Results]) -> Callable[..., Results]:
    """Give a program its name."""
    PROGRAMS[function.__name__] = function
    return function


def start() -> tuple[int, int]:
    """Join the group of all ranks; this rank and their number."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def weights(model: nn.Module) -> Results:
    """The parameters and buffers of a model, gathered where they are sharded."""
    found = {}
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = whole.detach().clone()
    return found


def batches(rank: int, steps: int, width: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank's own data."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        x = torch.randn(6, width, generator=generator)
        yield x, x.roll(1, 1) + 0.1 * torch.randn(6, width, generator=generator)


class Network(nn.Module):
    """Layers of the same width, with normalisation and, if asked for, dropout."""

    def __init__(self, width: int, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.dropout(F.gelu(layer(x)))
        return self.norm(x)


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """The model with weights from a generator of its own, which free threads do not share."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x).float(), y).backward()
    optimizer.step()
