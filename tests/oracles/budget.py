"""How much of the suite one run takes: the default run of `make test`, or all of it."""

from __future__ import annotations

import os
from typing import Any

import pytest

#: Whether this run is `make test-all`: with the tests marked slow and the full random budgets.
FULL = os.environ.get("GPUSIM_TESTS") == "full"


def budget(default: int, *, full: int) -> int:
    """Return the number of random examples that a test draws in this run."""
    return full if FULL else default


def slow(*cases: Any) -> list[Any]:
    """Mark cases of a parametrized test as slow; a tuple is a case with several parameters."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
