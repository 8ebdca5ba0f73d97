"""The figures of a training study, by run and epoch.

Tables and pictures are made of them; `training.Training` adds the methods that call for these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.formats import Format
from gpusim.tools.study.intervals import mean_interval
from gpusim.tools.study.settings import ValueFormat, format_name
from gpusim.words import count

__all__ = ["COLUMNS", "FIGURES", "Recipe", "StorageFormat", "Trained", "TrainingRun"]

FIGURES: dict[str, tuple[float, float]] = {
    "test accuracy": (0.0, 1.0),
    "final loss": (0.0, float("inf")),
    "progress": (-float("inf"), float("inf")),
    "unchanged": (0.0, 1.0),
}
"""The figures of a table, and the bounds of each."""
COLUMNS = ("format", *FIGURES)
CONFIDENCE = 0.95


@dataclass(frozen=True)
class StorageFormat:
    """A format, and how values are rounded to it."""

    dtype: ValueFormat
    rounding: str

    @property
    def name(self) -> str:
        return format_name(self.dtype) + (", stochastic" if self.rounding == "stochastic" else "")

    @property
    def text(self) -> str:
        """As options have it."""
        return f"{format_name(self.dtype)}:{self.rounding}".removesuffix(":nearest")

    @property
    def accumulate(self) -> Format | None:
        """The format of sums of gradients; None is the default of Reduction."""
        return self.dtype if isinstance(self.dtype, Format) else None


@dataclass(frozen=True)
class Recipe:
    """One line of the picture: what is kept in which format.

    **Attributes**:

    - `format`: of the weights, the gradients, or both.
    - `states`: by the name of an optimizer's state, its format.
    - `master`: the format of a second copy of the weights, which is updated; None without one.
    """

    format: StorageFormat
    states: tuple[tuple[str, StorageFormat], ...] = ()
    master: StorageFormat | None = None

    @property
    def name(self) -> str:
        """The name in tables; formats of float32 alone have one name."""
        kept = list(dict.fromkeys(state for _, state in self.states))
        if not kept or all(state.text == "float32" for state in kept):
            return self.format.name
        if len(kept) == 1:
            return f"{self.format.name}; states {kept[0].name}"
        named = "; ".join(f"{name} {state.name}" for name, state in self.states)
        return f"{self.format.name}; {named}"

    @property
    def is_stochastic(self) -> bool:
        """Whether something is rounded stochastically."""
        kept = [self.format, *(state for _, state in self.states)]
        return any(each.rounding == "stochastic" for each in kept)


@dataclass(frozen=True)
class TrainingRun:
    """One training, by epoch."""

    format: StorageFormat
    losses: NDArray[np.float64]  # on the training images, the mean over the epoch's steps
    accuracies: NDArray[np.float64]  # on the test images, after the epoch
    unchanged: NDArray[np.float64]  # share of the updates that left their weight as it was
    weights: list[NDArray[np.float32]]  # before the first step, then after each epoch
    recipe: Recipe
    seed: int
    clipped: NDArray[np.float64]  # share of the epoch's steps whose gradient was clipped


@dataclass(frozen=True)
class Trained:
    """All runs. `runs` and `ways` are those of the first seed, first that of float32."""

    about: dict[str, Any]
    by_seed: dict[int, list[TrainingRun]]
    ways_by_seed: dict[int, list[NDArray[np.float64]]] = field(init=False)
    """Of each run by epoch: the share of float32's displacement of the weights that it reaches."""

    def __post_init__(self) -> None:
        ways = {
            seed: [way(run, runs[0]) for run in runs] for seed, runs in self.by_seed.items() if runs
        }
        object.__setattr__(self, "ways_by_seed", ways)

    @property
    def runs(self) -> list[TrainingRun]:
        return next(iter(self.by_seed.values()))

    @property
    def ways(self) -> list[NDArray[np.float64]]:
        return next(iter(self.ways_by_seed.values()))

    @property
    def recipes(self) -> list[Recipe]:
        return [run.recipe for run in self.runs]

    @property
    def title(self) -> str:
        about = self.about
        parts = [
            f"{' and '.join(about['held'])} in the format",
            count(about["replicas"], "replica"),
            f"{about['optimizer']}, rate {about['rate']:g}",
        ]
        if about["master"]:
            parts.append(f"master weights in {about['master']}")
        if about["clip"] is not None:
            parts.append(f"clipped at {about['clip']:g}")
        if about["error_feedback"]:
            parts.append("error feedback")
        if len(self.by_seed) > 1:
            parts.append(f"{count(len(self.by_seed), 'seed')}")
        return ", ".join(parts)

    def of(self, figure: str, place: int) -> list[NDArray[np.float64]]:
        """A figure by epoch of the recipe at `place`: one array for each seed that has a run."""
        choose: dict[str, Callable[[int], NDArray[np.float64]]] = {
            "test accuracy": lambda seed: self.by_seed[seed][place].accuracies,
            "final loss": lambda seed: self.by_seed[seed][place].losses,
            "progress": lambda seed: self.ways_by_seed[seed][place],
            "unchanged": lambda seed: self.by_seed[seed][place].unchanged,
        }
        return [choose[figure](seed) for seed, runs in self.by_seed.items() if place < len(runs)]

    def summary(self, figure: str, place: int, epoch: int = -1) -> tuple[float, float, float]:
        """The mean over the seeds, and the ends of its confidence interval: NaN for one seed."""
        values = [float(curve[epoch]) for curve in self.of(figure, place)]
        low, high = mean_interval(values, CONFIDENCE, FIGURES[figure])
        return float(np.mean(values)), low, high

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for each recipe, after the last epoch; of several seeds means and intervals."""
        rows = []
        for place, recipe in enumerate(self.recipes):
            row: dict[str, Any] = {"format": recipe.name}
            for figure in FIGURES:
                mean, low, high = self.summary(figure, place)
                row[figure] = mean
                if len(self.by_seed) > 1:
                    row |= {f"{figure} low": low, f"{figure} high": high}
            if len(self.by_seed) > 1:
                row["seeds"] = len(self.of("progress", place))
            rows.append(row)
        return rows


def way(run: TrainingRun, reference: TrainingRun) -> NDArray[np.float64]:
    """After each epoch, the share of the reference's displacement that the run reaches."""
    shares = []
    for here, there in zip(run.weights[1:], reference.weights[1:], strict=True):
        moved = here.astype(np.float64) - run.weights[0]
        wanted = there.astype(np.float64) - reference.weights[0]
        shares.append(float(np.sum(moved * wanted) / np.sum(wanted * wanted)))
    return np.array(shares)
