"""The stacked inputs of a case, made once for all peers of this process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.cases import Case


@lru_cache(maxsize=1)
def stacked(case: Case) -> tuple[NDArray[Any], ...]:
    """The arguments of the case's program, with an axis of replicas in front."""
    values = case.values()
    if not case.ragged:
        return (values,)
    output = np.zeros((case.replicas, case.plan.output_rows, case.row), case.dtype)
    return (values, output, *case.plan.arguments())


def forget() -> None:
    """Free the last case's inputs."""
    stacked.cache_clear()
