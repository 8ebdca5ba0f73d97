"""Models that an Updater of gpusim.poptorch.optim trains with made-up gradients, for its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gpusim import poptorch
from gpusim.poptorch.optim import updater_for

Make = Callable[..., Any]
SHAPES = {"lin.weight": (5, 7), "lin.bias": (5,), "scale": ()}
HALF = torch.float16


def model(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def gradients(step: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step + 1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def stacked(values: Iterable[dict[str, Any]]) -> dict[str, Tensor]:
    """Groups of replicas, one for each dictionary."""
    all_values = list(values)
    return {name: torch.stack([v[name].detach() for v in all_values]) for name in all_values[0]}


class Trained:
    """A model whose weights an Updater changes; loss scaling is applied as an executor would."""

    def __init__(
        self,
        make: Make,
        *,
        options: Any = None,
        seeds: tuple[int, ...] = (0,),
        dtype: torch.dtype = torch.float32,
        **arguments: Any,
    ) -> None:
        self.named = model()
        self.optimizer = make(self.named.values())
        self.options = options or poptorch.Options()
        self.seeds = seeds
        values = stacked(model(seed) for seed in seeds)
        self.weights = {name: value.to(dtype) for name, value in values.items()}
        shaped = self.named
        if len(seeds) > 1:  # as the user has such parameters, with the groups in front
            shaped = {name: torch.nn.Parameter(value) for name, value in values.items()}
            self.optimizer = make(shaped.values())
        self.named = shaped
        self.updater = updater_for(self.optimizer, self.options, shaped, **arguments)
        self.state = self.updater.init(self.weights)
        self.steps = 0

    def step(self, count: int = 1) -> Trained:
        for _ in range(count):
            found = stacked(gradients(self.steps, seed) for seed in self.seeds)
            scale = self.updater.loss_scale
            scaled = {
                name: (value * scale).to(self.weights[name].dtype) for name, value in found.items()
            }
            self.updater.apply(self.weights, scaled, self.state)
            self.steps += 1
        return self


def by_torch(make: Make, steps: int) -> dict[str, Tensor]:
    """The weights that an optimizer of torch.optim makes."""
    parameters = model()
    optimizer = make(parameters.values())
    for step in range(steps):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: parameter.detach()[None] for name, parameter in parameters.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **kwargs: float) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], **kwargs, msg=name)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert_same(found, expected, rtol=0, atol=0)


CLOSE = {"rtol": 2e-6, "atol": 2e-6}


def assert_groups_are_models(make: Make, **arguments: Any) -> None:
    seeds = (0, 1, 2)
    together = Trained(make, seeds=seeds, **arguments).step(3)
    for group, seed in enumerate(seeds):
        alone = Trained(make, seeds=(seed,), **arguments).step(3)
        part = {name: weight[group : group + 1] for name, weight in together.weights.items()}
        assert_equal(part, alone.weights)


def stochastic_options() -> Any:
    options = poptorch.Options()
    options.Precision.enableStochasticRounding(True)
    return options


def automatic_options() -> Any:
    options = poptorch.Options()
    options.Training.setAutomaticLossScaling(True)
    return options
