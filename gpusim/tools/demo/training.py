"""The demo's trainings: one for each type of the gradients and each reduction of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gpusim
from gpusim import Reduction, lax
from gpusim.fallback.formats import FLOAT32, FLOAT64
from gpusim.tools import digits
from gpusim.tools.digits import Digits, Tree
from gpusim.tools.progress import Advance

__all__ = ["VARIANTS", "Comparison", "DemoRun", "Variant", "compare", "train"]

FLOAT16 = np.dtype(np.float16)
RATE, MOMENTUM = 0.4, 0.9
# Gradients are multiplied by this before they are rounded to their type, as is usual for
# float16: it lifts the small ones out of the subnormals, and 64 of them stay below 65504.
LOSS_SCALE = 2.0**7
EXACT = Reduction(accumulate=FLOAT64)


@dataclass(frozen=True)
class Variant:
    """One row of the table: the gradients' type, and the reduction that sums them."""

    name: str
    gradients: np.dtype[Any]
    reduction: Reduction
    weights: np.dtype[Any] = FLOAT32


REFERENCE = Variant("float64", FLOAT64, Reduction(), weights=FLOAT64)
VARIANTS = (
    REFERENCE,
    Variant("float32, linear", FLOAT32, Reduction()),
    Variant("float16, linear", FLOAT16, Reduction()),
    Variant("float16, reverse", FLOAT16, Reduction(order="reverse")),
    Variant("float16, ring", FLOAT16, Reduction(order="ring")),
    Variant("float16, tree", FLOAT16, Reduction(order="tree")),
    Variant("float16, added in float32", FLOAT16, Reduction(accumulate=FLOAT32)),
)


@dataclass(frozen=True)
class DemoRun:
    """The figures and weights of one training."""

    variant: Variant
    losses: NDArray[Any]  # by step, the mean over all replicas
    sum_errors: NDArray[Any]  # by step, of the summed gradient, relative in the 2-norm
    first_gradient: Tree
    weights: list[Tree]  # after each epoch
    test_accuracy: float


@dataclass(frozen=True)
class Comparison:
    """A run beside the float64 one: largest absolute differences."""

    run: DemoRun
    gradient_difference: float  # of the first step's mean gradient
    weight_differences: NDArray[Any]  # of the weights after each epoch


def train(data: Digits, variant: Variant, epochs: int, advance: Advance) -> DemoRun:
    """Train from the seed's first weights; calls `advance(name, 1)` after every step."""
    mean_of = gpusim.vmap(
        lambda values: lax.pmean(values, "i", reduction=EXACT), out_axes=None, axis_name="i"
    )

    def send(gradients: Tree, number: int) -> tuple[Tree, dict[str, float]]:
        sent = {name: (g * LOSS_SCALE).astype(variant.gradients) for name, g in gradients.items()}
        return sent, dict.fromkeys(gradients, LOSS_SCALE)

    weights = {k: w.astype(variant.weights) for k, w in digits.initial(data.seed).items()}
    update = digits.momentum(RATE, MOMENTUM)
    losses, errors, by_step = [], [], []
    first_gradient: Tree = {}
    with gpusim.reduction(variant.reduction):
        for step in digits.train(data, weights, epochs, variant.weights, send, update):
            exact = mean_of({k: g.astype(FLOAT64) for k, g in step.gradients.items()})
            losses.append(float(mean_of(step.losses)))
            errors.append(relative_error(step.mean, exact))
            first_gradient = first_gradient or step.mean
            by_step.append(step.weights)
            advance(variant.name, 1)
    return DemoRun(
        variant=variant,
        losses=np.array(losses),
        sum_errors=np.array(errors),
        first_gradient=first_gradient,
        weights=by_step[data.steps - 1 :: data.steps],
        test_accuracy=digits.accuracy(by_step[-1], data.test_images, data.test_digits),
    )


def relative_error(approximate: Tree, exact: Tree) -> float:
    """||approximate - exact|| / ||exact||, over all arrays together."""
    difference = sum(np.sum(np.square(approximate[k] - exact[k])) for k in exact)
    return float(np.sqrt(difference / sum(np.sum(np.square(e)) for e in exact.values())))


def largest_difference(one: Tree, other: Tree) -> float:
    """The largest absolute difference between two trees of arrays."""
    return max(float(np.max(np.abs(one[k] - other[k]))) for k in other)


def compare(runs: Sequence[DemoRun]) -> list[Comparison]:
    """Each run beside the float64 one."""
    reference = next(run for run in runs if run.variant is REFERENCE)
    return [
        Comparison(
            run,
            largest_difference(run.first_gradient, reference.first_gradient),
            np.array(list(map(largest_difference, run.weights, reference.weights))),
        )
        for run in runs
    ]
