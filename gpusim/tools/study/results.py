"""The result of a sweep: a row for each setting and number of replicas, with the spread over seeds.

It can be printed, drawn, and written as CSV, JSON or a page.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from gpusim.files import atomic_write
from gpusim.tools.study import picture, report, table
from gpusim.tools.study.metrics import METRICS
from gpusim.tools.study.rows import Measured, Measurement, Row

__all__ = ["Measurement", "Row", "Study"]


@dataclass(frozen=True)
class Study(Measured):
    """A finished sweep, with methods to print, draw and write it.

    `input` describes the input, `about` has the parameters to repeat the sweep, `measurements` has
    one entry for each reduction, and `rows` combines the seeds.
    """

    def show(self, figures: Sequence[str] | None = None) -> None:
        """Print the table; `figures` are its columns, of those that METRICS names."""
        table.show(self, table.MAIN if figures is None else figures)

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
                **asdict(m.metrics),
            }
            for m in self.measurements
        ]
        answer = {
            **self.about,
            "figures": METRICS,
            "rows": [_without_nan(row.record) for row in self.rows],
            "measurements": [_without_nan(record) for record in each],
        }
        return json.dumps(answer, indent=1, allow_nan=False) + "\n"

    def to_json(self, path: str | PathLike[str]) -> Path:
        """Write `json_text`. Returns the path."""
        with atomic_write(path) as file:
            file.write(self.json_text())
        return Path(path)

    def plot(
        self,
        path: str | PathLike[str],
        metric: str = "relative_error",
        against: str = "replicas",
    ) -> Path:
        """Draw a figure: .png, .svg or .pdf. Returns the path.

        It is drawn `against` the number of "replicas", or, for the largest one, the "bytes" that
        each replica sends.
        """
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
