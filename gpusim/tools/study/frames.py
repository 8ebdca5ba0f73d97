"""DataFrames of pandas and polars, in and out: neither is imported before it is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.optional import load

__all__ = ["LIBRARIES", "as_frame", "frame_array", "is_frame"]

LIBRARIES = ("pandas", "polars")


def is_frame(given: Any) -> bool:
    """Whether this is a DataFrame, of pandas, polars or a library that is like them."""
    return not isinstance(given, type) and all(
        hasattr(given, name) for name in ("columns", "to_numpy", "shape")
    )


def frame_array(frame: Any, name: str) -> NDArray[Any]:
    """A DataFrame's values: a row for each replica, and a column for each element.

    **Raises**: ValueError for columns that do not hold numbers, and for missing values.
    """
    values = np.asarray(frame.to_numpy())
    if values.dtype.kind != "O":
        return values
    wrong = [str(column) for column in frame.columns if not _numbers(frame[column])]
    if wrong:
        listed = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        raise ValueError(
            f"{name}: columns without numbers, or with missing ones: {listed}; expected a column "
            "of numbers for each element"
        )
    return values.astype(np.float64)


def _numbers(column: Any) -> bool:
    """Whether a column has numbers alone."""
    values = np.asarray(column.to_numpy())
    if values.dtype.kind in "fiub":
        return True
    if values.dtype.kind != "O":
        return False
    return all(isinstance(value, (int, float, np.number)) for value in values.tolist())


def as_frame(records: Sequence[dict[str, Any]], library: str) -> Any:
    """A DataFrame of the records, which have the same keys; None is a missing value.

    **Raises**: ValueError for another library, PackageError without it.
    """
    if library not in LIBRARIES:
        raise ValueError(f"library={library!r}: expected one of {', '.join(LIBRARIES)}")
    made = load(f"a DataFrame of {library} needs", library)
    columns = {name: [record[name] for record in records] for name in records[0]}
    if library == "pandas":
        return made.DataFrame(columns)
    empty = {name for name, values in columns.items() if all(value is None for value in values)}
    kinds: dict[str, Any] = dict.fromkeys(empty, made.String)
    numbers = {name for name, values in columns.items() if any(_is_float(v) for v in values)}
    kinds |= dict.fromkeys(numbers, made.Float64)
    return made.DataFrame(columns, schema_overrides=kinds)


def _is_float(value: Any) -> bool:
    return isinstance(value, float) and not math.isnan(value)
