"""The training study: the digits network with weights, gradients or both in a narrow format.

Updates smaller than half a weight's last bit vanish when rounded to nearest, and survive on
average when rounded stochastically.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gpusim
from gpusim.fallback import round_to
from gpusim.fallback.formats import FLOAT32
from gpusim.files import atomic_write
from gpusim.formats import kernel_format
from gpusim.optional import require
from gpusim.tools import digits
from gpusim.tools.digits import Tree
from gpusim.tools.progress import Advance, progress, silent
from gpusim.tools.study import picture, report, table
from gpusim.tools.study.runs import COLUMNS, StorageFormat, Trained, TrainingRun
from gpusim.tools.study.settings import (
    ValueFormat,
    carrier,
    format_name,
    items,
    narrow_info,
    value_format,
)

__all__ = ["FORMATS", "StorageFormat", "Training", "TrainingRun", "parse", "train"]

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


def parse(text: str) -> StorageFormat:
    """The format named, such as "float16:stochastic" or "e5m6".

    **Raises**: ValueError for others.
    """
    dtype, _, rounding = text.partition(":")
    rounding = rounding or "nearest"
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"format={text!r}: expected nearest or stochastic after the colon")
    target = value_format(dtype, "format")
    narrow = narrow_info(target)
    if carrier(target) != FLOAT32 and not narrow:
        raise ValueError(f"format={text!r}: expected float32 or narrower")
    return StorageFormat(target, rounding if narrow else "nearest")


@dataclass(frozen=True)
class Training(Trained):
    """All runs, first that of float32, with methods to print, draw and write them."""

    def show(self) -> None:
        """Print the table."""
        table.show_training(self)

    def to_csv(self, path: str | PathLike[str]) -> Path:
        """Write the table. Returns the path."""
        with atomic_write(path) as file:
            rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            rows.writeheader()
            rows.writerows(self.table)
        return Path(path)

    def json_text(self) -> str:
        """Every epoch's figures as JSON."""
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
        return re.sub(r"\bNaN\b", "null", text) + "\n"

    def to_json(self, path: str | PathLike[str]) -> Path:
        """Write `json_text`. Returns the path."""
        with atomic_write(path) as file:
            file.write(self.json_text())
        return Path(path)

    def plot(self, path: str | PathLike[str]) -> Path:
        """Draw loss, accuracy and progress: .png, .svg or .pdf. Returns the path."""
        return picture.write_training(self, Path(path))

    def report(self, path: str | PathLike[str]) -> Path:
        """Write a page with the table and the picture inside it. Returns the path."""
        return report.write_training(self, Path(path))


