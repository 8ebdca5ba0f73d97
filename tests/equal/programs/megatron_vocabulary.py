"""A vocabulary cut over a tensor-parallel group, and what ends a step on such a model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import wrong
from megatron_layers import Grid, Reduce, ReduceScatterSequence, cut, draw, total
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F


def owned(tokens: Tensor, rows: int, rank: int) -> tuple[Tensor, Tensor]:
    """The tokens' numbers among this rank's rows, and where they are another rank's."""
    outside = (tokens < rank * rows) | (tokens >= (rank + 1) * rows)
    return (tokens - rank * rows).masked_fill(outside, 0), outside


class VocabularyParallelEmbedding(nn.Module):
    def __init__(
        self, name: str, rows: int, width: int, grid: Grid, sequence: bool = False
    ) -> None:
        super().__init__()
        self.grid, self.sequence = grid, sequence
        self.weight = cut(draw(name, rows, width, scale=1), grid)

    def forward(self, tokens: Tensor) -> Tensor:
        index, outside = owned(tokens, len(self.weight), self.grid.rank)
        y = F.embedding(index, self.weight)
        if not wrong("rows-not-masked"):
            y = y.masked_fill(outside[..., None], 0)
        combine = ReduceScatterSequence if self.sequence else Reduce
        return combine.apply(y, self.grid.tensor)


class CrossEntropy(Function):
    """The loss of each token, of logits cut over the vocabulary."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, smoothing: float, grid: Grid) -> Tensor:
        top = logits.amax(-1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=grid.tensor)
        logits = logits - top
        exponentials = logits.exp()
        denominator = exponentials.sum(-1)
        if not wrong("exponentials-not-reduced"):
            denominator = total(denominator, grid.tensor)

        index, outside = owned(targets, logits.size(-1), grid.rank)
        target = logits.gather(-1, index[..., None]).squeeze(-1)
        if not wrong("target-not-masked"):
            target = target.masked_fill(outside, 0)
        if not wrong("target-not-reduced"):
            target = total(target, grid.tensor)

        if wrong("smoothing-not-reduced"):
            vocabulary, mean = logits.size(-1), logits.mean(-1)
        else:
            vocabulary = logits.size(-1) * grid.size
            mean = total(logits.sum(-1), grid.tensor) / vocabulary

        ctx.save_for_backward(exponentials / denominator[..., None], index, outside)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return denominator.log() - (1 - smoothing) * target - smoothing * mean

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, index, outside = ctx.saved_tensors
        wanted = torch.zeros_like(softmax).scatter_(-1, index[..., None], 1)
        wanted = wanted.masked_fill(outside[..., None], 0)
        smooth = (1 - ctx.smoothing) * wanted + ctx.smoothing / ctx.vocabulary
        return (softmax - smooth) * gradient[..., None], None, None, None


class VocabularyParallelCrossEntropy(nn.Module):
    def __init__(self, grid: Grid, smoothing: float = 0.0) -> None:
        super().__init__()
        self.grid, self.smoothing = grid, smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return CrossEntropy.apply(logits, targets, self.smoothing, self.grid)


def part(x: Tensor, grid: Grid) -> Tensor:
    """This rank's part of a global batch."""
    return x.chunk(grid.data.size())[grid.data.rank()]


def average(x: Tensor, grid: Grid) -> Tensor:
    return total(x.detach(), grid.data) / grid.data.size()


def finish_gradients(model: nn.Module, grid: Grid) -> None:
    """Sum what tensor-parallel ranks each have a part of, and average over the data."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if getattr(parameter, "partial", False):
            gradient = total(gradient, grid.tensor)
            if wrong("norm-gradients-averaged"):
                gradient /= grid.size
        if getattr(parameter, "copies", 1) > 1 and not wrong("shared-heads-not-summed"):
            gradient = total(gradient, grid.shared)
        parameter.grad = average(gradient, grid)


def clip(model: nn.Module, grid: Grid, most: float) -> None:
    """Clip by the norm of the whole gradient, in which each weight counts once."""
    squares = torch.zeros(())
    for parameter in model.parameters():
        copies = getattr(parameter, "copies", grid.size)
        if wrong("clip-counts-copies"):
            copies = 1
        squares += parameter.grad.square().sum() / copies
    norm = total(squares, grid.tensor).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), most, norm, foreach=False)
