"""A layer whose columns are spread over the ranks: what the tests and the script are about."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


class Columns(torch.nn.Module):
    """A linear layer; each rank holds some of its columns, and all get the whole result."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        size, rank = dist.get_world_size(), dist.get_rank()
        if outputs % size:
            raise ValueError(f"outputs={outputs}: expected a multiple of the {size} ranks")
        whole = torch.nn.Linear(inputs, outputs, bias=False)  # the same on all ranks, by the seed
        self.weight = torch.nn.Parameter(whole.weight.detach().chunk(size)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = Shared.apply(x) @ self.weight.T
        return Gathered.apply(own)


class Shared(torch.autograd.Function):
    """The input of all ranks: its gradient is the sum of theirs."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous().clone()
        if not os.environ.get("BUG"):  # for the tests of this workflow
            dist.all_reduce(gradient)
        return gradient


class Gathered(torch.autograd.Function):
    """The columns of all ranks; the gradient is the own part of it."""

    @staticmethod
    def forward(context: object, own: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.chunk(dist.get_world_size(), -1)[dist.get_rank()]
