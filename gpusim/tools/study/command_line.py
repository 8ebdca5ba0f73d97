"""The command line that repeats a sweep, or a call in Python where there is none."""

from __future__ import annotations

import shlex
from typing import Any

__all__ = ["command"]

OPTIONS = {
    "input": "--input",
    "tensor": "--tensor",
    "concatenate": "--concatenate",
    "resample": "--resample",
    "elements": "--elements",
    "scale": "--scale",
    "epoch": "--epoch",
    "input_seed": "--input-seed",
    "replicas": "--replicas",
    "dtypes": "--dtype",
    "accumulators": "--accumulate",
    "preset": "--preset",
    "orders": "--order",
    "roundings": "--rounding",
    "ops": "--op",
    "wires": "--wire",
    "hierarchies": "--hierarchy",
    "reductions": "--reduction",
    "error_feedback": "--error-feedback",
    "seeds": "--seeds",
    "confidence": "--confidence",
    "compare": "--compare",
    "compare_metric": "--compare-metric",
}
"""The options of the command by the arguments of `sweep`."""


def command(arguments: dict[str, Any]) -> str:
    """The command line that repeats a sweep; a call in Python where there is none.

    >>> command({"input": "normal", "replicas": [2, 4], "dtypes": ["e5m6"], "seeds": [0, 1, 2]})
    'gpusim study --input normal --replicas 2,4 --dtype e5m6 --seeds 0..2'
    >>> command({"input": None, "replicas": [2], "dtypes": ["e4m3+bias=3"]})
    "gpusim.study.sweep(array, replicas=[2], dtypes=['e4m3+bias=3'])"
    """
    if arguments["input"] is None:
        rest = (f"{key}={value!r}" for key, value in arguments.items() if key != "input")
        return f"gpusim.study.sweep({', '.join(['array', *rest])})"
    words = ["gpusim", "study"]
    for key, value in arguments.items():
        if key == "compare":
            words += [word for pair in value for word in (OPTIONS[key], *pair)]
            continue
        counting = key in ("seeds", "input_seed")
        words += [OPTIONS[key]] if value is True else [OPTIONS[key], _option(value, counting)]
    return shlex.join(words)


def _option(value: Any, counting: bool) -> str:
    if not isinstance(value, list):
        return str(value)
    if counting and len(value) > 2 and value == [*range(value[0], value[-1] + 1)]:
        return f"{value[0]}..{value[-1]}"
    return ",".join(map(str, value))
