"""Layers cut over a tensor-parallel group, and the collectives between them with their gradients.

With `sequence`, what lies between the layers is cut over the length, in place of being replicated.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import wrong
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn import functional as F


@dataclass(frozen=True)
class Grid:
    """The ranks that share this rank's layers, its shard, and some heads."""

    tensor: ProcessGroup
    data: ProcessGroup  # one rank of each copy of the model
    shared: ProcessGroup  # those of `tensor` with the same key and value heads

    @property
    def size(self) -> int:
        return self.tensor.size()

    @property
    def rank(self) -> int:
        return self.tensor.rank()


def grid(tp: int, shares: int = 1) -> Grid:
    """Groups of `tp` neighbours, and in these groups of `shares` neighbours."""
    ranks = range(dist.get_world_size())
    tp = min(tp, len(ranks))

    def mine(groups: list[range]) -> ProcessGroup:
        made = [dist.new_group(list(group)) for group in groups]
        return next(
            made for made, group in zip(made, groups, strict=True) if dist.get_rank() in group
        )

    return Grid(
        tensor=mine([ranks[n : n + tp] for n in ranks[::tp]]),
        data=mine([ranks[n::tp] for n in range(tp)]),
        shared=mine([ranks[n : n + shares] for n in ranks[::shares]]),
    )


def total(x: Tensor, group: ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def gathered(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    if wrong("gathered-out-of-order") and dim == 1:
        parts = parts[1:] + parts[:1]
    return torch.cat(parts, dim)


def scattered(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part of the length of the sum over the ranks."""
    parts = [part.contiguous() for part in x.chunk(group.size(), 1)]
    part = torch.empty_like(parts[0])
    dist.reduce_scatter(part, parts, group=group)
    return part


class Copy(Function):
    """Replicated activations enter a layer that is cut: their gradients are summed."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return total(gradient, ctx.group), None


class Reduce(Function):
    """Partial sums leave a layer that is cut."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        return total(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class GatherSequence(Function):
    """A part of the length enters a layer that is cut."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        if wrong("gather-gradient-only-split"):
            return gradient.chunk(ctx.group.size(), 1)[ctx.group.rank()].contiguous(), None
        return scattered(gradient, ctx.group), None


class ReduceScatterSequence(Function):
    """Partial sums of the whole length leave a layer that is cut."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        if wrong("output-only-split"):
            return x.chunk(group.size(), 1)[group.rank()].contiguous()
        return scattered(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.group, 1), None


class GatherFeatures(Function):
    """Outputs of a layer that is cut become whole on all ranks, which go on alike."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group, x.dim() - 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size(), -1)[ctx.group.rank()].contiguous(), None


def draw(name: str, *shape: int, scale: float = 0.2) -> Tensor:
    """A whole weight, by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return scale * torch.randn(*shape, generator=generator)


def cut(
    whole: Tensor, grid: Grid, dim: int = 0, sections: Sequence[int] = (), shares: int = 1
) -> nn.Parameter:
    """This rank's shard: its part of each of the sections of a whole weight along `dim`."""
    size, rank = grid.size // shares, grid.rank // shares
    if wrong("shards-all-alike"):
        rank = 0
    parts = whole.split(list(sections) or whole.size(dim), dim)
    shard = nn.Parameter(torch.cat([part.chunk(size, dim)[rank] for part in parts], dim))
    shard.copies = shares
    return shard


def replicated(whole: Tensor, sequence: bool = False) -> nn.Parameter:
    """The same on all ranks; with `sequence` each rank's gradient is of its part of the length."""
    parameter = nn.Parameter(whole)
    parameter.partial = sequence
    return parameter


class ColumnParallelLinear(nn.Module):
    """Outputs are cut over the ranks, each of their sections by itself."""

    def __init__(
        self, name: str, inputs: int, sections: Sequence[int], grid: Grid, bias: bool = True,
        sequence: bool = False, shares: int = 1, gathers: bool = False, sums_gradient: bool = True,
        group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.grid, self.group, self.sequence = grid, group or grid.tensor, sequence
        self.gathers, self.sums_gradient = gathers, sums_gradient
        outputs = sum(sections)
        self.weight = cut(draw(name, outputs, inputs), grid, 0, sections, shares)
        self.bias = cut(draw(f"{name}.bias", outputs), grid, 0, sections, shares) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence:
            x = GatherSequence.apply(x, self.group)
        elif self.sums_gradient:
            x = Copy.apply(x, self.group)
        y = F.linear(x, self.weight, self.bias)
        return GatherFeatures.apply(y, self.group) if self.gathers else y


class RowParallelLinear(nn.Module):
    """Inputs are cut over the ranks; the bias is not."""

    def __init__(
        self, name: str, inputs: int, outputs: int, grid: Grid, sequence: bool = False,
        group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.group, self.sequence = group or grid.tensor, sequence
        self.weight = cut(draw(name, outputs, inputs), grid, 1)
        seed = f"{name}.bias {grid.rank}" if wrong("bias-drawn-by-rank") else f"{name}.bias"
        partial = sequence and not wrong("bias-gradient-not-reduced")
        self.bias = replicated(draw(seed, outputs), partial)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if wrong("bias-before-reduce"):
            return Reduce.apply(y + self.bias, self.group)
        if self.sequence:
            return ReduceScatterSequence.apply(y, self.group) + self.bias
        if wrong("output-not-reduced"):
            return y + self.bias
        return Reduce.apply(y, self.group) + self.bias
