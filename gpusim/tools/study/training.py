"""The training study: the digits network with weights, gradients or both in a narrow format.

Updates smaller than half a weight's last bit vanish when rounded to nearest, and survive on
average when rounded stochastically. `optimizers` has the steps, whose states may be narrow too.
"""

from __future__ import annotations

import csv
import json
import math
import shlex
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gpusim
from gpusim.fallback.formats import FLOAT32
from gpusim.files import atomic_write
from gpusim.formats import format_name, rounding_name
from gpusim.optional import require
from gpusim.reduction import ReductionLike, as_reduction
from gpusim.tools import digits
from gpusim.tools.digits import Tree
from gpusim.tools.progress import Advance, progress, silent
from gpusim.tools.study import training_output
from gpusim.tools.study.optimizers import OPTIMIZERS, RATES, Clipping, Optimizer, rounded
from gpusim.tools.study.runs import Recipe, StorageFormat, Trained, TrainingRun
from gpusim.tools.study.settings import ValueFormat, carrier, items, narrow_info, value_format

__all__ = [
    "FORMATS",
    "RATE",
    "Recipe",
    "StorageFormat",
    "Training",
    "TrainingInterrupted",
    "TrainingRun",
    "parse",
    "parse_states",
    "train",
]

FORMATS = (
    "float32",
    "float16",
    "float16:stochastic",
    "bfloat16",
    "bfloat16:stochastic",
    "float8_e4m3fn",
    "float8_e4m3fn:stochastic",
)
RATE = RATES["sgd"]
NORM = "tree"
"""The Reduction of the global norm, unless one is given."""


def parse(text: str, name: str = "formats") -> StorageFormat:
    """The format named, such as "float16:stochastic", "bf16:sr" or "e5m6".

    **Raises**: ValueError for others.

    >>> parse("bf16:sr").text
    'bfloat16:stochastic'
    """
    dtype, _, rounding = text.partition(":")
    rounding = rounding_name(rounding or "nearest")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"{name}={text!r}: expected nearest, stochastic or sr after the colon")
    target = value_format(format_name(dtype), name)
    narrow = narrow_info(target)
    if carrier(target) != FLOAT32 and not narrow:
        raise ValueError(f"{name}={text!r}: expected float32 or narrower")
    return StorageFormat(target, rounding if narrow else "nearest")


def parse_states(text: str, optimizer: str) -> tuple[tuple[str, StorageFormat], ...]:
    """The formats of an optimizer's states: one for all, or one for each, as "m=bf16+v=fp32".

    **Raises**: ValueError for a state that the optimizer lacks.

    >>> [(name, kept.text) for name, kept in parse_states("m=bf16:sr", "adam")]
    [('m', 'bfloat16:stochastic'), ('v', 'float32')]
    """
    names = OPTIMIZERS[optimizer]
    if "=" not in text:
        return tuple((name, parse(text, "state_formats")) for name in names)
    given: dict[str, StorageFormat] = {}
    for item in text.split("+"):
        name, _, kept = item.partition("=")
        if name.strip() not in names:
            raise ValueError(
                f"state_formats={text!r}: {optimizer} has the states {' and '.join(names)}; "
                f"expected one format, or such as {'+'.join(f'{each}=bf16' for each in names)}"
            )
        given[name.strip()] = parse(kept.strip(), "state_formats")
    return tuple((name, given.get(name, parse("float32"))) for name in names)


@dataclass(frozen=True)
class Training(Trained):
    """All runs, of each seed first that of float32, with methods to print, draw and write them."""

    def show(self) -> None:
        """Print the table."""
        training_output.show(self)

    def to_csv(self, path: str | PathLike[str]) -> Path:
        """Write the table. Returns the path."""
        with atomic_write(path) as file:
            rows = csv.DictWriter(file, list(self.table[0]), lineterminator="\n")
            rows.writeheader()
            rows.writerows(self.table)
        return Path(path)

    def json_text(self) -> str:
        """Every epoch's figures as JSON."""
        runs = []
        for seed, found in self.by_seed.items():
            for run, way in zip(found, self.ways_by_seed[seed], strict=True):
                recipe = run.recipe
                runs.append(
                    {
                        "format": run.format.dtype.name,
                        "rounding": run.format.rounding,
                        "states": {name: kept.text for name, kept in recipe.states},
                        "name": recipe.name,
                        "seed": seed,
                        "loss": run.losses.tolist(),
                        "test accuracy": run.accuracies.tolist(),
                        "progress": way.tolist(),
                        "unchanged": run.unchanged.tolist(),
                        "clipped": run.clipped.tolist(),
                    }
                )
        text = json.dumps(finite({**self.about, "table": self.table, "runs": runs}), indent=1)
        return text + "\n"

    def to_json(self, path: str | PathLike[str]) -> Path:
        """Write `json_text`. Returns the path."""
        with atomic_write(path) as file:
            file.write(self.json_text())
        return Path(path)

    def plot(self, path: str | PathLike[str]) -> Path:
        """Draw loss, accuracy and progress: .png, .svg or .pdf. Returns the path."""
        return training_output.write_picture(self, Path(path))

    def report(self, path: str | PathLike[str]) -> Path:
        """Write a page with the table and the picture inside it. Returns the path."""
        return training_output.write_page(self, Path(path))


