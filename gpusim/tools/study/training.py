"""The training study: the digits network with weights, gradients or both in a narrow format.
Updates smaller than half a weight's last bit vanish when rounded to nearest, and survive on
average when rounded stochastically."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gpusim
from fallback import round_to
from fallback.formats import FLOAT32, SUB_32_BIT
from gpusim import lax
from gpusim.tools.demo import data, model
from gpusim.tools.study.needs import need
from gpusim.tools.study.output import replacing
from gpusim.tools.study.progress import Advance, progress, silent
from gpusim.tools.study.settings import floating

__all__ = ["FORMATS", "Format", "Run", "Training", "parse", "train"]

Tree = dict[str, Any]
FORMATS = (
    "float32",
    "float16",
    "float16:stochastic",
    "bfloat16",
    "bfloat16:stochastic",
    "float8_e4m3fn",
    "float8_e4m3fn:stochastic",
)
RATE = 0.005
"""Of plain gradient descent: so small that many updates are less than half of a weight's ulp in
float16, as they are in the training of large networks."""
COLUMNS = ("format", "test accuracy", "final loss", "progress", "unchanged")


@dataclass(frozen=True)
class Format:
    """One line of the picture: a format and how values are rounded to it."""

    dtype: np.dtype[Any]
    rounding: str

    @property
    def name(self) -> str:
        return self.dtype.name + (", stochastic" if self.rounding == "stochastic" else "")


def parse(text: str) -> Format:
    """The format that "float16" or "float16:stochastic" names; ValueError for anything else."""
    dtype, _, rounding = text.partition(":")
    rounding = rounding or "nearest"
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"format={text!r}: expected nearest or stochastic after the colon")
    target = floating(dtype, "format")
    if target != FLOAT32 and target not in SUB_32_BIT:
        raise ValueError(f"format={text!r}: expected float32 or narrower")
    return Format(target, rounding if target in SUB_32_BIT else "nearest")


@dataclass(frozen=True)
class Run:
    """One training, by epoch."""

    format: Format
    losses: NDArray[np.float64]  # on the training images, the mean over the epoch's steps
    accuracies: NDArray[np.float64]  # on the test images, after the epoch
    unchanged: NDArray[np.float64]  # share of the updates that left their weight as it was
    weights: list[NDArray[np.float32]]  # before the first step, then after each epoch


@dataclass(frozen=True)
class Training:
    """All runs, the first of which is float32's, with ways to print, draw and write them."""

    about: dict[str, Any]
    runs: list[Run]
    ways: list[NDArray[np.float64]] = field(init=False)
    """By epoch: how far the weights have come on float32's way, as a share of it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ways", [way(run, self.runs[0]) for run in self.runs])

    @property
    def title(self) -> str:
        about = self.about
        return (
            f"{' and '.join(about['held'])} in the format, {about['replicas']} replicas, "
            f"rate {about['rate']:g}"
        )

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for each run, after the last epoch."""
        return [
            dict(
                zip(
                    COLUMNS,
                    (
                        run.format.name,
                        float(run.accuracies[-1]),
                        float(run.losses[-1]),
                        float(way[-1]),
                        float(run.unchanged[-1]),
                    ),
                    strict=True,
                )
            )
            for run, way in zip(self.runs, self.ways, strict=True)
        ]

    def show(self) -> None:
        """Print the table."""
        from gpusim.tools.study.table import show_training

        show_training(self)

    def to_csv(self, path: str | PathLike[str]) -> Path:
        """Write the table. Returns the path."""
        with replacing(Path(path)) as file:
            rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            rows.writeheader()
            rows.writerows(self.table)
        return Path(path)

    def to_json(self, path: str | PathLike[str]) -> Path:
        """Write every epoch's figures. Returns the path."""
        runs = [
            {
                "format": run.format.dtype.name,
                "rounding": run.format.rounding,
                "loss": run.losses.tolist(),
                "test accuracy": run.accuracies.tolist(),
                "progress": way.tolist(),
                "unchanged": run.unchanged.tolist(),
            }
            for run, way in zip(self.runs, self.ways, strict=True)
        ]
        text = json.dumps({**self.about, "runs": runs}, indent=1)
        with replacing(Path(path)) as file:
            file.write(re.sub(r"\bNaN\b", "null", text) + "\n")
        return Path(path)

    def plot(self, path: str | PathLike[str]) -> Path:
        """Draw loss, accuracy and progress: .png, .svg or .pdf. Returns the path."""
        from gpusim.tools.study.picture import write_training

        return write_training(self, Path(path))

    def report(self, path: str | PathLike[str]) -> Path:
        """Write a page with the table and the picture inside it. Returns the path."""
        from gpusim.tools.study.report import write_training

        return write_training(self, Path(path))


