"""Training programs with one fault each, other than the planted ones; the kind is the key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.check.right_training import (
    Copy,
    Reduce,
    TensorParallel,
    average,
    batch,
    begin,
    model_of,
    train,
)

__all__ = ["PROGRAMS"]

PROGRAMS: dict[str, tuple[str, Callable[[int], Any]]] = {}


def of_kind(kind: str) -> Callable[[Callable[[int], Any]], Callable[[int], Any]]:
    def keep(function: Callable[[int], Any]) -> Callable[[int], Any]:
        PROGRAMS[function.__name__] = kind, function
        return function

    return keep


@of_kind("unequal-parameters")
def clamped_on_one_rank(rank: int) -> None:
    rank, _ = begin()
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        train(model, optimizer, rank, 1, step)
        if rank == 0 and step == 1:
            with torch.no_grad():
                model.module[0].weight.clamp_(-0.1, 0.1)


@of_kind("unequal-parameters")
def warm_up_by_rank(rank: int) -> None:
    rank, _ = begin()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step * rank))
    for step in range(3):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        average(model)
        optimizer.step()
        schedule.step()


@of_kind("unequal-parameters")
def noise_on_gradients(rank: int) -> None:
    rank, _ = begin()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(rank)
    for step in range(2):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        average(model)
        for parameter in model.parameters():
            parameter.grad += 0.01 * torch.randn_like(parameter)
        optimizer.step()


@of_kind("gradient-not-reduced")
def reduced_before_the_backward_pass(rank: int) -> None:
    rank, _ = begin()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
        parameter.grad = torch.zeros_like(parameter)
    for step in range(2):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        average(model)
        loss.backward()
        optimizer.step()


@of_kind("gradient-not-reduced")
def copies_are_reduced(rank: int) -> None:
    rank, world = begin()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for step in range(2):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            mean = parameter.grad.clone()
            dist.all_reduce(mean)
            mean /= world
            assert mean.isfinite().all()
        optimizer.step()


@of_kind("gradient-not-reduced")
def a_head_past_ddp(rank: int) -> None:
    """Two losses; the second backward pass goes past DDP."""
    rank, _ = begin()
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model.module(x).square().mean().backward()
        optimizer.step()


@of_kind("gradient-not-reduced")
def the_loss_is_reduced_instead(rank: int) -> None:
    rank, world = begin()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        with torch.no_grad():
            dist.all_reduce(loss)
            loss /= world
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@of_kind("unseeded-difference")
def a_new_head_on_each_rank(rank: int) -> None:
    rank, _ = begin()
    model: Any = model_of()
    torch.manual_seed(rank)
    model[3] = nn.Linear(12, 3)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        average(model)
        optimizer.step()


@of_kind("mean-of-means")
def accuracies_as_numbers(rank: int) -> None:
    rank, world = begin()
    model = model_of()
    correct = total = 0
    for step in range(2 + rank % 2):
        x, y = batch(rank, step, 30)
        correct += (model(x).argmax(-1) == y).sum().item()
        total += len(y)
    accuracy = torch.tensor(correct / total)
    dist.all_reduce(accuracy)
    assert accuracy / world <= 1


@of_kind("mean-of-means")
def losses_over_batches(rank: int) -> None:
    rank, world = begin()
    model = model_of()
    losses = []
    for step in range(2 + rank % 2):
        x, y = batch(rank, step)
        losses.append(F.cross_entropy(model(x), y).item())
    mean = torch.tensor(sum(losses) / len(losses))
    dist.all_reduce(mean)
    assert mean / world > 0


@of_kind("mean-of-means")
def padded_rows_under_ddp(rank: int) -> None:
    rank, _ = begin()
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, y = batch(rank, step)
        losses = F.cross_entropy(model(x), y, reduction="none")
        mask = torch.arange(8) < 4 + rank
        loss = (losses * mask).sum() / mask.sum().clamp(min=1) + 0.1 * model.module[0].bias.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Shards(nn.Module):
    """A layer whose hidden units are split, with dropout of them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 6, bias=False)
        self.dropout = nn.Dropout(0.4)
        torch.manual_seed(0)

    def forward(self, x: Tensor) -> Any:
        h = self.dropout(torch.relu(self.up(Copy.apply(x, dist.group.WORLD))))
        return Reduce.apply(self.down(h), dist.group.WORLD)


@of_kind("same-random-bits")
def hidden_units_are_dropped_alike(rank: int) -> None:
    rank, _ = begin()
    model = Shards(rank)
    for step in range(2):
        x, _ = batch(0, step)
        model(x).square().mean().backward()


@of_kind("other-random-bits")
def residuals_are_dropped_differently(rank: int) -> None:
    rank, _ = begin()
    model = TensorParallel(dist.group.WORLD, 0.3)
    torch.manual_seed(rank)
    for step in range(2):
        x, _ = batch(0, step)
        model(x).square().mean().backward()