def train(
    formats: Iterable[str] | str = FORMATS,
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

    **Arguments**:

    - `formats`: such as "float16", "bfloat16:stochastic" or "e5m6", in a list or between commas.
      Gradients in a format without a dtype, such as e5m6, have partial sums in it too.
    - `weights`: whether weights are kept in the format between steps.
    - `gradients`: whether gradients are rounded to it and summed in it by `lax.psum`. They are
      multiplied by a power of two before, which makes use of the format's whole range.
    - `replicas`: the number of replicas that share each batch.
    - `epochs`: passes over the training images.
    - `rate`: the learning rate of plain gradient descent.
    - `seed`: seeds the first weights, the order of the images, and stochastic rounding.
    - `show`: show progress on standard error.

    **Raises**:

    - ValueError: an invalid argument.
    - ModuleNotFoundError: scikit-learn, which brings the digits, is missing.
    """
    chosen = list(dict.fromkeys([parse("float32"), *map(parse, items(formats))]))
    held = [name for name, is_held in (("weights", weights), ("gradients", gradients)) if is_held]
    if len(chosen) < 2:
        raise ValueError("formats is empty: expected at least one beside float32")
    if not held:
        raise ValueError("neither weights nor gradients are to be in the format")
    if epochs < 1 or not rate > 0:
        raise ValueError(f"epochs={epochs!r}, rate={rate!r}: expected positive numbers")
    if replicas < 1 or not 0 <= seed < 2**64:
        raise ValueError(f"replicas={replicas!r}, seed={seed!r}: expected at least 1, and a word")
    require("the digits need", "sklearn")
    data = digits.load(replicas, seed)
    total = len(chosen) * epochs
    bar: AbstractContextManager[Advance] = progress(total) if show else nullcontext(silent)
    with bar as advance:
        runs = [_run(data, f, weights, gradients, epochs, rate, seed, advance) for f in chosen]
    about = {
        "held": held,
        "replicas": replicas,
        "epochs": epochs,
        "rate": rate,
        "seed": seed,
        "command": _command(chosen[1:], held, replicas, epochs, rate, seed),
    }
    return Training(about, runs)


def _command(
    formats: list[StorageFormat],
    held: list[str],
    replicas: int,
    epochs: int,
    rate: float,
    seed: int,
) -> str:
    """The command line that repeats a training."""
    texts = [f"{format_name(f.dtype)}:{f.rounding}".removesuffix(":nearest") for f in formats]
    words = ["gpusim", "study", "train", "--formats", ",".join(texts)]
    words += [f"--{name}" for name in held] if len(held) == 1 else []
    words += ["--replicas", str(replicas), "--epochs", str(epochs)]
    return shlex.join([*words, "--rate", repr(rate), "--seed", str(seed)])


def _run(
    data: digits.Digits,
    chosen: StorageFormat,
    weights_held: bool,
    gradients_held: bool,
    epochs: int,
    rate: float,
    seed: int,
    advance: Advance,
) -> TrainingRun:
    held = chosen if weights_held else parse("float32")

    def rounded(weights: Tree, step: int) -> Tree:
        return _rounded(weights, held, seed, step, place=1)  # the sums have place 0

    def send(gradients: Tree, step: int) -> tuple[Tree, dict[str, float]]:
        if not gradients_held:
            return gradients, dict.fromkeys(gradients, 1.0)
        factors = {name: _scale(g, chosen.dtype) for name, g in gradients.items()}
        scaled = {name: g * FLOAT32.type(factors[name]) for name, g in gradients.items()}
        return _rounded(scaled, chosen, seed, step, place=1 + len(gradients)), factors

    def update(weights: Tree, mean: Tree, step: int) -> Tree:
        moved = {k: w.astype(FLOAT32) - FLOAT32.type(rate) * mean[k] for k, w in weights.items()}
        return rounded(moved, step)

    weights = rounded(digits.initial(data.seed), 0)
    losses, accuracies, unchanged = [], [], []
    trail = [_flat(weights)]
    accumulate = chosen.accumulate if gradients_held else None
    with gpusim.reduction(accumulate=accumulate, rounding=chosen.rounding, seed=seed):
        steps = digits.train(data, weights, epochs, FLOAT32, send, update)
        for number, step in enumerate(steps, 1):
            losses.append(float(np.mean(step.losses, dtype=np.float64)))
            unchanged.append(_unchanged(weights, step.weights, step.mean))
            weights = step.weights
            if number % data.steps == 0:
                trail.append(_flat(weights))
                computed = {name: weight.astype(FLOAT32) for name, weight in weights.items()}
                test = data.test_images, data.test_digits
                accuracies.append(digits.accuracy(computed, *test))
                advance(chosen.name, 1)
    by_epoch = (epochs, data.steps)
    return TrainingRun(
        chosen,
        np.reshape(losses, by_epoch).mean(axis=1),
        np.array(accuracies),
        np.reshape(unchanged, by_epoch).mean(axis=1),
        trail,
    )


def _rounded(arrays: Tree, target: StorageFormat, seed: int, step: int, place: int) -> Tree:
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


def _scale(stacked: NDArray[Any], target: ValueFormat) -> float:
    """The power of two that brings the largest possible sum to the middle of the format's top."""
    narrow = narrow_info(target)
    largest = float(np.abs(stacked).max()) * len(stacked)
    if narrow is None or not 0 < largest < np.inf:
        return 1.0
    room = narrow.largest / 2 / largest
    return float(np.exp2(np.clip(np.floor(np.log2(room)), -60, 60)))


def _unchanged(before: Tree, after: Tree, mean: Tree) -> float:
    """The share of nonzero updates that left their weight unchanged."""
    wanted = sum(int(np.count_nonzero(g)) for g in mean.values())
    lost = sum(int(np.count_nonzero((before[k] == after[k]) & (mean[k] != 0))) for k in mean)
    return lost / wanted if wanted else 0.0


def _flat(weights: Tree) -> NDArray[np.float32]:
    return np.concatenate([weight.astype(FLOAT32).reshape(-1) for weight in weights.values()])
