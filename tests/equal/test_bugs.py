"""Every silent bug is found by `gpusim equal`, and no correct configuration is called wrong."""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Iterator

import pytest

from tests.equal.__main__ import PROGRAMS, judge, said
from tests.equal.bug import Bug
from tests.equal.cases import BUGS, CORRECT

linux = pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux")
LEAST_BUGS, LEAST_CORRECT = 40, 30


def name_of(program: str, ranks: int) -> str:
    """A program with its options, in a few words.

    >>> name_of("zero.py --stage 1 --bug norms-added", 3)
    'zero stage 1, norms-added, on 3'
    """
    options, _, bug = program.partition(" --bug ")
    words = options.replace(".py", "").replace("--", "").strip()
    return ", ".join(filter(None, (words, bug, f"on {ranks}")))


@linux
@pytest.mark.parametrize("bug", BUGS, ids=[name_of(bug.command, bug.ranks) for bug in BUGS])
def test_bug_is_found(bug: Bug) -> None:
    """At its place, the next, or elsewhere; with a reason, and the exit code of a difference."""
    found = said(bug.command, bug.ranks)
    assert judge(bug, found) in ("right", "elsewhere"), found["output"]
    assert found["first"]["reason"] and found["first"]["text"]
    assert found["output"].startswith("DIFFERENT: ")


@linux
@pytest.mark.parametrize(
    ("program", "ranks"), CORRECT, ids=[name_of(program, ranks) for program, ranks in CORRECT]
)
def test_correct_program_is_equal(program: str, ranks: int) -> None:
    found = said(program, ranks)
    assert found["code"] == 0, found["output"]
    assert found["equal"] is True and found["first"] is None
    assert found["related"] > 20


# ---------------------------------------------------------------- the tables


def literals(program: str) -> tuple[set[str], set[str]]:
    """The bugs that a program knows, and its options, from its source."""
    bugs: set[str] = set()
    names = {"--steps", "--bug"}
    for node in ast.walk(ast.parse((PROGRAMS / program).read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BUGS":
            bugs |= set(ast.literal_eval(node.value))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("options"):
            names |= {f"--{keyword.arg}" for keyword in node.keywords}
    return bugs, names


def commands() -> Iterator[list[str]]:
    for program in [bug.command for bug in BUGS] + [program for program, _ in CORRECT]:
        yield shlex.split(program)


def test_tables_are_long_enough() -> None:
    assert len(BUGS) >= LEAST_BUGS and len(CORRECT) >= LEAST_CORRECT


def test_names_are_unique() -> None:
    names = [name_of(bug.command, bug.ranks) for bug in BUGS]
    assert len(set(names)) == len(names)
    names = [name_of(program, ranks) for program, ranks in CORRECT]
    assert len(set(names)) == len(names)


def test_programs_exist_and_know_their_options() -> None:
    for script, *arguments in commands():
        assert (PROGRAMS / script).is_file()
        bugs, names = literals(script)
        assert {word for word in arguments if word.startswith("--")} <= names, script
        for option, value in zip(arguments[::2], arguments[1::2], strict=True):
            assert value in bugs if option == "--bug" else value.isdigit()


def test_every_bug_of_a_program_is_in_the_table() -> None:
    listed: dict[str, set[str]] = {}
    for bug in BUGS:
        listed.setdefault(bug.program, set()).add(bug.bug)
    for program, bugs in listed.items():
        assert literals(program)[0] == bugs, program


def test_bugs_say_what_and_where_they_are() -> None:
    for bug in BUGS:
        assert bug.ranks > 1 and bug.at, bug
        assert bug.says.endswith(".") and bug.source, bug


def test_each_program_of_a_bug_has_a_correct_configuration() -> None:
    correct = {program.split()[0] for program, _ in CORRECT}
    assert {bug.program for bug in BUGS} <= correct
