"""The result of a sweep: a row for each setting and number of replicas, with its spread.

It can be printed, drawn, tested, and written as CSV, JSON, a DataFrame or a page.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from gpusim.files import atomic_write
from gpusim.tools.study import paired, picture, report, table
from gpusim.tools.study.frames import as_frame
from gpusim.tools.study.metrics import METRICS
from gpusim.tools.study.paired import PairedTest
from gpusim.tools.study.rows import Measured, Measurement, Row
from gpusim.tools.study.settings import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Measurement", "PairedTest", "Row", "Study"]


@dataclass(frozen=True)
class Study(Measured):
    """A finished sweep, with methods to print, draw and write it.

    `input` describes the input, `about` has the parameters to repeat the sweep, `measurements` has
    one entry for each reduction, and `rows` combines the seeds and the inputs.
    """

    def show(self, figures: Sequence[str] | None = None, *, intervals: bool = False) -> None:
        """Print the table; `figures` are its columns, of those that METRICS names.

        `intervals` shows confidence intervals in place of standard deviations.
        """
        table.show(self, table.MAIN if figures is None else figures, intervals=intervals)

    def test(
        self,
        a: str | Setting,
        b: str | Setting,
        metric: str = "relative_error",
        replicas: int | None = None,
        tensor: str | None = None,
    ) -> PairedTest:
        """Test whether a figure differs between two settings by more than chance.

        A two-sided paired sign-flip test. Pairs are inputs, each with the means over its seeds, or
        the seeds of one input. If the settings do not differ, each pair's difference has either
        sign alike; the p-value is the share of all choices of signs whose sum is as far from zero
        as the measured one. Up to 16 pairs have all choices; of more, 99,999 are drawn, always the
        same. With n pairs no p-value is below 2 / 2**n.

        **Arguments**:

        - `a`, `b`: settings, their names, or their texts.
        - `metric`: the figure, of METRICS.
        - `replicas`: a number of replicas of the study. None: the largest one.
        - `tensor`: one of the input's arrays. None: all together.

        **Returns**: the means, the interval of their difference, and the p-value.

        **Raises**: ValueError for settings that the study lacks, for fewer than two pairs, and for
        a figure that is not finite.

        >>> from gpusim import study
        >>> how = {"replicas": 256, "elements": 256, "input_seed": range(8), "orders": "ring,tree"}
        >>> found = study.sweep("lognormal", dtypes="bfloat16", roundings="nearest", **how)
        >>> ring, tree = found.settings
        >>> test = found.test(ring, tree)
        >>> test.unit, test.pairs, test.p_value, test.ratio > 10
        ('input', 8, 0.0078125, True)
        """
        return paired.test(self, a, b, metric, replicas, tensor)

    def tests(
        self,
        pairs: Iterable[tuple[str | Setting, str | Setting]],
        metric: str = "relative_error",
        replicas: Iterable[int] | None = None,
    ) -> list[PairedTest]:
        """`test` of several pairs at several numbers of replicas, corrected by Holm's method.

        `replicas` are all of the study where they are not given. `adjusted` of each test is the
        corrected p-value.
        """
        return paired.tests(self, pairs, metric, replicas)

    @property
    def compared(self) -> list[PairedTest]:
        """The tests that the sweep was asked for."""
        return paired.compared(self)

    def to_frame(self, library: str = "pandas") -> Any:
        """The rows as a DataFrame of "pandas" or "polars", with the columns of `to_csv`.

        **Raises**: ModuleNotFoundError without the library, ValueError for another one.
        """
        return as_frame([row.record for row in self.rows], library)

    def to_csv(self, path: str | PathLike[str]) -> Path:
        """Write the rows; cells that do not apply are empty. Returns the path."""
        with atomic_write(path) as file:
            records = [row.record for row in self.rows]
            rows = csv.DictWriter(file, list(records[0]), lineterminator="\n")
            rows.writeheader()
            rows.writerows([_without_nan(record, "") for record in records])
        return Path(path)

    def json_text(self) -> str:
        """Everything as JSON: the input, the rows, and each seed's measurement."""
        each = [
            {
                "tensor": m.tensor,
                "replicas": m.replicas,
                **m.setting.record,
                "reduction": str(m.setting.reduction(m.seed)),
                "seed": m.seed,
                "input_seed": m.input_seed,
                **asdict(m.metrics),
            }
            for m in self.measurements
        ]
        tests = [_without_nan(test.record) for test in self.compared]
        answer = {
            **self.about,
            **({"tests": tests} if tests else {}),
            "figures": METRICS,
            "rows": [
                {**_without_nan(row.record), "problems": list(row.problems)} for row in self.rows
            ],
            "measurements": [_without_nan(record) for record in each],
        }
        return json.dumps(answer, indent=1, allow_nan=False) + "\n"

    def to_json(self, path: str | PathLike[str]) -> Path:
        """Write `json_text`. Returns the path."""
        with atomic_write(path) as file:
            file.write(self.json_text())
        return Path(path)

    @overload
    def plot(self, path: str | PathLike[str], metric: str = ..., against: str = ...) -> Path: ...
    @overload
    def plot(
        self, path: None = ..., metric: str = ..., against: str = ..., *, ax: Axes
    ) -> Axes: ...
    def plot(
        self,
        path: str | PathLike[str] | None = None,
        metric: str = "relative_error",
        against: str = "replicas",
        *,
        ax: Axes | None = None,
    ) -> Path | Axes:
        """Draw a figure into a file, .png, .svg or .pdf, or into axes of matplotlib.

        It is drawn `against` the number of "replicas", or, for the largest one, the "bytes" that
        each replica sends. Into `ax` go lines with labels, scales and the labels of its axes; the
        title, the legend and the style are yours.

        **Returns**: the path, or the axes.

        **Raises**: ValueError without either of them, or with both.
        """
        if (path is None) == (ax is None):
            raise ValueError("plot: expected either a path or ax=")
        if ax is not None:
            return picture.draw(ax, self, metric, against)
        assert path is not None
        return picture.write(self, Path(path), metric, against)

    def report(self, path: str | PathLike[str]) -> Path:
        """Write a page with the table and all pictures inside it. Returns the path."""
        return report.write(self, Path(path))


def _without_nan(record: dict[str, Any], nothing: Any = None) -> dict[str, Any]:
    """JSON has neither NaN nor infinity."""
    return {
        name: nothing
        if value is None or (isinstance(value, float) and not math.isfinite(value))
        else value
        for name, value in record.items()
    }