def finite(given: Any) -> Any:
    """The value, with None for numbers that JSON does not have."""
    if isinstance(given, dict):
        return {name: finite(each) for name, each in given.items()}
    if isinstance(given, list):
        return [finite(each) for each in given]
    return None if isinstance(given, float) and not math.isfinite(given) else given


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during a study; `training` has the runs that were complete, or is None."""

    def __init__(self, training: Training | None, complete: int, total: int) -> None:
        super().__init__(f"{complete} of {total} trainings are complete")
        self.training, self.complete, self.total = training, complete, total


@dataclass(frozen=True)
class Plan:
    """All that the runs of a study have in common, and the texts that its command repeats."""

    formats: tuple[str, ...]
    states: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    weights: bool
    gradients: bool
    replicas: int
    epochs: int
    rate: float
    seeds: tuple[int, ...]
    optimizer: str
    clipping: Clipping | None
    error_feedback: bool

    @property
    def held(self) -> list[str]:
        """The names of all that is kept in the format."""
        kept = (("weights", self.weights), ("gradients", self.gradients))
        return [name for name, is_kept in kept if is_kept]

    @property
    def about(self) -> dict[str, Any]:
        """The arguments, for files."""
        master = self.recipes[-1].master
        clipping = self.clipping
        return {
            "held": self.held,
            "replicas": self.replicas,
            "epochs": self.epochs,
            "rate": self.rate,
            "seed": self.seeds[0],
            "seeds": len(self.seeds),
            "optimizer": self.optimizer,
            "master": None if master is None else master.text,
            "clip": None if clipping is None else clipping.most,
            "clip_norm": None if clipping is None else str(clipping.reduction),
            "error_feedback": self.error_feedback,
            "command": _command(self),
        }


def train(
    formats: Iterable[str] | str | None = None,
    *,
    weights: bool = True,
    gradients: bool = True,
    replicas: int = 8,
    epochs: int = 60,
    rate: float | None = None,
    seed: int = 0,
    seeds: int = 1,
    optimizer: str = "sgd",
    state_formats: Iterable[str] | str | None = None,
    master: str | None = None,
    clip: float | None = None,
    clip_norm: ReductionLike = NORM,
    error_feedback: bool = False,
    show: bool = False,
) -> Training:
    """Train the digits network data-parallel, once for each format, and once in float32.

    **Arguments**:

    - `formats`: such as "float16", "bf16:sr" or "e5m6", in a list or between commas. Gradients in a
      format without a dtype, such as e5m6, have partial sums in it too. None is `FORMATS`, or
      float32 alone with `state_formats`.
    - `weights`: whether weights are kept in the format between steps.
    - `gradients`: whether gradients are rounded to it and summed in it by `lax.psum`. They are
      multiplied by a power of two before, which makes use of the format's whole range.
    - `replicas`: the number of replicas that share each batch.
    - `epochs`: passes over the training images.
    - `rate`: the learning rate; None is the optimizer's of `optimizers.RATES`.
    - `seed`: seeds the first weights, the order of the images, and stochastic rounding.
    - `seeds`: how many trainings there are of each format, with the seeds `seed`, `seed + 1`, ...;
      from two on, tables and pictures have means and confidence intervals.
    - `optimizer`: "sgd", "momentum" or "adam".
    - `state_formats`: of the optimizer's states, in a list or between commas: "bf16:sr" for all of
      them, "m=bf16+v=fp32" for each. Each of them is trained with each of `formats`.
    - `master`: the format of master weights, which are updated; the network computes with a copy in
      the format. None keeps no second copy: weights are updated in the format.
    - `clip`: the largest global norm of the mean gradient; larger ones are scaled to it.
    - `clip_norm`: a Reduction, or its text: how the squares of all elements are added for the norm.
    - `error_feedback`: whether each replica keeps what rounding its gradient loses, and adds it to
      the next one.
    - `show`: show progress on standard error.

    **Raises**:

    - ValueError: an invalid argument.
    - ModuleNotFoundError: scikit-learn, which brings the digits, is missing.
    - TrainingInterrupted: a KeyboardInterrupt, with the runs that are complete.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")
    rate = RATES[optimizer] if rate is None else rate
    if formats is None:
        formats = FORMATS if state_formats is None else ("float32",)
    chosen = [parse(text) for text in items(formats)]
    states = [] if state_formats is None else items(state_formats)
    recipes = _recipes(chosen, states, optimizer, master)
    plan = Plan(
        tuple(dict.fromkeys(each.text for each in chosen)),
        tuple(states),
        recipes,
        weights,
        gradients,
        replicas,
        epochs,
        rate,
        tuple(range(seed, seed + seeds)),
        optimizer,
        None if clip is None else Clipping(clip, _norm(clip_norm)),
        error_feedback,
    )
    _check(plan, master, seed, seeds)
    require("the digits need", "sklearn")
    return _train(plan, show)


