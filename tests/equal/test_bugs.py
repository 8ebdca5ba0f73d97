"""Every silent bug is found by `gpusim equal`, and no correct configuration is called wrong."""

from __future__ import annotations

import sys

import pytest

from tests.equal.__main__ import judge, said
from tests.equal.bug import Bug
from tests.equal.cases import BUGS, CORRECT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux")


def name_of(program: str, ranks: int) -> str:
    """A program with its options, in a few words.

    >>> name_of("zero.py --stage 1 --bug norms-added", 3)
    'zero stage 1, norms-added, on 3'
    """
    options, _, bug = program.partition(" --bug ")
    words = options.replace(".py", "").replace("--", "").strip()
    return ", ".join(filter(None, (words, bug, f"on {ranks}")))


@pytest.mark.parametrize("bug", BUGS, ids=[name_of(bug.command, bug.ranks) for bug in BUGS])
def test_bug_is_found(bug: Bug) -> None:
    """At its place, the next, or elsewhere; with a reason, and the exit code of a difference."""
    found = said(bug.command, bug.ranks)
    assert judge(bug, found) in ("right", "elsewhere"), found["output"]
    assert found["first"]["reason"] and found["first"]["text"]
    assert found["output"].startswith("DIFFERENT: ")


@pytest.mark.parametrize(
    ("program", "ranks"), CORRECT, ids=[name_of(program, ranks) for program, ranks in CORRECT]
)
def test_correct_program_is_equal(program: str, ranks: int) -> None:
    found = said(program, ranks)
    assert found["code"] == 0, found["output"]
    assert found["equal"] is True and found["first"] is None
    assert found["related"] > 20
