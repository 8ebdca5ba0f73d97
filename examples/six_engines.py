"""The same training, its gradients summed as six engines would: what differs, and how soon.

Handwritten digits, data-parallel; weights are float32, gradients float32 or narrower. All six runs
begin with the same weights and see the same images; only the fold of the all-reduce differs.

    python examples/six_engines.py --replicas 6 --epochs 10
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import gpusim
from gpusim import Reduction, lax
from gpusim.tools import digits

ENGINES = ("xla-cpu", "openmpi-linear", "openmpi-ring", "mpich", "gloo-ring", "nccl-tree")
RATE, LOSS_SCALE = 0.2, 128.0
Tree = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training: the first step's summed gradient, and the weights after each step."""

    engine: str
    first_sum: np.ndarray
    weights: list[np.ndarray]
    loss: float
    accuracy: float


def replica_step(dtype: Any, weights: Tree, images: Any, labels: Any) -> tuple[Tree, Any, Any]:
    """One step of gradient descent. All gradients are one array, as frameworks' buckets are."""
    loss, gradients = digits.loss_and_gradients(weights, images, labels)
    flat = np.concatenate([g.reshape(-1) for g in gradients.values()])
    total = lax.psum((flat * np.float32(LOSS_SCALE)).astype(dtype), "i")
    mean = total.astype(np.float32) / np.float32(LOSS_SCALE * lax.axis_size("i"))
    updated, first = {}, 0
    for name, weight in weights.items():
        part = mean[first : first + weight.size].reshape(weight.shape)
        updated[name], first = weight - np.float32(RATE) * part, first + weight.size
    return updated, total, lax.pmean(loss, "i", reduction=Reduction())


def train(data: digits.Digits, engine: str, dtype: Any, epochs: int) -> Run:
    """Train from the seed's first weights, with the sums of one engine."""
    step = gpusim.vmap(
        partial(replica_step, dtype), in_axes=(None, 0, 0), out_axes=None, axis_name="i"
    )
    weights = {k: w.astype(np.float32) for k, w in digits.initial(data.seed).items()}
    sums: list[np.ndarray] = []
    by_step, losses = [], []
    for images, labels in data.deal(epochs):
        with gpusim.reduction(Reduction.like(engine)):
            weights, total, loss = step(
                weights, images.astype(np.float32), labels.astype(np.float32)
            )
        sums = sums or [np.asarray(total)]
        by_step.append(np.concatenate([np.asarray(w).reshape(-1) for w in weights.values()]))
        losses.append(float(loss))
    accuracy = digits.accuracy(weights, data.test_images, data.test_digits)
    return Run(engine, sums[0], by_step, float(np.mean(losses[-data.steps :])), accuracy)


def row(run: Run, reference: Run) -> str:
    """How a run differs from the first one."""
    bits = np.mean(run.first_sum != reference.first_sum)
    after = [
        float(np.max(np.abs(a - b))) for a, b in zip(run.weights, reference.weights, strict=True)
    ]
    apart = np.mean(run.weights[-1] != reference.weights[-1])
    return (
        f"{run.engine:16} {bits:>10.1%} {after[0]:>12.1e} {after[-1]:>12.1e} {apart:>10.1%}"
        f" {run.loss:>10.6f} {run.accuracy:>9.2%}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="float32")
    options = parser.parse_args(arguments)

    dtype = np.dtype(getattr(ml_dtypes, options.dtype, options.dtype))
    data = digits.load(options.replicas, seed=0)
    runs = [train(data, engine, dtype, options.epochs) for engine in ENGINES]
    first = runs[0]
    print(f"{options.replicas} replicas, {options.epochs} epochs of {data.steps} steps, {dtype}")
    print(f"beside {first.engine}:")
    print(
        f"{'engine':16} {'first sum':>10} {'1st weights':>12} {'last weights':>12} {'of them':>10}"
        f" {'loss':>10} {'accuracy':>9}"
    )
    for run in runs:
        print(row(run, first))

    for run in runs:  # every bit again, when it is run again; and no sum far from the others
        again = train(data, run.engine, dtype, 1)
        np.testing.assert_array_equal(again.first_sum, run.first_sum)
        np.testing.assert_array_equal(again.weights[-1], run.weights[data.steps - 1])
        assert abs(run.accuracy - first.accuracy) < 0.05, (run.engine, run.accuracy)
    print("agreed: each run with itself to the bit, all of them within five points of accuracy")


if __name__ == "__main__":
    main()
