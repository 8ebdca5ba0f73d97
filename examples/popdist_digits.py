"""Data-parallel training on handwritten digits, written for PopDist: the same file for any number
of instances, which end with the same weights, to the bit.

    poprun --num-instances 1 --num-replicas 8 python examples/popdist_digits.py
    poprun --num-instances 4 --num-replicas 8 python examples/popdist_digits.py

Each instance holds the images of its own replicas. Inside the World's block the axis "i" spans the
replicas of all instances, so psum adds up the gradients of all of them.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import gpusim
from gpusim import lax, popdist

BATCH, RATE, CLASSES = 240, 0.5, 10  # images a step, over all replicas


def gradient_of(weights: Any, images: Any, labels: Any) -> Any:
    """Of the cross-entropy of softmax(images @ weights), summed over the images."""
    scores = images @ weights
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return images.T @ (powers / powers.sum(axis=-1, keepdims=True) - labels)


def step(weights: Any, images: Any, labels: Any) -> Any:
    """One step of gradient descent; images (share, 65) and labels (share, 10) are a replica's."""
    return weights - RATE / BATCH * lax.psum(gradient_of(weights, images, labels), "i")


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 65), the last column being ones, and one-hot labels (1797, 10)."""
    pixels, digits = load_digits(return_X_y=True)
    return np.hstack([pixels / 16.0, np.ones((len(pixels), 1))]), np.eye(CLASSES)[digits]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)

    popdist.init()
    replicas = popdist.getNumTotalReplicas()
    first, held = popdist.getReplicaIndexOffset(), popdist.getNumLocalReplicas()
    share = BATCH // replicas
    images, labels = load()
    weights = np.zeros((images.shape[1], CLASSES))
    alone = weights
    order = np.random.default_rng(0)

    with gpusim.World.from_environment():
        train = gpusim.vmap(step, in_axes=(None, 0, 0), out_axes=None, axis_name="i")
        for _ in range(options.steps):
            dealt = order.permutation(len(images))[: replicas * share].reshape(replicas, share)
            mine = dealt[first : first + held]  # (held, share), the images of these replicas
            weights = train(weights, images[mine], labels[mine])
            # and what one device would compute, which has all the images
            everything = dealt.reshape(-1)
            alone = alone - RATE / BATCH * gradient_of(
                alone, images[everything], labels[everything]
            )

    np.testing.assert_allclose(weights, alone, rtol=1e-9, atol=1e-12)
    right = np.mean((images @ weights).argmax(axis=1) == labels.argmax(axis=1))

    def report() -> None:
        print(f"{replicas} replicas, {options.steps} steps: {right:.1%} of the digits are right")
        print("weights' SHA-256:", hashlib.sha256(weights.tobytes()).hexdigest())
        print("agreed: all replicas with one device, to 1e-9")

    popdist.execute_on_instances({0}, report)
    popdist.synchronize()


if __name__ == "__main__":
    main()