def _recipes(
    formats: Sequence[StorageFormat], states: Sequence[str], optimizer: str, master: str | None
) -> tuple[Recipe, ...]:
    """The runs of each seed; the first has float32 for everything."""
    plain = tuple((name, parse("float32")) for name in OPTIMIZERS[optimizer])
    if states and not plain:
        raise ValueError(
            f"state_formats needs an optimizer with states, momentum or adam; got {optimizer!r}"
        )
    kept = [parse_states(text, optimizer) for text in states] or [plain]
    copy = None if master is None else parse(master, "master")
    first = Recipe(parse("float32"), plain)
    found = dict.fromkeys(Recipe(each, form, copy) for each in formats for form in kept)
    others = [each for each in found if (each.format, each.states) != (first.format, first.states)]
    if not others:
        raise ValueError("formats is empty: expected at least one beside float32")
    return first, *others


def _norm(given: ReductionLike) -> gpusim.Reduction:
    """How squares are added. **Raises**: ValueError for what is not a plain sum."""
    found = as_reduction(given, "clip_norm")
    if found.op != "sum":
        raise ValueError(f"clip_norm={str(found)!r}: expected op='sum'")
    return found


def _check(plan: Plan, master: str | None, seed: int, seeds: int) -> None:
    """**Raises**: ValueError for arguments that are out of range or do not fit together."""
    if not plan.held:
        raise ValueError("neither weights nor gradients are to be in the format")
    if plan.epochs < 1 or not 0 < plan.rate < math.inf:
        raise ValueError(f"epochs={plan.epochs!r}, rate={plan.rate!r}: expected positive numbers")
    if plan.replicas < 1 or not 0 <= seed < 2**64:
        raise ValueError(
            f"replicas={plan.replicas!r}, seed={seed!r}: expected at least 1, and a word"
        )
    if seeds < 1 or seed + seeds > 2**64:
        raise ValueError(f"seeds={seeds!r}: expected at least 1, and seeds that are words")
    if master is not None and not plan.weights:
        raise ValueError(f"master={master!r}: expected weights in the format, as its copies are")
    if plan.error_feedback and not plan.gradients:
        raise ValueError("error_feedback: expected gradients in the format, which are what is sent")
    if plan.clipping is not None and not 0 < plan.clipping.most < math.inf:
        raise ValueError(f"clip={plan.clipping.most!r}: expected a finite number above 0")


def _train(plan: Plan, show: bool) -> Training:
    """All runs, seed by seed."""
    by_seed: dict[int, list[TrainingRun]] = {}
    complete, total = 0, len(plan.recipes) * len(plan.seeds)
    bar: AbstractContextManager[Advance] = (
        progress(total * plan.epochs) if show else nullcontext(silent)
    )
    try:
        with bar as advance:
            for seed in plan.seeds:
                data = digits.load(plan.replicas, seed)
                for recipe in plan.recipes:
                    run = _Run(plan, recipe, data, advance).train()
                    by_seed.setdefault(seed, []).append(run)
                    complete += 1
    except KeyboardInterrupt:
        found = Training({**plan.about, "complete": complete}, by_seed) if complete else None
        raise TrainingInterrupted(found, complete, total) from None
    return Training(plan.about, by_seed)


def _command(plan: Plan) -> str:
    """The command line that repeats a study."""
    words = ["gpusim", "study", "train", "--formats", ",".join(plan.formats)]
    words += [f"--{name}" for name in plan.held] if len(plan.held) == 1 else []
    words += ["--replicas", str(plan.replicas), "--epochs", str(plan.epochs)]
    words += ["--rate", repr(plan.rate), "--seed", str(plan.seeds[0])]
    words += ["--seeds", str(len(plan.seeds))] if len(plan.seeds) > 1 else []
    words += ["--optimizer", plan.optimizer] if plan.optimizer != "sgd" else []
    words += ["--state-formats", ",".join(plan.states)] if plan.states else []
    master = plan.recipes[-1].master
    words += [] if master is None else ["--master", master.text]
    if plan.clipping is not None:
        words += ["--clip", repr(plan.clipping.most), "--clip-norm", str(plan.clipping.reduction)]
    return shlex.join([*words, *["--error-feedback"] * plan.error_feedback])


