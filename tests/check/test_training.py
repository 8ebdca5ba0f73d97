"""The kinds that training has: replicas that differ, dropout, means. Whole programs."""

from __future__ import annotations

import pytest

from gpusim.torch.distributed import launch
from tests.check.right_training import PROGRAMS


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_right_program_has_no_finding(name: str) -> None:
    launch(PROGRAMS[name], 4, check=True, device="cpu")
