"""The comparison that `make frameworks` makes, on a program that needs PyTorch alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.frameworks import running
from tests.frameworks.__main__ import main
from tests.frameworks.rows import ROWS
from tests.frameworks.table import Case, page, read, table, write
from tests.torch.children import needs_linux

pytestmark = needs_linux

CASE = Case(
    "PyTorch",
    "torch",
    "2.13.0",
    "DDP",
    "ddp.py",
    2,
    "equal",
    "",
    10,
    "m",
    "ab",
    (7.0, 3.4),
    (615, 259),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, running.Run]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        launcher: running.run(launcher, "ddp.py", 3, folder / launcher)
        for launcher in running.LAUNCHERS
    }


def test_a_program_has_the_digests_of_gloo(runs: dict[str, running.Run]) -> None:
    assert all(not run.error for run in runs.values()), [run.output for run in runs.values()]
    assert running.difference(runs["gloo"], runs["gpusim"]) == ""
    assert all(run.steps == 10 and run.megabytes > 50 for run in runs.values())
    assert runs["gloo"].digest == runs["gpusim"].digest


def test_another_order_of_sums_is_a_difference(
    runs: dict[str, running.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "HOST", ["--reduction", "reverse"])
    other = running.run("gpusim", "ddp.py", 3, tmp_path / "other")
    assert other.error == ""
    assert running.difference(runs["gloo"], other).startswith("rank-0, line 1 (step), tensor 0: ")


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    for launcher in running.LAUNCHERS:
        found = running.run(launcher, "pipeline.py NoSchedule", 2, tmp_path / launcher)
        assert "ValueError: Unknown schedule name 'NoSchedule'" in found.error


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    cases = [CASE, replace(CASE, ranks=64, outcome="ran", seconds=(None, 9.0))]
    write(file, {"processor": "one"}, cases)
    assert read(file) == ({"processor": "one"}, {case.key: case for case in cases})
    assert json.loads(file.read_text())["cases"][1]["seconds"] == [None, 9.0]
    assert read(tmp_path / "absent") == ({}, {})


def test_the_table_has_a_line_for_each_case(tmp_path: Path) -> None:
    failed = replace(CASE, ranks=4, outcome="failed", cause="a|b")
    text = table(ROWS, {each.key: each for each in (CASE, failed)})
    assert "| PyTorch | torch 2.13.0 | 1 | 2, 4 | 1 equal to gloo, 1 **failed** |" in text
    assert "| DDP, `ddp.py` | 2 | 10 | equal to gloo | 7, 3 | 615, 259 |" in text
    assert r"**failed**: a\|b" in text
    file = tmp_path / "page.md"
    file.write_text("before\n<!-- make frameworks -->\nold\n<!-- end -->\nafter\n")
    page(file, text)
    assert text in file.read_text() and "old" not in file.read_text()
    file.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the lines"):
        page(file, text)


def test_rows_are_programs_and_no_two_are_the_same() -> None:
    assert len({row.program for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert (running.PROGRAMS / row.program.split()[0]).exists(), row
        assert not set(row.ranks) & set(row.scale)


def test_the_list_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "megatron", "--ranks", "8"]) == 0
    assert capsys.readouterr().out.split() == [
        *("Megatron-Core", "8", "megatron_gpt.py", "--tp", "2", "--pp", "2")
    ]
    command = [sys.executable, "-m", "tests.frameworks", "--help"]
    assert "--only" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