class _Run:
    """One training: a recipe and a seed."""

    def __init__(self, plan: Plan, recipe: Recipe, data: digits.Digits, advance: Advance) -> None:
        self.plan, self.recipe, self.data, self.advance = plan, recipe, data, advance
        self.seed = data.seed
        plain = parse("float32")
        self.held = recipe.format if plan.weights else plain
        self.master = recipe.master or self.held
        self.weights = digits.initial(data.seed)
        arrays = len(self.weights)
        # Places of random bits: sums have place 0; then weights, gradients, states m and v, master
        # weights, an array each.
        self.optimizer = Optimizer(
            plan.optimizer, plan.rate, dict(recipe.states), self.seed, place=1 + 2 * arrays
        )
        self.of_master = 1 + 4 * arrays
        self.residuals: Tree = {}
        self.clipped = 0

    def train(self) -> TrainingRun:
        """Train for all epochs."""
        plan, data = self.plan, self.data
        self.copies = self._kept(self.weights, 0)
        weights = self._computed(self.copies, 0)
        losses, accuracies, unchanged, clipped = [], [], [], []
        trail = [_flat(self.copies)]
        accumulate = self.recipe.format.accumulate if plan.gradients else None
        rounding = self.recipe.format.rounding
        with gpusim.reduction(accumulate=accumulate, rounding=rounding, seed=self.seed):
            steps = digits.train(data, weights, plan.epochs, FLOAT32, self.send, self.update)
            before = self.copies
            for number, step in enumerate(steps, 1):
                losses.append(float(np.mean(step.losses, dtype=np.float64)))
                unchanged.append(_unchanged(before, self.copies, step.mean))
                before = self.copies
                if number % data.steps == 0:
                    trail.append(_flat(self.copies))
                    clipped.append(self.clipped / data.steps)
                    self.clipped = 0
                    computed = {name: kept.astype(FLOAT32) for name, kept in step.weights.items()}
                    test = data.test_images, data.test_digits
                    accuracies.append(digits.accuracy(computed, *test))
                    self.advance(self.recipe.name, 1)
        by_epoch = (plan.epochs, data.steps)
        return TrainingRun(
            self.recipe.format,
            np.reshape(losses, by_epoch).mean(axis=1),
            np.array(accuracies),
            np.reshape(unchanged, by_epoch).mean(axis=1),
            trail,
            self.recipe,
            self.seed,
            np.array(clipped),
        )

    def _kept(self, weights: Tree, step: int) -> Tree:
        """The weights that are updated, in the format that they are kept in."""
        place = 1 if self.recipe.master is None else self.of_master
        return rounded(weights, self.master, self.seed, step, place)

    def _computed(self, copies: Tree, step: int) -> Tree:
        """The weights that the network computes with: the same, or a copy of master weights."""
        if self.recipe.master is None:
            return copies
        return rounded(copies, self.held, self.seed, step, place=1)

    def send(self, gradients: Tree, step: int) -> tuple[Tree, dict[str, float]]:
        """The gradients as replicas send them, and the factors that they carry."""
        if not self.plan.gradients:
            return gradients, dict.fromkeys(gradients, 1.0)
        target = self.recipe.format
        if self.plan.error_feedback and self.residuals:
            gradients = {name: g + self.residuals[name] for name, g in gradients.items()}
        factors = {name: _scale(g, target.dtype) for name, g in gradients.items()}
        scaled = {name: g * FLOAT32.type(factors[name]) for name, g in gradients.items()}
        sent = rounded(scaled, target, self.seed, step, place=1 + len(gradients))
        if self.plan.error_feedback:
            self.residuals = {
                name: g - sent[name].astype(FLOAT32) / FLOAT32.type(factors[name])
                for name, g in gradients.items()
            }
        return sent, factors

    def update(self, weights: Tree, mean: Tree, step: int) -> Tree:
        """The weights that the network computes with in the next step."""
        if self.plan.clipping is not None:
            mean, is_clipped = self.plan.clipping(mean)
            self.clipped += is_clipped
        self.copies = self._kept(self.optimizer.step(self.copies, mean, step), step)
        return self._computed(self.copies, step)


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
