"""The figures of a sweep: a row for each setting and number of replicas, and its spread over seeds.

Tables and pictures are made of them; `results.Study` adds the methods that call for these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gpusim.tools.study.metrics import METRICS, Metrics
from gpusim.tools.study.settings import Setting

__all__ = ["Measured", "Measurement", "Row"]


@dataclass(frozen=True)
class Measurement:
    """One reduction: a setting, a number of replicas, a seed, and its figures."""

    setting: Setting
    replicas: int
    seed: int
    metrics: Metrics
    tensor: str | None = None
    """One of the input's arrays; None is all of the input."""
    bytes_sent: float = math.nan
    """By each replica, on average."""


@dataclass(frozen=True)
class Row:
    """A setting at a number of replicas: each figure's mean over the seeds, and its spread.

    The spread is the standard deviation between seeds (of the sample); NaN with fewer than two.
    """

    setting: Setting
    replicas: int
    seeds: tuple[int, ...]
    mean: Metrics
    spread: Metrics
    tensor: str | None = None
    bytes_sent: float = math.nan

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> Row:
        figures = [asdict(m.metrics) for m in measurements]
        columns = {name: [row[name] for row in figures] for name in METRICS}
        one = measurements[0]
        return cls(
            one.setting,
            one.replicas,
            tuple(m.seed for m in measurements),
            Metrics(**{name: _mean(values) for name, values in columns.items()}),
            Metrics(**{name: _deviation(values) for name, values in columns.items()}),
            one.tensor,
            one.bytes_sent,
        )

    @property
    def record(self) -> dict[str, Any]:
        """The row as it is written to files."""
        figures: dict[str, Any] = {}
        for name in METRICS:
            figures[name] = getattr(self.mean, name)
            figures[f"{name}_spread"] = getattr(self.spread, name)
        many = len(self.seeds) if self.setting.stochastic else None
        place = {"tensor": self.tensor, "replicas": self.replicas}
        more: dict[str, Any] = {"wire": None, "hierarchy": None}
        fields = more | self.setting.record | {"reduction": self.setting.text}
        fields |= {"bytes_sent": self.bytes_sent}
        return {**place, **fields, "seeds": many, **figures}


@dataclass(frozen=True)
class Measured:
    """A finished sweep.

    `input` describes the input, `about` has the parameters to repeat the sweep, `measurements` has
    one entry for each reduction, and `rows` combines the seeds.
    """

    input: str
    about: dict[str, Any]
    measurements: list[Measurement]
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        groups: dict[tuple[Any, ...], list[Measurement]] = {}
        for m in self.measurements:
            groups.setdefault((m.setting, m.replicas, m.tensor), []).append(m)
        object.__setattr__(self, "rows", [Row.of(group) for group in groups.values()])

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
