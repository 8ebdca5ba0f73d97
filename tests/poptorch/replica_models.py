"""Models on replicas, and the loop over PyTorch that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpusim.poptorch.losses import identity_loss
from gpusim.poptorch.replicas import Program, Step, flatten

from . import poptorch_models

BATCH, WIDTH = 6, 4


class Model(nn.Module):
    """A matrix, other modules and buffers, and what a test does with them."""

    pos: Tensor
    mask: Tensor
    average: Tensor
    count: Tensor

    def __init__(
        self, f: Callable[..., Any], *modules: nn.Module, buffers: dict[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inner = nn.ModuleList(modules)
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)
        self.f = f

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(self, *args, **kwargs)


def inputs(replicas: int, *more: Callable[[int], Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(replicas, BATCH, WIDTH), *(make(replicas) for make in more)]


def classes(replicas: int) -> Tensor:
    return torch.randint(0, WIDTH, (replicas, BATCH))


def run(
    model: nn.Module,
    given: list[Tensor],
    execution: str | None,
    *,
    training: bool = True,
    seed: int = 7,
    **how: Any,
) -> tuple[Program, Step]:
    """As `poptorch_models.run`, a step of training."""
    return poptorch_models.run(model, given, execution, training=training, seed=seed, **how)


@dataclass
class Alone:
    """What PyTorch makes of one replica's micro-batch."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def alone(model: nn.Module, given: list[Tensor], loss: Callable[[Any], Tensor]) -> list[Alone]:
    """A loop over replicas, written out by hand; the model is left as it was."""
    before = {name: x.clone() for name, x in model.named_buffers()}
    found = []
    for replica in range(len(given[0])):
        with torch.no_grad():
            for name, x in model.named_buffers():
                x.copy_(before[name])
        model.zero_grad(set_to_none=True)
        result = model(*(x[replica].clone() for x in given))
        loss(result).backward()
        gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        buffers = {name: x.clone() for name, x in model.named_buffers()}
        found.append(Alone([x.detach() for x in flatten(result)[0]], gradients, buffers))
    with torch.no_grad():
        for name, x in model.named_buffers():
            x.copy_(before[name])
    return found


def assert_as_alone(step: Step, expected: list[Alone]) -> None:
    assert {*step.gradients} == {*expected[0].gradients}
    outputs = flatten(step.outputs)[0]
    for replica, one in enumerate(expected):
        for got, wanted in zip(outputs, one.outputs, strict=True):
            torch.testing.assert_close(got[replica], wanted)
        for name, wanted in one.gradients.items():
            torch.testing.assert_close(step.gradients[name][replica], wanted)
        for name, wanted in one.buffers.items():
            torch.testing.assert_close(step.buffers[name][replica], wanted)


def assert_same(a: Step, b: Step, *, bits: bool = True) -> None:
    assert {*a.gradients} == {*b.gradients}
    parts = [
        flatten((s.outputs, s.gradients, s.buffers, s.changed_inputs, s.anchors, s.loss))[0]
        for s in (a, b)
    ]
    for x, y in zip(*parts, strict=True):
        assert x.dtype == y.dtype
        if bits:
            assert torch.equal(x, y)
        else:
            torch.testing.assert_close(x, y)


def mean(y: Tensor) -> Tensor:
    return identity_loss(y, "mean")


class MLP(nn.Module):
    def __init__(self, normalized: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8) if normalized else nn.Identity()
        self.out = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.out(self.norm(self.hidden(x)).relu())
        return y, F.cross_entropy(y, t)
