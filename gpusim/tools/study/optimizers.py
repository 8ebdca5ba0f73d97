"""Optimizers of the training study, whose states are kept in narrow formats between steps.

All arithmetic is float32's, each operation rounded once, so that a few lines of NumPy repeat a step
bit for bit. A state is rounded to its format as it is stored, and the step uses what is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim import collectives
from gpusim.fallback import round_to
from gpusim.fallback.formats import FLOAT32
from gpusim.formats import kernel_format
from gpusim.reduction import Reduction
from gpusim.tools.digits import Tree
from gpusim.tools.study.runs import StorageFormat

__all__ = ["BETAS", "DECAY", "EPSILON", "OPTIMIZERS", "RATES", "Clipping", "Optimizer", "rounded"]

OPTIMIZERS: dict[str, tuple[str, ...]] = {"sgd": (), "momentum": ("m",), "adam": ("m", "v")}
"""The optimizers, and their states: a first and a second moment of the gradient."""
RATES = {"sgd": 0.005, "momentum": 0.0005, "adam": 0.001}
"""So small that many updates are less than half of a weight's ulp in float16, as they are in the
training of large networks."""
DECAY = 0.9
BETAS = 0.9, 0.999
EPSILON = 1e-8


def rounded(
    arrays: Mapping[str, Any], target: StorageFormat, seed: int, step: int, place: int
) -> Tree:
    """Every array rounded once, each with random bits of its own in each step."""
    return {
        name: round_to(
            array,
            kernel_format(target.dtype),
            rounding=target.rounding,
            seed=seed,
            call=step,
            place=place + index,
        )
        for index, (name, array) in enumerate(arrays.items())
    }


@dataclass
class Optimizer:
    """An optimizer with its states, from states of zero.

    **Arguments**:

    - `kind`: "sgd"; "momentum", m = 0.9 m + g; or "adam", without weight decay.
    - `rate`: the learning rate.
    - `states`: the format of each state; float32 for those that it lacks.
    - `seed`: of stochastic rounding.
    - `place`: the first place of the random bits of states; each state takes as many as arrays.

    >>> own = Optimizer("momentum", 0.5, {}, seed=0, place=0)
    >>> own.step({"w": np.float32([1.0])}, {"w": np.float32([0.25])}, 1)
    {'w': array([0.875], dtype=float32)}
    >>> own.states["m"]
    {'w': array([0.25], dtype=float32)}
    """

    kind: str
    rate: float
    formats: Mapping[str, StorageFormat]
    seed: int
    place: int
    states: dict[str, Tree] = field(default_factory=dict)

    def step(self, weights: Tree, mean: Tree, number: int) -> Tree:
        """The weights after step `number`, from 1, in float32; states are stored rounded."""
        rate = FLOAT32.type(self.rate)
        weights = {name: weight.astype(FLOAT32) for name, weight in weights.items()}
        if self.kind == "sgd":
            return {name: w - rate * mean[name] for name, w in weights.items()}
        if self.kind == "momentum":
            m = self._store("m", lambda m, g: FLOAT32.type(DECAY) * m + g, mean, number)
            return {name: w - rate * m[name] for name, w in weights.items()}
        one, (first, second) = FLOAT32.type(1), (FLOAT32.type(beta) for beta in BETAS)
        m = self._store("m", lambda m, g: first * m + (one - first) * g, mean, number)
        v = self._store("v", lambda v, g: second * v + (one - second) * (g * g), mean, number)
        by_first, by_second = (FLOAT32.type(1 - beta**number) for beta in BETAS)
        epsilon = FLOAT32.type(EPSILON)
        return {
            name: w - rate * (m[name] / by_first) / (np.sqrt(v[name] / by_second) + epsilon)
            for name, w in weights.items()
        }

    def _store(
        self, state: str, change: Callable[[Any, Any], Any], mean: Tree, number: int
    ) -> Tree:
        """Change a state and keep it in its format; what is kept, as float32."""
        before = self.states.get(state, {name: np.zeros_like(g) for name, g in mean.items()})
        after = {name: change(before[name].astype(FLOAT32), g) for name, g in mean.items()}
        target = self.formats.get(state)
        if target is not None:
            place = self.place + len(mean) * OPTIMIZERS[self.kind].index(state)
            after = rounded(after, target, self.seed, number, place)
        self.states[state] = after
        return {name: kept.astype(FLOAT32) for name, kept in after.items()}


@dataclass(frozen=True)
class Clipping:
    """Gradients clipped by their global norm.

    The squares of all elements are float32, rounded once each. They are the members of one sum, in
    the order of the arrays' names in the network; `reduction` adds them. The norm is the sum's
    square root, and the factor `most / norm`, in float32 too.

    >>> clip = Clipping(1.0, Reduction(order="linear"))
    >>> clip({"a": np.float32([3.0]), "b": np.float32([4.0])})
    ({'a': array([0.6], dtype=float32), 'b': array([0.8], dtype=float32)}, True)
    """

    most: float
    reduction: Reduction

    def norm(self, mean: Tree) -> np.float32:
        """The global norm."""
        squares = np.concatenate([(g * g).reshape(-1) for g in mean.values()])
        total: NDArray[Any] = collectives.psum(squares, reduction=self.reduction).value
        return FLOAT32.type(np.sqrt(FLOAT32.type(total)))

    def __call__(self, mean: Tree) -> tuple[Tree, bool]:
        """The gradients, and whether they were clipped; a norm that is not finite clips nothing."""
        norm = self.norm(mean)
        if not math.isfinite(norm) or not norm > self.most:
            return mean, False
        factor = FLOAT32.type(self.most) / norm
        return {name: g * factor for name, g in mean.items()}, True
