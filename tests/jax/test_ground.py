"""Programs of tests/jax/ground have the same results with gpusim installed, but for last bits."""

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

#: Programs of each module that `make test` takes.
SAMPLE = 4
