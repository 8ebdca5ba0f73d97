"""Data-parallel training: each replica's gradient on its own share, summed by `lax.psum`.

What a run varies is the `Setting`: the type in which gradients travel, and how they are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import gpusim
from gpusim import Reduction, lax
from gpusim.tools.demo import model
from gpusim.tools.demo.data import Digits
from gpusim.tools.demo.model import Tree

__all__ = ["SETTINGS", "Result", "Run", "Setting", "compare", "train"]

FLOAT16, FLOAT32, FLOAT64 = (np.dtype(t) for t in (np.float16, np.float32, np.float64))
RATE, MOMENTUM = 0.4, 0.9
# Gradients are multiplied by this before they are rounded to their type, as is usual for
# float16: it lifts the small ones out of the subnormals, and 64 of them stay below 65504.
LOSS_SCALE = 2.0**7
EXACT = Reduction(accumulate=FLOAT64)


@dataclass(frozen=True)
class Setting:
    """One row of the table: the gradients' type, and the reduction that sums them."""

    name: str
    gradients: np.dtype
    reduction: Reduction
    weights: np.dtype = FLOAT32


REFERENCE = Setting("float64", FLOAT64, Reduction(), weights=FLOAT64)
SETTINGS = (
    REFERENCE,
    Setting("float32, linear", FLOAT32, Reduction()),
    Setting("float16, linear", FLOAT16, Reduction()),
    Setting("float16, reverse", FLOAT16, Reduction(order="reverse")),
    Setting("float16, ring", FLOAT16, Reduction(order="ring")),
    Setting("float16, tree", FLOAT16, Reduction(order="tree")),
    Setting("float16, added in float32", FLOAT16, Reduction(accumulate=FLOAT32)),
)


@dataclass(frozen=True)
class Run:
    """What one training left behind."""

    setting: Setting
    losses: np.ndarray  # by step, the mean over all replicas
    sum_errors: np.ndarray  # by step, of the summed gradient, relative in the 2-norm
    first_gradient: Tree
    weights: list[Tree]  # after each epoch
    test_accuracy: float


@dataclass(frozen=True)
class Result:
    """A run beside the float64 one: largest absolute differences."""

    run: Run
    gradient_difference: float  # of the first step's mean gradient
    weight_differences: np.ndarray  # of the weights after each epoch


def replica_step(
    gradients_as: np.dtype, weights: Tree, velocity: Tree, images: Any, labels: Any
) -> tuple[Tree, Tree, Tree, Tree, Any]:
    """One step of one replica on its share. What it returns is the same on every replica.

    Returns the new weights and velocity, the mean gradient, the same without any rounding to
    `gradients_as`, and the mean loss.
    """
    loss, gradients = model.loss_and_gradients(weights, images, labels)
    exact = lax.pmean({k: g.astype(np.float64) for k, g in gradients.items()}, "i", reduction=EXACT)

    sent = {k: (g * LOSS_SCALE).astype(gradients_as) for k, g in gradients.items()}
    total = lax.psum(sent, "i")
    scale = LOSS_SCALE * lax.axis_size("i")
    mean = {k: g.astype(weights[k].dtype) / scale for k, g in total.items()}

    velocity = {k: MOMENTUM * v + mean[k] for k, v in velocity.items()}
    weights = {k: w - RATE * velocity[k] for k, w in weights.items()}
    return weights, velocity, mean, exact, lax.pmean(loss, "i", reduction=EXACT)


def train(digits: Digits, setting: Setting, epochs: int, advance: Callable[[str], None]) -> Run:
    """Train from the seed's first weights; calls `advance(name)` after every step."""
    step = gpusim.vmap(
        partial(replica_step, setting.gradients),
        in_axes=(None, None, 0, 0),
        out_axes=None,
        axis_name="i",
    )
    weights = {k: w.astype(setting.weights) for k, w in model.initial(digits.seed).items()}
    velocity = {k: np.zeros_like(w) for k, w in weights.items()}
    losses, errors = [], []
    first_gradient: Tree = {}
    by_step = []
    for images, labels in digits.deal(epochs):
        shares = images.astype(setting.weights), labels.astype(setting.weights)
        with gpusim.reduction(setting.reduction):
            weights, velocity, mean, exact, loss = step(weights, velocity, *shares)
        losses.append(float(loss))
        errors.append(relative_error(mean, exact))
        first_gradient = first_gradient or mean
        by_step.append(weights)
        advance(setting.name)
    return Run(
        setting=setting,
        losses=np.array(losses),
        sum_errors=np.array(errors),
        first_gradient=first_gradient,
        weights=by_step[digits.steps - 1 :: digits.steps],
        test_accuracy=model.accuracy(weights, digits.test_images, digits.test_digits),
    )


def relative_error(approximate: Tree, exact: Tree) -> float:
    """||approximate - exact|| / ||exact||, over all arrays together."""
    difference = sum(np.sum(np.square(approximate[k] - exact[k])) for k in exact)
    return float(np.sqrt(difference / sum(np.sum(np.square(e)) for e in exact.values())))


def largest_difference(one: Tree, other: Tree) -> float:
    """The largest absolute difference between two trees of arrays."""
    return max(float(np.max(np.abs(one[k] - other[k]))) for k in other)


def compare(runs: Sequence[Run]) -> list[Result]:
    """Each run beside the float64 one."""
    reference = next(run for run in runs if run.setting is REFERENCE)
    return [
        Result(
            run,
            largest_difference(run.first_gradient, reference.first_gradient),
            np.array(list(map(largest_difference, run.weights, reference.weights))),
        )
        for run in runs
    ]
