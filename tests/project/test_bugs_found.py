"""The page of bugs found lists all reports, with the totals and the output of the commands."""

from __future__ import annotations

import re
import sys

import pytest

from tests.oracles.budget import slow
from tests.project.bugs_found import LEFT_OUT, PAGE, entries, excerpt, printed, totals
from tests.project.reports import KINDS, PROGRAMS, REPORTS, Report

TEXT = PAGE.read_text()
SHOWN = {entry.command: entry for entry in entries(TEXT)}
QUICK = ("balance-scaled", "public_master_weight", "warmup-begun-again")  # one of each command

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux")


def cases() -> list[object]:
    """All reports; those that are not quick are slow."""
    found: list[object] = []
    for row in REPORTS:
        quick = any(word in row.command for word in QUICK)
        marks = () if quick else slow(row)[0].marks
        name = re.sub(r"[^\w]+", "-", f"{row.report} {row.part}").strip("-")
        found.append(pytest.param(row, id=name, marks=marks))
    return found


@needs_linux
@pytest.mark.parametrize("row", cases())
def test_the_page_shows_what_the_command_prints(row: Report) -> None:
    assert SHOWN[row.command].output == excerpt(printed(row.command, int(row.found)))


def test_every_report_is_on_the_page_once_and_in_its_group() -> None:
    assert [entry.command for entry in entries(TEXT)] == [
        row.command for kind in KINDS for row in REPORTS if row.kind == kind
    ]
    groups = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
    for group in groups:
        kind = group.partition("\n")[0]
        assert {entry.command for entry in entries(group)} == {
            row.command for row in REPORTS if row.kind == kind
        }


def test_totals_are_those_of_the_reports() -> None:
    assert totals(REPORTS) in TEXT.replace("\n", " ")


def test_what_is_found_is_shown_as_found() -> None:
    for row in REPORTS:
        output = SHOWN[row.command].output
        says_so = re.search(r"^DIFFERENT: |check: \d+ finding|^saved on \d", output, re.MULTILINE)
        assert bool(says_so) == row.found, row.command
        assert row.found or "check: no findings" in output


def test_reports_name_programs_that_exist_and_say_so_in_sentences() -> None:
    for row in REPORTS:
        path = re.search(r"tests/[\w/]+\.py", row.command)
        assert path is not None and (PAGE.parents[1] / path[0]).is_file(), row.command
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", row.report)
        assert row.tool in PROGRAMS and row.says.endswith(".") and row.means.endswith(".")
    assert len({row.command for row in REPORTS}) == len(REPORTS)


def test_excerpts_begin_at_the_verdict_and_say_what_is_left_out() -> None:
    """An excerpt of an excerpt is itself, so that the page's own can be kept."""
    lines = ["[rank0]: loss 1", "DIFFERENT: the first", *(f"  line {n}" for n in range(9))]
    text = excerpt("\n".join(lines))
    assert text.startswith("DIFFERENT") and text.endswith(f"\n{LEFT_OUT}\n")
    assert excerpt(text) == text
    table = (
        "0 of 1 pairs\n\nsaved on  resumed on 2\n2 ranks DIFFERENT\n\nsaved on 2, resumed on 2: x\n"
    )
    assert excerpt(table) == "saved on 2, resumed on 2: x\n"
