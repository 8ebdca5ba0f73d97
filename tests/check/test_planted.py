"""Planted programs: each is named with its fault, and nothing is said of it without."""

from __future__ import annotations

import pytest

from tests.check.cases import KNOWN_MISSES, Case, cases, run
from tests.check.small import needs_linux
from tests.oracles.budget import slow

pytestmark = needs_linux

QUICK = 2
"""Programs of each kind that are run by every lane."""


def chosen(misses: bool = False) -> list[object]:
    """All programs, those behind the first of their kind as slow ones."""
    counts: dict[str, int] = {}
    found: list[object] = []
    for case in cases():
        counts[case.kind] = counts.get(case.kind, 0) + 1
        [param] = slow((case,)) if counts[case.kind] > QUICK else [pytest.param(case)]
        marks = [*param.marks]
        if misses and case.path.name in KNOWN_MISSES:
            marks.append(pytest.mark.xfail(strict=True, reason=KNOWN_MISSES[case.path.name]))
        found.append(pytest.param(case, marks=marks, id=case.path.stem))
    return found


@pytest.mark.parametrize("case", chosen(misses=True))
def test_a_planted_fault_is_named(case: Case) -> None:
    """With its line and its ranks. One that is found is no known miss any more."""
    said = run(case.options, case.path)
    assert case.found(said.findings) == "named", said.output
    assert said.code == 1


@pytest.mark.parametrize("case", chosen())
def test_a_program_without_its_fault_is_silent(case: Case) -> None:
    said = run(case.options, case.path, "--fixed")
    assert (said.code, said.findings) == (0, []), said.output


def test_every_kind_has_five_programs() -> None:
    """Beside those that are made from public cases."""
    counts: dict[str, int] = {}
    for case in cases():
        if not case.path.name.startswith("public"):
            counts[case.kind] = counts.get(case.kind, 0) + 1
    assert {*counts.values()} == {5}


def test_known_misses_are_programs() -> None:
    assert {*KNOWN_MISSES} <= {case.path.name for case in cases()}
    assert all(KNOWN_MISSES.values())
    assert len(KNOWN_MISSES) <= 0.05 * len(cases())
