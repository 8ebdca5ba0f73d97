"""The table of docs/torch-simulators.md says what torch's simulated groups and gpusim do."""

from __future__ import annotations

import pytest
import torch

from tests.torch.other_simulators import ENGINES, PROGRAMS, ROOT, outcome

PAGE = (ROOT / "docs" / "torch-simulators.md").read_text()
ROWS = {
    cells[0]: dict(zip(ENGINES, cells[1:], strict=True))
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| |")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def test_the_table_has_all_programs() -> None:
    assert list(ROWS) == list(PROGRAMS)


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the table is of torch 2.13")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_cells_are_what_happens(name: str, engine: str) -> None:
    assert outcome(engine, name) == ROWS[name][engine]
