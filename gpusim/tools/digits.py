"""Data-parallel training of a small network on handwritten digits, for the demo and the studies.

The images are the 1,797 that scikit-learn ships. The network has one hidden layer of tanh and a
softmax; its gradient is written out, so that it runs on plain arrays and inside `gpusim.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gpusim
from gpusim import lax
from gpusim.tools.options import UsageError

__all__ = [
    "CLASSES",
    "PIXELS",
    "Digits",
    "Step",
    "Tree",
    "accuracy",
    "initial",
    "load",
    "loss_and_gradients",
    "momentum",
    "train",
]

Tree = dict[str, Any]  # arrays by name: weights, velocities, gradients
PIXELS, HIDDEN, CLASSES = 64, 64, 10
TEST_IMAGES = 360  # every fifth
BATCH = 256  # images per step over all replicas, as near as equal shares come


@dataclass(frozen=True)
class Digits:
    """Images (n, 64) in 0..1 and one-hot labels (n, 10), float64, and how replicas share them."""

    images: NDArray[Any]
    labels: NDArray[Any]
    test_images: NDArray[Any]
    test_digits: NDArray[Any]
    replicas: int
    seed: int

    @property
    def share(self) -> int:
        """Images that each replica gets in a step."""
        return max(1, BATCH // self.replicas)

    @property
    def steps(self) -> int:
        """Steps of an epoch: each deals every replica `share` images of its own."""
        return len(self.images) // (self.replicas * self.share)

    def deal(self, epochs: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Stacked shares (replicas, share, 64) and labels (replicas, share, 10), step by step.

        The order of the images depends on the seed alone, so every setting sees the same.
        """
        order = np.random.default_rng([self.seed, 1])
        dealt = (self.steps, self.replicas, self.share)
        for _ in range(epochs):
            chosen = order.permutation(len(self.images))[: np.prod(dealt)].reshape(dealt)
            for step in chosen:
                yield self.images[step], self.labels[step]


def load(replicas: int, seed: int) -> Digits:
    """The digits for `replicas` replicas.

    **Raises**: UsageError, a ValueError, if there are fewer training images than replicas.
    """
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images, labels = pixels / 16.0, np.eye(CLASSES)[digits]
    test = np.zeros(len(images), bool)
    test[np.random.default_rng([seed, 2]).permutation(len(images))[:TEST_IMAGES]] = True
    if replicas > np.count_nonzero(~test):
        raise UsageError(
            f"--replicas: each needs an image of its own, and there are {np.count_nonzero(~test)} "
            f"training images; got {replicas}"
        )
    return Digits(images[~test], labels[~test], images[test], digits[test], replicas, seed)


def initial(seed: int) -> Tree:
    """The first weights in float64, scaled to the number of inputs."""
    draw = np.random.default_rng([seed, 0]).standard_normal
    return {
        "hidden": draw((PIXELS, HIDDEN)) / np.sqrt(PIXELS),
        "hidden_bias": np.zeros(HIDDEN),
        "out": draw((HIDDEN, CLASSES)) / np.sqrt(HIDDEN),
        "out_bias": np.zeros(CLASSES),
    }


def forward(weights: Tree, images: Any) -> tuple[Any, Any]:
    """Hidden activations (n, 64) and unnormalised scores (n, 10) of images (n, 64)."""
    hidden = np.tanh(images @ weights["hidden"] + weights["hidden_bias"])
    return hidden, hidden @ weights["out"] + weights["out_bias"]


def loss_and_gradients(weights: Tree, images: Any, labels: Any) -> tuple[Any, Tree]:
    """Mean cross-entropy over the images, and its gradient by each weight."""
    hidden, scores = forward(weights, images)
    scores = scores - scores.max(axis=-1, keepdims=True)
    log_likelihood = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    loss = -(labels * log_likelihood).sum(axis=-1).mean()

    from_scores = (np.exp(log_likelihood) - labels) / images.shape[0]
    from_hidden = from_scores @ weights["out"].T * (1 - hidden * hidden)
    return loss, {
        "hidden": images.T @ from_hidden,
        "hidden_bias": from_hidden.sum(axis=0),
        "out": hidden.T @ from_scores,
        "out_bias": from_scores.sum(axis=0),
    }


def accuracy(weights: Tree, images: NDArray[Any], digits: NDArray[Any]) -> float:
    """The share of images whose highest score is that of their digit."""
    _, scores = forward(weights, images)
    return float(np.mean(scores.argmax(axis=-1) == digits))


# ---------------------------------------------------------------- training

Send = Callable[[Tree, int], tuple[Tree, dict[str, float]]]
Update = Callable[[Tree, Tree, int], Tree]


@dataclass(frozen=True)
class Step:
    """One step of a training: the results of each replica, and the weights after it."""

    losses: NDArray[Any]  # of each replica
    gradients: Tree  # of each replica, stacked
    mean: Tree  # of the gradients, as all replicas receive it
    weights: Tree  # after the update


def train(
    digits: Digits, weights: Tree, epochs: int, dtype: np.dtype[Any], send: Send, update: Update
) -> Iterator[Step]:
    """Train data-parallel; yield each step. The `gpusim.reduction` around sums the gradients.

    **Arguments**:

    - `weights`: the first weights.
    - `dtype`: the type in which the network computes, and in which `update` gets the mean.
    - `send`: takes the stacked gradients and the number of the step, from 1. Returns them as they
      are summed, and by name the factor by which it multiplied them.
    - `update`: takes weights, mean gradient and number of the step. Returns new weights.
    """
    gradients_of = gpusim.vmap(loss_and_gradients, in_axes=(None, 0, 0))
    total = gpusim.vmap(lambda g: lax.psum(g, "i"), out_axes=None, axis_name="i")
    for number, (images, labels) in enumerate(digits.deal(epochs), 1):
        computed = {name: weight.astype(dtype) for name, weight in weights.items()}
        losses, gradients = gradients_of(computed, images.astype(dtype), labels.astype(dtype))
        sent, factors = send(gradients, number)
        mean = {
            name: summed.astype(dtype) / dtype.type(len(images) * factors[name])
            for name, summed in total(sent).items()
        }
        weights = update(weights, mean, number)
        yield Step(losses, gradients, mean, weights)


def momentum(rate: float, decay: float) -> Update:
    """Gradient descent with momentum, from a velocity of zero."""
    velocity: Tree = {}

    def update(weights: Tree, mean: Tree, number: int) -> Tree:
        for name, gradient in mean.items():
            before = velocity.get(name, np.zeros_like(gradient))
            velocity[name] = decay * before + gradient
        return {name: weight - rate * velocity[name] for name, weight in weights.items()}

    return update
