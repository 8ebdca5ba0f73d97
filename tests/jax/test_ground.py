"""Programs of tests/jax/ground have the same results with gpusim installed, but for last bits.

Results are trees of arrays with their types, shardings and layouts, texts, and errors; the number
of compilations is compared too. `python -m tests.jax.ground --help` runs programs by hand.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.jax import ground_runs
from tests.jax.ground_runs import MODULES, Run, differences, run, unexplained
from tests.oracles.budget import FULL, SEED

#: Programs of which sums stay XLA's, with words of the ReductionWarning that says so.
UNREACHED: dict[str, str] = {}

#: Programs whose results are others, and why that is right.
DIFFERENT = {
    "dtypes.extremes_of_nan": "XLA:CPU's maximum between devices loses NaN, and gpusim's does not",
}

#: Sums by which XLA moves data: of one device's elements and zeros, under names of the program's.
MOVED: dict[str, str] = {}

#: Programs of each module that `make test` takes.
SAMPLE = 4


@pytest.mark.parametrize("module", MODULES)
def test_programs_have_the_results_of_jax_alone(module: str) -> None:
    sample = None if FULL else SAMPLE
    plain = run(module, sample=sample, seed=SEED)
    for reduction in ("tree", "xla-cpu"):
        with_gpusim = run(module, reduction=reduction, sample=sample, seed=SEED)
        found = differences(plain, with_gpusim, bits=False)
        assert found == [], (reduction, *found)
