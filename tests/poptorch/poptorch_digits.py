"""The digits network of the PopTorch tests, and a plain PyTorch loop that trains it, by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import Options

BATCH = 4


@dataclass(frozen=True)
class Layout:
    """How many replicas, accumulations and iterations a call has."""

    replicas: int
    accumulations: int
    iterations: int

    @property
    def batch(self) -> int:
        return BATCH * self.replicas * self.accumulations * self.iterations

    def options(self) -> Options:
        options = Options().replicationFactor(self.replicas).deviceIterations(self.iterations)
        options.Training.gradientAccumulation(self.accumulations)
        return options

    def __str__(self) -> str:
        return f"R{self.replicas}-GA{self.accumulations}-D{self.iterations}"


LAYOUTS = [Layout(r, a, d) for r in (1, 2, 4, 8) for a in (1, 4) for d in (1, 3)]


class Net(nn.Module):
    """Two layers; returns scores and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 12)
        self.scores = nn.Linear(12, 10)

    def forward(self, images: Tensor, digits: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(torch.tanh(self.hidden(images)))
        return scores, nn.functional.cross_entropy(scores, digits)


def network(seed: int = 0) -> Net:
    generator = torch.Generator().manual_seed(seed)
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return net


def digits() -> tuple[Tensor, Tensor]:
    pixels, numbers = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(numbers)


def calls(layout: Layout, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What each call gets: other images every time."""
    images, numbers = digits()
    for call in range(count):
        chosen = torch.arange(call * layout.batch, (call + 1) * layout.batch) % len(images)
        yield images[chosen], numbers[chosen]


Step = Callable[[], None]


@dataclass
class ByHand:
    """A plain loop: micro-batches one after the other, the mean of their gradients, one step."""

    net: nn.Module
    step: Step
    layout: Layout

    def call(self, images: Tensor, numbers: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Train on a call's images; the outputs of all its micro-batches, in order."""
        outputs = []
        together = self.layout.replicas * self.layout.accumulations
        batches = zip(images.split(BATCH), numbers.split(BATCH), strict=True)
        for _ in range(self.layout.iterations):
            self.net.zero_grad()
            for _ in range(together):
                scores, loss = self.net(*next(batches))
                loss.backward()
                outputs.append((scores.detach(), loss.detach()))
            for parameter in self.net.parameters():
                parameter.grad /= together
            self.step()
        return outputs


# ---------------------------------------------------------------- optimizers


def lamb_step(net: nn.Module, *, lr: float, weight_decay: float, correct: bool) -> Step:
    """LAMB as its paper has it, with the norms' ratio 1 where one of them is 0."""
    betas, eps, count = (0.9, 0.999), 1e-8, 0
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in net.parameters()}

    @torch.no_grad()
    def step() -> None:
        nonlocal count
        count += 1
        for p, (first, second) in moments.items():
            first.mul_(betas[0]).add_(p.grad, alpha=1 - betas[0])
            second.mul_(betas[1]).addcmul_(p.grad, p.grad, value=1 - betas[1])
            scale = [1 - beta**count if correct else 1.0 for beta in betas]
            update = (first / scale[0]) / ((second / scale[1]).sqrt() + eps) + weight_decay * p
            norms = float(p.norm()), float(update.norm())
            ratio = norms[0] / norms[1] if all(norms) else 1.0
            p.sub_(lr * ratio * update)

    return step


def tensorflow_rmsprop_step(net: nn.Module, *, lr: float, momentum: float) -> Step:
    """TensorFlow's RMSprop: averages begin at 1, eps is inside the root, lr in the momentum."""
    alpha, eps = 0.99, 1e-8
    state = {p: (torch.ones_like(p), torch.zeros_like(p)) for p in net.parameters()}

    @torch.no_grad()
    def step() -> None:
        for p, (average, velocity) in state.items():
            average.mul_(alpha).addcmul_(p.grad, p.grad, value=1 - alpha)
            velocity.mul_(momentum).add_(lr * p.grad / (average + eps).sqrt())
            p.sub_(velocity)

    return step


def of_torch(name: str, **values: Any) -> Callable[[nn.Module], Step]:
    return lambda net: getattr(torch.optim, name)(net.parameters(), **values).step


def clipped_sgd(net: nn.Module) -> Step:
    sgd = torch.optim.SGD(net.parameters(), lr=0.2)

    def step() -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        sgd.step()

    return step


Make = Callable[[Any], Any]

#: By name: what makes PopTorch's optimizer of parameters, and what makes the step by hand.
OPTIMIZERS: dict[str, tuple[Make, Callable[[nn.Module], Step]]] = {
    "torch SGD": (lambda p: torch.optim.SGD(p, lr=0.1), of_torch("SGD", lr=0.1)),
    "SGD": (
        lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, loss_scaling=64.0),
        of_torch("SGD", lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "SGD combined": (
        lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
        of_torch("SGD", lr=0.1, momentum=0.9),
    ),
    "Adam": (
        lambda p: poptorch.optim.Adam(p, lr=0.01, weight_decay=0.01, loss_scaling=8.0),
        of_torch("Adam", lr=0.01, weight_decay=0.01),
    ),
    "torch Adam": (lambda p: torch.optim.Adam(p, lr=0.01), of_torch("Adam", lr=0.01)),
    "AdamW": (
        lambda p: poptorch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        of_torch("AdamW", lr=0.01, weight_decay=0.1),
    ),
    "torch AdamW": (lambda p: torch.optim.AdamW(p, lr=0.01), of_torch("AdamW", lr=0.01)),
    "RMSprop": (
        lambda p: poptorch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
        of_torch("RMSprop", lr=0.01, momentum=0.5, centered=True),
    ),
    "RMSprop of TensorFlow": (
        lambda p: poptorch.optim.RMSprop(p, lr=0.01, momentum=0.5, use_tf_variant=True),
        lambda net: tensorflow_rmsprop_step(net, lr=0.01, momentum=0.5),
    ),
    "torch RMSprop": (lambda p: torch.optim.RMSprop(p, lr=0.01), of_torch("RMSprop", lr=0.01)),
    "LAMB": (
        lambda p: poptorch.optim.LAMB(p, lr=0.01, weight_decay=0.01),
        lambda net: lamb_step(net, lr=0.01, weight_decay=0.01, correct=True),
    ),
    "LAMB without correction": (
        lambda p: poptorch.optim.LAMB(p, lr=0.01, weight_decay=0.01, bias_correction=False),
        lambda net: lamb_step(net, lr=0.01, weight_decay=0.01, correct=False),
    ),
    "SGD with max_grad_norm": (
        lambda p: poptorch.optim.SGD(p, lr=0.2, max_grad_norm=0.1),
        clipped_sgd,
    ),
}


def pair(optimizer: str, layout: Layout, options: Options) -> tuple[ByHand, Any, nn.Module]:
    """The loop by hand, the training model, and its network: from the same weights."""
    make, by_hand = OPTIMIZERS[optimizer]
    net = network()
    alone = copy.deepcopy(net)
    model = poptorch.trainingModel(net, options, make(net.parameters()))
    return ByHand(alone, by_hand(alone), layout), model, net


def largest_difference(left: nn.Module, right: nn.Module) -> float:
    """Between the parameters of two networks."""
    both = zip(left.parameters(), right.parameters(), strict=True)
    return max((float((a.detach() - b.detach()).abs().max()) for a, b in both), default=math.nan)
