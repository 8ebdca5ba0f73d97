"""The figures of a sweep: a row for each setting and number of replicas, and its spread.

Tables and pictures are made of them; `results.Study` adds the methods that call for these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpusim.tools.study.intervals import mean_interval
from gpusim.tools.study.metrics import METRICS, Metrics, bounds
from gpusim.tools.study.settings import Setting
from gpusim.tools.study.traffic import Traffic

__all__ = ["Measured", "Measurement", "Row"]


CONFIDENCE = 0.95
"""The default confidence of intervals."""
NOTHING = Traffic(math.nan, math.nan)


@dataclass(frozen=True)
class Measurement:
    """One reduction: a setting, a number of replicas, a seed, and its figures."""

    setting: Setting
    replicas: int
    seed: int
    metrics: Metrics
    tensor: str | None = None
    """One of the input's arrays; None is all of the input."""
    traffic: Traffic = NOTHING
    input_seed: int = 0
    """Which of several inputs this is."""

    @property
    def bytes_sent(self) -> float:
        """By each replica, on average."""
        return self.traffic.bytes_sent


@dataclass(frozen=True)
class Row:
    """A setting at a number of replicas: each figure's mean over inputs and seeds, and its spread.

    The units are the inputs where there are several, with the means over their seeds, and else the
    seeds. The spread is the standard deviation between units (of the sample); `low` and `high` are
    Student's confidence interval of the mean. They are NaN with fewer than two units.
    """

    setting: Setting
    replicas: int
    seeds: tuple[int, ...]
    mean: Metrics
    spread: Metrics
    tensor: str | None = None
    traffic: Traffic = NOTHING
    inputs: tuple[int, ...] = (0,)
    low: Metrics | None = None
    high: Metrics | None = None

    @classmethod
    def of(cls, measurements: Sequence[Measurement], confidence: float = CONFIDENCE) -> Row:
        columns = {name: list(units(measurements, name).values()) for name in METRICS}
        ends = {name: mean_interval(v, confidence, bounds(name)) for name, v in columns.items()}
        one = measurements[0]
        return cls(
            one.setting,
            one.replicas,
            tuple(dict.fromkeys(m.seed for m in measurements)),
            Metrics(**{name: _mean(values) for name, values in columns.items()}),
            Metrics(**{name: _deviation(values) for name, values in columns.items()}),
            one.tensor,
            one.traffic,
            tuple(dict.fromkeys(m.input_seed for m in measurements)),
            Metrics(**{name: low for name, (low, _) in ends.items()}),
            Metrics(**{name: high for name, (_, high) in ends.items()}),
        )

    @property
    def bytes_sent(self) -> float:
        """By each replica, on average."""
        return self.traffic.bytes_sent

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences about what makes this row an artefact of its messages' length; mostly none."""
        return self.traffic.problems

    @property
    def record(self) -> dict[str, Any]:
        """The row as it is written to files."""
        figures: dict[str, Any] = {}
        for name in METRICS:
            figures[name] = getattr(self.mean, name)
            for ending in ("spread", "low", "high"):
                figures[f"{name}_{ending}"] = getattr(getattr(self, ending), name, math.nan)
        many = len(self.seeds) if self.setting.stochastic else None
        place = {"tensor": self.tensor, "replicas": self.replicas}
        more: dict[str, Any] = {"wire": None, "hierarchy": None, "steps": None, "feedback": None}
        fields = more | self.setting.record | {"reduction": self.setting.text}
        fields |= {
            "bytes_sent": self.bytes_sent,
            "bytes_unrounded": self.traffic.unrounded,
            "short_blocks": self.traffic.short_blocks,
            "more_bytes": self.traffic.more_bytes,
            "shortest_message": self.traffic.shortest,
        }
        return {**place, **fields, "inputs": len(self.inputs), "seeds": many, **figures}


def units(measurements: Sequence[Measurement], name: str) -> dict[int, float]:
    """The values of a figure by unit: the inputs, each with the mean over its seeds, or the seeds
    of one input."""
    inputs: dict[int, list[Measurement]] = {}
    for m in measurements:
        inputs.setdefault(m.input_seed, []).append(m)
    if len(inputs) > 1:
        return {
            number: _mean([getattr(m.metrics, name) for m in found])
            for number, found in inputs.items()
        }
    return {m.seed: getattr(m.metrics, name) for m in measurements}


@dataclass(frozen=True)
class Measured:
    """A finished sweep.

    `input` describes the input, `about` has the parameters to repeat the sweep, `measurements` has
    one entry for each reduction, and `rows` combines the seeds and the inputs.
    """

    input: str
    about: dict[str, Any]
    measurements: list[Measurement]
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        groups: dict[tuple[Any, ...], list[Measurement]] = {}
        for m in self.measurements:
            groups.setdefault((m.setting, m.replicas, m.tensor), []).append(m)
        rows = [Row.of(group, self.confidence) for group in groups.values()]
        object.__setattr__(self, "rows", rows)

    @property
    def confidence(self) -> float:
        """That of the intervals."""
        return float(self.about.get("confidence", CONFIDENCE))

    @property
    def problems(self) -> list[str]:
        """A sentence for each setting with rows that are artefacts of their messages' length."""
        found = []
        for setting in self.settings:
            rows = [row for row in self.rows if row.setting == setting and row.problems]
            if rows:
                counts = ", ".join(f"{n:,}" for n in dict.fromkeys(row.replicas for row in rows))
                worst = max(rows, key=lambda row: (len(row.problems), row.replicas))
                found.append(
                    f"{setting.name}: an artefact at {counts} replicas: at {worst.replicas:,} "
                    + ", and ".join(worst.problems)
                )
        return found

    @property
    def settings(self) -> list[Setting]:
        return list(dict.fromkeys(row.setting for row in self.rows))

    @property
    def tensors(self) -> list[str]:
        """The names of the input's arrays, if they have rows of their own."""
        return list(dict.fromkeys(row.tensor for row in self.rows if row.tensor is not None))

    def of(self, setting: Setting, tensor: str | None = None) -> list[Row]:
        """The rows of one setting, by number of replicas; of one array, or of all the input."""
        rows = [row for row in self.rows if (row.setting, row.tensor) == (setting, tensor)]
        return sorted(rows, key=lambda row: row.replicas)

    @property
    def op(self) -> str:
        """The measured operation: "sum", "mean", or "sum and mean"."""
        return " and ".join(dict.fromkeys(setting.op for setting in self.settings))


def _mean(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return sum(values)  # an infinity, or NaN
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
