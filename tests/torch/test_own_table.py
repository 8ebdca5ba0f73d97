"""The table of what a rank has to itself: each row that changes hands with the turn does so."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpusim.tools.cli import main
from gpusim.torch.distributed import launch
from gpusim.torch.distributed.own import table
from gpusim.torch.distributed.own.table import Attribute, Row, Value

EXCHANGED = [row for row in table.rows() if isinstance(row.kept, (Attribute, Value))]


def title(row: Row) -> str:
    return f"{row.name}-{row.kept.name}" if isinstance(row.kept, Attribute) else row.name


def another(value: Any, folder: Path) -> Any:
    """A value that differs from what there is, of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return str(folder)  # the working directory
    if isinstance(value, tuple):
        return (another(value[0], folder), *value[1:])
    if isinstance(value, list):
        return value[::-1] if len(value) > 1 and isinstance(value[0], int) else [*value, "more"]
    if isinstance(value, set):
        return {*value, complex}
    if isinstance(value, dict):
        return type(value)({**value, "more": 1})
    if value is torch.float32:
        return torch.float64
    if isinstance(value, types.ModuleType):
        return types.ModuleType("__main__")
    return lambda *args, **named: None  # hooks, streams, and what is None as a rule


@pytest.mark.parametrize("row", EXCHANGED, ids=title)
def test_each_row_that_changes_hands_belongs_to_the_rank(row: Row, tmp_path: Path) -> None:
    """The rank that sets it finds it after a wait, and the others find what was there."""
    kept = row.kept
    assert isinstance(kept, (Attribute, Value))
    before = kept.read()
    other = another(before, tmp_path)

    def look(rank: int) -> tuple[bool, bool]:
        dist.init_process_group()
        if rank == 1:
            kept.write(other)
        now = kept.read()
        dist.barrier()
        during = kept.read()
        dist.barrier()
        after = kept.read()
        return bool(during == now), bool(after == now)

    assert before != other
    try:
        assert launch(look, 3) == [(True, True)] * 3
        assert kept.read() == before
    finally:
        kept.write(before)


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["torchrun", "--explain"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    for row in table.rows():
        (line,) = (each for each in shown if each.startswith(f"  {row.name}  "))
        assert line.split()[-2:] == [row.turns, row.free]
    assert len(shown) == len(set(shown) - {""}) + shown.count("")


def test_rows_of_one_name_agree() -> None:
    """They are shown as one line."""
    said = {(row.name, row.turns, row.free) for row in table.rows()}
    assert len(said) == len({name for name, *_ in said})


def test_threads_of_ranks_compute_with_a_number_of_threads_of_their_own() -> None:
    """torch keeps it by the thread, but a new thread takes what another has set last."""

    def look(rank: int) -> int:
        dist.init_process_group()
        torch.set_num_threads(1 + rank)
        dist.barrier()
        return torch.get_num_threads()

    before = torch.get_num_threads()
    assert launch(look, 3, schedule="free") == [1, 2, 3]
    assert torch.get_num_threads() == before
