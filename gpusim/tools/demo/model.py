"""A small network, one hidden layer of tanh and a softmax, with its gradient written out.

Nothing here knows of replicas: the same functions run on plain arrays and inside `gpusim.vmap`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.tools.demo.data import CLASSES, PIXELS

__all__ = ["Tree", "accuracy", "initial", "loss_and_gradients"]

Tree = dict[str, Any]  # arrays by name: weights, velocities, gradients
HIDDEN = 64


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


def accuracy(weights: Tree, images: np.ndarray, digits: np.ndarray) -> float:
    """The share of images whose highest score is their digit's."""
    _, scores = forward(weights, images)
    return float(np.mean(scores.argmax(axis=-1) == digits))
