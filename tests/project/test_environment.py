"""The documentation's tables have every variable GPUSIM_* that is read, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "commands.md"
VARIABLE = re.compile(r"GPUSIM_[A-Z0-9_]*[A-Z0-9]")
ROW = re.compile(r"^\| `(GPUSIM_[A-Z0-9_]+)` \|.*\| ([^|]+) \|$", re.MULTILINE)
INTERNAL = {"GPUSIM_ACTIVITY", "GPUSIM_HUB", "GPUSIM_TEST_REPORTS"}
"""Those that gpusim sets for processes that it starts."""


def sources() -> Iterator[Path]:
    for folder in ("gpusim", "fallback"):
        for path in (ROOT / folder).rglob("*"):
            if "__pycache__" not in path.parts and path.is_file():
                yield path
    yield ROOT / "pytest_gpusim.py"


def read_by(path: Path) -> set[str]:
    """The variables that a file names as a whole text, as what looks one up does.

    Texts that say something of a variable, and names in Python, are others.

    Files in other languages: every text between quotation marks.
    """
    if path.suffix != ".py":
        text = path.read_text(errors="replace")
        return set(re.findall(rf"[\"']({VARIABLE.pattern})[\"']", text))
    return {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and VARIABLE.fullmatch(node.value)
    }


def test_the_tables_have_all_variables_that_are_read() -> None:
    readers: dict[str, set[str]] = {}
    for path in sources():
        for name in read_by(path):
            readers.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    settings, internal = (
        PAGE.read_text().split("## Environment variables")[1].split("not\nsettings")
    )
    rows = {name: set(re.findall(r"`([^`]+)`", by)) for name, by in ROW.findall(settings)}
    ours = {name: set(re.findall(r"`([^`]+)`", by)) for name, by in ROW.findall(internal)}
    assert rows.keys() & ours.keys() == set() and ours.keys() == INTERNAL
    assert readers.keys() == rows.keys() | ours.keys()
    for name, named in (rows | ours).items():
        # gpusim/fallback is a link to fallback.
        found = {path.replace("gpusim/fallback/", "fallback/") for path in readers[name]}
        assert named <= found, (name, named, found)


def test_a_variable_is_told_from_what_is_said_of_it(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text(
        'import os\nA = "GPUSIM_ONE"\nos.environ.get("GPUSIM_TWO")\nGPUSIM_MODULES = 1\n'
        'print("GPUSIM_THREE says", f"{A}=1", "GPUSIM_")\n'
    )
    assert read_by(source) == {"GPUSIM_ONE", "GPUSIM_TWO"}
    other = tmp_path / "x.c"
    other.write_text('char *a = getenv("GPUSIM_FOUR"); // GPUSIM_FIVE\n')
    assert read_by(other) == {"GPUSIM_FOUR"}