def train(
    formats: Iterable[str] = FORMATS,
    *,
    weights: bool = True,
    gradients: bool = True,
    replicas: int = 8,
    epochs: int = 60,
    rate: float = RATE,
    seed: int = 0,
    show: bool = False,
) -> Training:
    """Train the digits network data-parallel, once for each format, and once in float32.

    Args:
        formats: such as "float16" or "bfloat16:stochastic".
        weights: whether weights are kept in the format between steps.
        gradients: whether gradients are rounded to it and summed in it by `lax.psum`. They are
            multiplied by a power of two before, which makes use of the format's whole range.
        replicas: among which each batch is shared.
        epochs: passes over the training images.
        rate: the learning rate of plain gradient descent.
        seed: seeds the first weights, the order of the images, and stochastic rounding.
        show: show progress on standard error.

    Raises:
        ValueError: an argument that makes no sense.
        ModuleNotFoundError: scikit-learn, which brings the digits, is missing.
    """
    chosen = list(dict.fromkeys([parse("float32"), *map(parse, formats)]))
    held = [name for name, is_held in (("weights", weights), ("gradients", gradients)) if is_held]
    if len(chosen) < 2:
        raise ValueError("formats is empty: expected at least one beside float32")
    if not held:
        raise ValueError("neither weights nor gradients are to be in the format")
    if epochs < 1 or not rate > 0:
        raise ValueError(f"epochs={epochs!r}, rate={rate!r}: expected positive numbers")
    if replicas < 1 or not 0 <= seed < 2**64:
        raise ValueError(f"replicas={replicas!r}, seed={seed!r}: expected at least 1, and a word")
    need("sklearn", "the digits")
    digits = data.load(replicas, seed)
    total = len(chosen) * epochs
    bar: AbstractContextManager[Advance] = progress(total) if show else nullcontext(silent)
    with bar as advance:
        runs = [_run(digits, f, weights, gradients, epochs, rate, seed, advance) for f in chosen]
    about = {"held": held, "replicas": replicas, "epochs": epochs, "rate": rate, "seed": seed}
    return Training(about, runs)


def _run(
    digits: data.Digits,
    chosen: Format,
    weights_held: bool,
    gradients_held: bool,
    epochs: int,
    rate: float,
    seed: int,
    advance: Advance,
) -> Run:
    held = Held(chosen if weights_held else parse("float32"), seed)
    weights = held.rounded(model.initial(digits.seed), call=0)
    losses, accuracies, unchanged = [], [], []
    trail = [_flat(weights)]
    with gpusim.reduction(rounding=chosen.rounding, seed=seed):
        for step, (images, labels) in enumerate(digits.deal(epochs), 1):
            loss, mean = _mean_gradient(
                weights, images, labels, chosen if gradients_held else None, seed, step
            )
            moved = {
                k: w.astype(FLOAT32) - FLOAT32.type(rate) * mean[k] for k, w in weights.items()
            }
            before, weights = weights, held.rounded(moved, call=step)
            losses.append(loss)
            unchanged.append(_unchanged(before, weights, mean))
            if step % digits.steps == 0:
                trail.append(_flat(weights))
                test = digits.test_images, digits.test_digits
                accuracies.append(model.accuracy(_as_float32(weights), *test))
                advance(chosen.name, 1)
    by_epoch = (epochs, digits.steps)
    return Run(
        chosen,
        np.reshape(losses, by_epoch).mean(axis=1),
        np.array(accuracies),
        np.reshape(unchanged, by_epoch).mean(axis=1),
        trail,
    )


