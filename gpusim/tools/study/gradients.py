"""The default input: gradients of the digits network at a chosen epoch, one image each.

Replica r has the gradient of training image r.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import gpusim
from gpusim.fallback.formats import FLOAT64
from gpusim.optional import require
from gpusim.tools import digits
from gpusim.tools.digits import Tree
from gpusim.tools.study.arrays import GRADIENTS, Array

__all__ = ["gradients"]

# As in the demo: it lifts small gradients out of float16's subnormals.
SCALE = 2.0**7
RATE, MOMENTUM = 0.4, 0.9


def gradients(epoch: int, seed: int) -> Array:
    """One gradient for each of the 1,437 training images, shape (1437, 4810), in float64.

    The network is trained in float64 for `epoch` epochs first; 0 takes its first weights. Raises
    ValueError for a negative epoch, ModuleNotFoundError without scikit-learn.
    """
    if epoch < 0:
        raise ValueError(f"epoch={epoch!r}: expected an integer from 0")
    require("the digits need", "sklearn")
    data = digits.load(replicas=1, seed=seed)
    weights = digits.initial(seed)
    update = digits.momentum(RATE, MOMENTUM)
    for step in digits.train(data, weights, epoch, FLOAT64, _unscaled, update):
        weights = step.weights

    def of_one(image: Any, label: Any) -> NDArray[Any]:
        _, gradient = digits.loss_and_gradients(weights, image[np.newaxis], label[np.newaxis])
        return np.concatenate([g.reshape(-1) for g in gradient.values()])

    values = gpusim.vmap(of_one)(data.images, data.labels)
    name = f"gradients of the digits network after epoch {epoch}"
    about = {"kind": GRADIENTS, "epoch": epoch, "seed": seed}
    return Array(np.asarray(values), name, SCALE, about)


def _unscaled(gradients: Tree, step: int) -> tuple[Tree, dict[str, float]]:
    return gradients, dict.fromkeys(gradients, 1.0)
