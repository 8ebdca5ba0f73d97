"""The comparison that `make frameworks` makes, on a program that needs PyTorch alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import __main__ as command
from tests.frameworks import running
from tests.frameworks.rows import ROWS, Row
from tests.frameworks.table import GOOD, Case, page, read, table, write
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


def result(*values: object, digest: str = "ab", error: str = "") -> running.Run:
    lines = [json.dumps(["step", [digest]]), json.dumps(["losses", repr([*values])])]
    return running.Run(error, "", {"rank-0": lines}, 1.0, 100.0)


@pytest.mark.parametrize(
    ("gpu", "real", "ours", "one", "outcome"),
    [
        (False, result(1.0), result(1.0), None, ("equal", "")),
        (False, result(1.0), result(1.0, digest="cd"), None, ("differs", "rank-0, line 1 (step)")),
        (False, result(1.0), result(1.5), None, ("differs", "rank-0, line 2 (losses)")),
        (False, result(error="odd"), result(1.0), None, ("failed", "over gloo: odd")),
        (False, result(1.0), result(error="odd"), None, ("failed", "odd")),
        (True, None, result(1.0), result(1.0000001), ("as one rank", "to 1e-07")),
        (True, None, result(1.0), result(1.001), ("differs", "from one rank's values by 1e-03")),
        (True, None, result(float("nan")), result(float("nan")), ("differs", "from one rank's")),
        (True, None, result(1e20), result(1e2), ("differs", "from one rank's values by 1e+00")),
        (True, None, result(1.0), result(error="odd"), ("failed", "on one rank: odd")),
    ],
)
def test_outcomes(
    gpu: bool,
    real: running.Run | None,
    ours: running.Run,
    one: running.Run | None,
    outcome: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With runs in place of those of programs."""

    def run(launcher: str, program: str, ranks: int, *_: object, **how: object) -> Any:
        return real if launcher == "gloo" else ours if ranks == 2 else one

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command.metadata, "version", lambda name: "1.0")
    row = Row("F", "f", "w", "p.py", gpu=gpu, reference="p.py" if gpu else "")
    case = command.Comparison(tmp_path, {"processor": "", "versions": {}}).case(row, 2)
    assert case.outcome == outcome[0] and case.cause.startswith(outcome[1])


def test_a_change_of_digests_is_kept_until_it_is_accepted() -> None:
    other = replace(CASE, digest="cd")
    assert command.has_changed(CASE, other)
    assert not command.has_changed(None, other)
    assert not command.has_changed(replace(CASE, machine="n"), other)
    assert not command.has_changed(replace(CASE, outcome="failed"), other)
    assert not command.has_changed(CASE, replace(CASE, seconds=(1.0, 1.0)))


def test_the_page_has_every_row() -> None:
    """Those of `make frameworks`, which are in the results, and good."""
    cases = read(command.JSON)[1]
    text = command.PAGE.read_text()
    for row in ROWS:
        for ranks in row.ranks:
            assert cases[row.program, ranks].outcome in GOOD
            assert f"`{row.program}` | {ranks} |" in text


@pytest.mark.rule
def test_rows_are_programs_and_no_two_are_the_same() -> None:
    assert len({row.program for row in ROWS}) == len(ROWS)
    used = {row.program.split()[0] for row in ROWS} | {"digest.py", "tiny.py"}
    assert used == {file.name for file in running.PROGRAMS.glob("*.py")}
    for row in ROWS:
        assert (running.PROGRAMS / row.program.split()[0]).exists(), row
        assert not set(row.ranks) & set(row.scale)


def test_the_list_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--only", "no such row"]) == 2
    assert "no case is so" in capsys.readouterr().err
    assert command.main(["--list", "--only", "megatron", "--ranks", "8"]) == 0
    assert capsys.readouterr().out.split() == [
        *("Megatron-Core", "8", "megatron_gpt.py", "--tp", "2", "--pp", "2")
    ]
    asked = [sys.executable, "-m", "tests.frameworks", "--help"]
    assert "--only" in subprocess.run(asked, capture_output=True, text=True, check=True).stdout
