"""The kinds that training has: replicas that differ, dropout, means. Whole programs."""

from __future__ import annotations

import pytest

from gpusim.torch.distributed import launch
from gpusim.torch.distributed.checks import CheckError
from tests.check import right_training, wrong_training


@pytest.mark.parametrize("name", list(right_training.PROGRAMS))
def test_a_right_program_has_no_finding(name: str) -> None:
    launch(right_training.PROGRAMS[name], 4, check=True, device="cpu")


@pytest.mark.parametrize("name", list(wrong_training.PROGRAMS))
def test_a_wrong_program_has_its_finding(name: str) -> None:
    kind, run = wrong_training.PROGRAMS[name]
    with pytest.raises(CheckError) as raised:
        launch(run, 4, check=True, device="cpu")
    assert [each.kind for each in raised.value.findings] == [kind]
    assert "_training.py:" in raised.value.findings[0].site