@dataclass(frozen=True)
class Held:
    """Weights as they are kept between steps: rounded to a format."""

    format: Format
    seed: int

    def rounded(self, weights: Tree, call: int) -> Tree:
        """Every array rounded once; `call` numbers the steps, so that each draws its own bits."""
        return {
            name: round_to(
                weight,
                self.format.dtype,
                rounding=self.format.rounding,
                seed=self.seed,
                call=call,
                place=1 + index,  # the sums have place 0
            )
            for index, (name, weight) in enumerate(weights.items())
        }


def _mean_gradient(
    weights: Tree,
    images: NDArray[Any],
    labels: NDArray[Any],
    sent: Format | None,
    seed: int,
    step: int,
) -> tuple[float, Tree]:
    """The replicas' mean loss, and their mean gradient in float32, as it arrives on all of them."""
    shares = images.astype(FLOAT32), labels.astype(FLOAT32)
    of_one = gpusim.vmap(model.loss_and_gradients, in_axes=(None, 0, 0))
    losses, stacked = of_one(_as_float32(weights), *shares)
    total = gpusim.vmap(lambda g: lax.psum(g, "i"), out_axes=None, axis_name="i")
    replicas = len(images)
    scales = dict.fromkeys(stacked, 1.0)
    if sent is not None:
        scales = {name: _scale(g, sent.dtype) for name, g in stacked.items()}
        stacked = {
            name: round_to(
                g * FLOAT32.type(scales[name]),
                sent.dtype,
                rounding=sent.rounding,
                seed=seed,
                call=step,
                place=1 + len(weights) + index,
            )
            for index, (name, g) in enumerate(stacked.items())
        }
    mean = {
        name: g.astype(FLOAT32) / FLOAT32.type(replicas * scales[name])
        for name, g in total(stacked).items()
    }
    return float(np.mean(losses, dtype=np.float64)), mean


def _scale(stacked: NDArray[Any], dtype: np.dtype[Any]) -> float:
    """The power of two that brings the largest possible sum to the middle of the format's top."""
    largest = float(np.abs(stacked).max()) * len(stacked)
    if dtype not in SUB_32_BIT or not 0 < largest < np.inf:
        return 1.0
    room = SUB_32_BIT[dtype].largest / 2 / largest
    return float(np.exp2(np.clip(np.floor(np.log2(room)), -60, 60)))


def _unchanged(before: Tree, after: Tree, mean: Tree) -> float:
    """The share of updates other than zero that changed nothing."""
    wanted = sum(int(np.count_nonzero(g)) for g in mean.values())
    lost = sum(int(np.count_nonzero((before[k] == after[k]) & (mean[k] != 0))) for k in mean)
    return lost / wanted if wanted else 0.0


def _as_float32(weights: Tree) -> Tree:
    return {name: weight.astype(FLOAT32) for name, weight in weights.items()}


def _flat(weights: Tree) -> NDArray[np.float32]:
    return np.concatenate([weight.astype(FLOAT32).reshape(-1) for weight in weights.values()])


def way(run: Run, reference: Run) -> NDArray[np.float64]:
    """After each epoch, the part of the reference's displacement that the run has made too."""
    shares = []
    for here, there in zip(run.weights[1:], reference.weights[1:], strict=True):
        moved = here.astype(np.float64) - run.weights[0]
        wanted = there.astype(np.float64) - reference.weights[0]
        shares.append(float(np.sum(moved * wanted) / np.sum(wanted * wanted)))
    return np.array(shares)
