"""Handwritten digits, dealt to replicas: the set of 1,797 images that ships inside scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["CLASSES", "PIXELS", "Digits", "load"]

PIXELS, CLASSES = 64, 10
TEST_IMAGES = 360  # every fifth
BATCH = 256  # images per step over all replicas, as near as equal shares come


@dataclass(frozen=True)
class Digits:
    """Images (n, 64) in 0..1 and one-hot labels (n, 10), float64, and how replicas share them."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_digits: np.ndarray
    replicas: int
    seed: int

    @property
    def share(self) -> int:
        """Images that each replica gets in a step."""
        return max(1, BATCH // self.replicas)

    @property
    def steps(self) -> int:
        """Steps an epoch: each deals every replica `share` images of its own."""
        return len(self.images) // (self.replicas * self.share)

    def deal(self, epochs: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
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

    Raises:
        ValueError: there are fewer training images than replicas.
    """
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images, labels = pixels / 16.0, np.eye(CLASSES)[digits]
    test = np.zeros(len(images), bool)
    test[np.random.default_rng([seed, 2]).permutation(len(images))[:TEST_IMAGES]] = True
    if replicas > np.count_nonzero(~test):
        raise ValueError(
            f"--replicas: each needs an image of its own, and there are {np.count_nonzero(~test)} "
            f"training images; got {replicas}"
        )
    return Digits(images[~test], labels[~test], images[test], digits[test], replicas, seed)
