"""Data parallelism of a convolutional network whose batch norms take the batch of all ranks.

Gradients are averaged in a hook of each parameter. The batch norm is written by hand: its means are
reduced over the ranks, forwards and backwards.
"""

from __future__ import annotations

import zlib

import common
import torch
import torch.distributed as dist
from common import wrong
from torch import Tensor, nn

BUGS = (
    "backward-not-reduced",
    "not-synchronised",
    "shortcut-not-synchronised",
    "variances-averaged",
)
BATCH, CHANNELS, HEIGHT, WIDTH, CLASSES = 24, 3, 9, 7, 11


class Mean(torch.autograd.Function):
    """The mean over the ranks; so is its gradient, as each rank's loss is a mean."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        if wrong("backward-not-reduced"):
            return gradient / dist.get_world_size()
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


class BatchNorm(nn.Module):
    """A batch norm of (batch, channels, height, width), over the ranks if synchronised."""

    def __init__(self, channels: int, synchronised: bool = True) -> None:
        super().__init__()
        self.synchronised = synchronised
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        dims = (0, 2, 3)
        mean, square = x.mean(dims), (x * x).mean(dims)
        if self.synchronised and wrong("variances-averaged"):
            variance = Mean.apply(square - mean * mean)
            mean = Mean.apply(mean)
        else:
            if self.synchronised:
                mean, square = Mean.apply(torch.stack([mean, square]))
            variance = square - mean * mean
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(variance, 0.1)
        scale = self.weight * torch.rsqrt(variance + 1e-5)
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


class Block(nn.Module):
    """Two convolutions beside a shortcut that changes the channels."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        self.norm1 = BatchNorm(out, not wrong("not-synchronised"))
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = BatchNorm(out, not wrong("not-synchronised"))
        self.shortcut = nn.Conv2d(channels, out, 1)
        local = wrong("not-synchronised") or wrong("shortcut-not-synchronised")
        self.shortcut_norm = BatchNorm(out, not local)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut_norm(self.shortcut(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8, 10), Block(10, 14))
        self.head = nn.Linear(14, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Draw each parameter by a seed of its own."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(values / parameter[0].numel() ** 0.5)
        else:
            parameter.copy_(0.1 * values + ("norm" in name and name.endswith("weight")))


def photographs(step: int) -> tuple[Tensor, Tensor]:
    """The global batch: images whose contrasts differ, and their classes."""
    generator = torch.Generator().manual_seed(3000 + step)
    images = torch.randn(BATCH, CHANNELS, HEIGHT, WIDTH, generator=generator)
    contrast = 0.5 + torch.rand(BATCH, 1, 1, 1, generator=generator)
    classes = torch.randint(CLASSES, (BATCH,), generator=generator)
    return images * contrast + torch.randn(BATCH, 1, 1, 1, generator=generator), classes


def average(parameter: Tensor) -> None:
    """Average a gradient over the ranks, as soon as it is complete."""
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def main() -> None:
    options = common.options(BUGS)
    rank, ranks = common.start()
    model = Model()
    fill(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for step in range(options.steps):
        images, classes = (part.chunk(ranks)[rank] for part in photographs(step))
        loss = nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / ranks
        dist.all_reduce(total)
        common.report(step, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
