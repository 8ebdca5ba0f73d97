"""The tables of bugs and of correct configurations are sound; no program runs."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator

from tests.equal.__main__ import PROGRAMS
from tests.equal.cases import BUGS, CORRECT
from tests.equal.test_bugs import name_of

LEAST_BUGS, LEAST_CORRECT = 40, 30


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
