"""Every program with a bug is found by `gpusim resume`, and no correct one raises an alarm."""

from __future__ import annotations

import sys

import pytest

from tests.resume.__main__ import judge, said
from tests.resume.case import Case
from tests.resume.cases import BUGS, CORRECT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux")

#: Bugs that are not found yet: buffers of other ranks than the first are not compared.
MISSED = ("batch_norm.py --bug statistics-of-rank-0",)


def sampled(cases: tuple[Case, ...]) -> list[object]:
    """The cases, of which all but each fifth, and those of many pairs, are slow."""
    return [
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.slow] * bool(number % 5 or len(case.load) > 2)
            + [pytest.mark.xfail(strict=True)] * (case.program in MISSED),
        )
        for number, case in enumerate(cases)
    ]


@pytest.mark.parametrize("case", sampled(BUGS))
def test_bug_is_found(case: Case) -> None:
    """In the pairs where it acts and in no other, with a text, and a difference's exit code."""
    found = said(case)
    assert judge(case, found) in ("right", "elsewhere"), found["output"]
    assert found["code"] == 1
    for pair in found["pairs"]:
        assert (pair["first"] is not None) == (pair["verdict"] == "different")


@pytest.mark.parametrize("case", sampled(CORRECT))
def test_correct_program_raises_no_alarm(case: Case) -> None:
    found = said(case)
    assert judge(case, found) == "right", found["output"]


def test_cases_say_what_is_published() -> None:
    """At least six bugs are published ones; each case with a bug names a state, and is found."""
    assert len({case.source for case in BUGS if case.source != "common"}) >= 6
    for case in BUGS:
        assert case.wrong and case.at and case.says
    assert len({case.name for case in (*BUGS, *CORRECT)}) == len(BUGS) + len(CORRECT)
