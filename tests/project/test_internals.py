"""The pages for contributors name files, functions and tests that exist, and packages all of them.

`file.py::Class.method` in these pages is looked up in the file, without importing it.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERNALS = sorted((ROOT / "docs" / "internals").glob("*.md"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
CONTRIBUTING = ROOT / "docs" / "contributing.md"
PAGES = [*INTERNALS, *sorted((ROOT / "docs" / "decisions").glob("*.md")), CONTRIBUTING]

NAMED = re.compile(r"`([\w./-]+\.(?:py|cuh?|h|md|toml))(?:::([\w.]+))?`")
"""A file in code font, and what is named in it."""

OWNERS = ("gpusim/", "fallback/", "tests/", "docs/", "bench/", "examples/", "pytest_gpusim.py")
"""Beginnings of paths from the repository's root. Other names are not looked up."""

PARTS = ("Context", "Decision", "Consequences", "What would change it")
"""The headings of a decision."""

#: Tests are run; other files of tests may have functions that tests of others run by name.
INVARIANT = re.compile(r"^\d+\. .*?(?=^\d+\. |\Z|^#|^$)", re.MULTILINE | re.DOTALL)


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """The classes, functions, methods and attributes that a file defines, with dots."""
    found: set[str] = set()
    nodes: list[tuple[str, ast.AST]] = [("", ast.parse(path.read_text()))]
    for owner, node in nodes:  # grows on the way
        for child in ast.iter_child_nodes(node):
            inner = owner
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(owner + child.name)
                inner = f"{owner}{child.name}."
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                for target in targets:
                    for each in ast.walk(target):
                        if isinstance(each, ast.Name):
                            found.add(owner + each.id)
                        elif isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
                            found.add(owner.rsplit(".", 2)[0] + f".{each.attr}")
            nodes.append((inner, child))
    return frozenset(found)


def wrong(text: str) -> list[str]:
    """The files and names in a text that do not exist.

    >>> wrong("`tests/project/test_internals.py::wrong`, `gpusim/none.py`, `none.py`")
    ['gpusim/none.py']
    """
    found = []
    for match in NAMED.finditer(text):
        path, name = ROOT / match[1], match[2]
        if not match[1].startswith(OWNERS):
            continue
        if not path.is_file() or (name and name not in names_in(path)):
            found.append(match[0].strip("`"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_what_a_page_names_exists(page: Path) -> None:
    assert wrong(page.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "`gpusim/none.py`",
        "`gpusim/maps/scheduler.py::Scheduler.none`",
        "`tests/project/test_internals.py::test_none`",
    ],
)
def test_what_does_not_exist_is_noticed(text: str) -> None:
    assert wrong(f"`gpusim/maps/scheduler.py::Scheduler.running` and {text}") == [text.strip("`")]


@pytest.mark.parametrize("page", INTERNALS, ids=lambda page: page.stem)
def test_a_page_begins_with_invariants_that_tests_hold(page: Path) -> None:
    if page.stem == "index":
        return
    _, heading, rest = page.read_text().partition("\n## Invariants\n")
    assert heading, f"{page.name}: expected a section Invariants"
    section = rest.partition("\n## ")[0]
    invariants = re.split(r"^(?=\d+\. )", section, flags=re.MULTILINE)[1:]
    assert invariants
    for each in invariants:
        assert "`tests/" in each and "::" in each, f"{page.name}: no test holds: {each}"


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_its_parts(page: Path) -> None:
    text = page.read_text()
    places = [text.find(f"**{part}.**") for part in PARTS]
    assert places == sorted(places) and places[0] > 0, f"{page.name}: expected {PARTS}"
    assert page.name in (page.parent / "index.md").read_text(), f"{page.name} is not in the index"


def test_the_map_names_all_packages() -> None:
    rows = re.findall(r"^\| (`.*?) \|", CONTRIBUTING.read_text(), re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]*)`", row)}
    packages = {
        str(path.parent.relative_to(ROOT))
        for path in (ROOT / "gpusim").glob("*/__init__.py")
        if not path.parent.is_symlink()  # fallback, which has a row by its own name
    }
    assert sorted(packages - named) == []


def test_the_map_of_tests_names_all_folders() -> None:
    text = CONTRIBUTING.read_text().partition("\n## Tests\n")[2].partition("\n## ")[0]
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert sorted(folders - set(re.findall(r"`(\w+)`", text))) == []
