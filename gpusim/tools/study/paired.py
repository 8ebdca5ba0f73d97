"""Paired tests between two settings of a study: whether a figure differs by more than chance."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpusim.tools.study.intervals import holm, mean_interval, sign_flips
from gpusim.tools.study.metrics import METRICS
from gpusim.tools.study.rows import Measured, Measurement, units
from gpusim.tools.study.settings import Setting

__all__ = ["PairedTest", "compared", "setting_named", "test", "tests"]


@dataclass(frozen=True)
class PairedTest:
    """A figure of setting `a` against that of `b`, over pairs of the same input or the same seed.

    `p_value` is that of a two-sided paired sign-flip test: the share of all ways to choose the
    signs of the pairs' differences whose sum is as far from zero as the measured one. `adjusted`
    is corrected for all tests that were made together, by Holm's method. `low` and `high` are
    Student's confidence interval of the mean difference.
    """

    a: Setting
    b: Setting
    metric: str
    replicas: int
    tensor: str | None
    unit: str
    """A pair's: "input" or "seed"."""
    pairs: int
    mean_a: float
    mean_b: float
    low: float
    high: float
    p_value: float
    ways: int
    adjusted: float

    @property
    def difference(self) -> float:
        """The mean of a less b."""
        return self.mean_a - self.mean_b

    @property
    def ratio(self) -> float:
        """The mean of a over that of b; NaN if that is zero."""
        return self.mean_a / self.mean_b if self.mean_b else math.nan

    @property
    def least_p_value(self) -> float:
        """The smallest p-value that so many pairs can have."""
        return 2 / self.ways if self.ways == 2**self.pairs else 1 / self.ways

    @property
    def record(self) -> dict[str, Any]:
        """The test as it is written to files."""
        names = ("replicas", "tensor", "metric", "unit", "pairs", "mean_a", "mean_b")
        rest = ("difference", "low", "high", "ratio", "p_value", "adjusted", "least_p_value")
        fields = {name: getattr(self, name) for name in (*names, *rest)}
        return {"a": self.a.name, "b": self.b.name, **fields}


def setting_named(settings: Sequence[Setting], given: str | Setting, argument: str) -> Setting:
    """The setting with this name, or with this text where that is the only one.

    **Raises**: ValueError, with the nearest names, where there is none.
    """
    if isinstance(given, Setting):
        alike = [setting for setting in settings if setting == given]
    else:
        alike = [setting for setting in settings if setting.name == given]
        alike = alike or [setting for setting in settings if setting.text == given]
    if len(alike) == 1:
        return alike[0]
    names = [setting.name for setting in settings]
    named = given.name if isinstance(given, Setting) else str(given)[:200]
    if alike:
        raise ValueError(
            f"{argument}={named!r}: the text of {len(alike)} settings; expected a name, such as "
            f"{alike[0].name!r}"
        )
    near = difflib.get_close_matches(named, names, 3, 0.0)
    raise ValueError(f"{argument}={named!r}: expected a setting of this study, such as {near}")


def test(
    study: Measured,
    a: str | Setting,
    b: str | Setting,
    metric: str = "relative_error",
    replicas: int | None = None,
    tensor: str | None = None,
) -> PairedTest:
    """As `Study.test`."""
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
    first = setting_named(study.settings, a, "a")
    second = setting_named(study.settings, b, "b")
    if first == second:
        raise ValueError(f"a and b are both {first.name!r}: expected two settings")
    counts = sorted({m.replicas for m in study.measurements})
    replicas = counts[-1] if replicas is None else replicas
    if replicas not in counts:
        raise ValueError(f"replicas={replicas!r}: expected one of {', '.join(map(str, counts))}")
    if tensor is not None and tensor not in study.tensors:
        raise ValueError(f"tensor={tensor!r}: expected one of {', '.join(study.tensors) or None}")
    found = [
        [
            m
            for m in study.measurements
            if (m.setting, m.replicas, m.tensor) == (setting, replicas, tensor)
        ]
        for setting in (first, second)
    ]
    unit, pairs = _pairs(found[0], found[1], metric)
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        raise ValueError(f"metric={metric!r}: it is not finite everywhere at {replicas} replicas")
    differences = [one - other for one, other in pairs]
    p_value, ways = sign_flips(differences)
    mean_a, mean_b = (math.fsum(values) / len(pairs) for values in zip(*pairs, strict=True))
    low, high = mean_interval(differences, study.confidence)
    return PairedTest(
        first,
        second,
        metric,
        replicas,
        tensor,
        unit,
        len(pairs),
        mean_a,
        mean_b,
        low,
        high,
        p_value,
        ways,
        p_value,
    )


def _pairs(
    first: Sequence[Measurement], second: Sequence[Measurement], metric: str
) -> tuple[str, list[tuple[float, float]]]:
    """The unit, and the values of both settings for each: by input if there are several, with the
    means over their seeds; else by seed, where a setting without seeds has one value for all."""
    one, other = units(first, metric), units(second, metric)
    unit = "input" if len({m.input_seed for m in first}) > 1 else "seed"
    if unit == "seed":
        keys = one if first[0].setting.stochastic else other
        stochastic = [m for m in (first[0], second[0]) if m.setting.stochastic]
        if not stochastic or len(keys) < 2:
            raise ValueError(
                "a test needs at least two pairs: expected several inputs (input_seed=range(8), "
                "with resample='workers' for recorded ones), or several seeds of a stochastic "
                "setting"
            )
        one = one if first[0].setting.stochastic else dict.fromkeys(keys, *one.values())
        other = other if second[0].setting.stochastic else dict.fromkeys(keys, *other.values())
    return unit, [(one[key], other[key]) for key in one]


def tests(
    study: Measured,
    pairs: Iterable[tuple[str | Setting, str | Setting]],
    metric: str = "relative_error",
    replicas: Iterable[int] | None = None,
) -> list[PairedTest]:
    """As `Study.tests`."""
    counts = sorted({m.replicas for m in study.measurements}) if replicas is None else [*replicas]
    found = [test(study, a, b, metric, count) for a, b in pairs for count in counts]
    adjusted = holm([each.p_value for each in found])
    return [replace(each, adjusted=p) for each, p in zip(found, adjusted, strict=True)]


def compared(study: Measured) -> list[PairedTest]:
    """The tests that the sweep was asked for."""
    asked = study.about.get("compare")
    return tests(study, asked["pairs"], asked["metric"]) if asked else []
