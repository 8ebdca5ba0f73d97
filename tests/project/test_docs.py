"""The examples in README.md and docs/ run, and print what the pages show.

`python` blocks are executed and `pycon` blocks are compared. The blocks of a page share names.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from gpusim.popdist import backend

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```(python|pycon)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WING = ("poptorch", "popxl", "popxl-ops", "devices")
"""Pages of the reference that belong to the IPU interfaces."""
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def compare(page: Path, line: int, source: str, names: dict[str, object]) -> None:
    """Run a session; an AssertionError shows the differences."""
    name = f"{page.name}, line {line + 1}"  # unique, since doctest finds the sources by it
    test = doctest.DocTestParser().get_doctest(source, names, name, str(page), line)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    assert not report, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend, "_initialized", False)  # and is restored afterwards
    text = page.read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(2))
        if block[1] == "pycon":
            compare(page, line, block[2], names)
        else:
            exec(compile("\n" * line + block[2], page, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_pages_of_ipu_interfaces_are_the_last_section() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    sections = [section.split("\n") for section in re.split(r"^  - ", nav, flags=re.MULTILINE)]
    assert sections[-1][0] == "IPU interfaces:"
    listed = {line.strip(" -") for line in sections[-1][1:] if line}
    expected = {page.name for page in (ROOT / "docs").glob("*.md") if page.name.startswith("pop")}
    expected |= {"devices.md", "porting.md"}
    assert listed == expected | {f"reference/{name}.md" for name in WING}
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    wing = ["Devices", "PopDist", "PopTorch", "PopTorch experimental addons", "PopXL"]
    assert headings[-len(wing) :] == wing


def test_readme_gives_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text
