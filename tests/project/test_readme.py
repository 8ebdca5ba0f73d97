"""The consoles of the README and of the landing page show what the commands print."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.project.bugs_found import printed

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SESSION = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


def sessions(text: str) -> list[tuple[str, list[str]]]:
    """The commands of gpusim in a page's consoles, with the lines shown; `...` ends them.

    >>> sessions("```console\\n$ pip install x\\n$ gpusim info\\nversion\\n  ...\\n```\\n")
    [('gpusim info', ['version', '  ...'])]
    """
    found = [
        match.groups() for block in CONSOLE.finditer(text) for match in SESSION.finditer(block[1])
    ]
    return [(line, shown.splitlines()) for line, shown in found if line.startswith("gpusim ")]


CASES = [(page, *session) for page in PAGES for session in sessions(page.read_text())]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux")
@pytest.mark.parametrize(
    ("page", "command", "shown"), CASES, ids=[f"{case[0].stem}-{n}" for n, case in enumerate(CASES)]
)
def test_console_shows_what_the_command_prints(page: Path, command: str, shown: list[str]) -> None:
    code = int(shown[0].startswith("DIFFERENT"))
    lines = printed(command, code).splitlines()
    expected = shown[:-1] if shown[-1].strip() == "..." else shown
    assert lines[: len(expected)] == expected
    assert shown != expected or len(lines) == len(expected), "expected '...' for what is left out"


def test_the_readme_begins_with_a_bug_that_is_found() -> None:
    found = sessions(PAGES[0].read_text())
    assert [words[1] for words in (shlex.split(command) for command, _ in found)] == [
        "torchrun",
        "equal",
        "equal",
    ]
    first = PAGES[0].read_text().partition("## ")[0]
    assert "DIFFERENT: " in first and "EQUAL: " in first


def test_the_code_in_the_readme_is_that_of_the_program() -> None:
    first = PAGES[0].read_text().partition("## ")[0]
    (block,) = re.findall(r"^```py\n(.*?)^```$", first, re.MULTILINE | re.DOTALL)
    assert block in (ROOT / "examples" / "torchrun" / "partial_gradient.py").read_text()


def test_torch_comes_first_and_the_ipu_interfaces_last() -> None:
    for page in PAGES:
        heads = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
        areas = [
            head
            for head in heads
            if head in ("PyTorch", "JAX", "NumPy", "Numerics", "IPU interfaces")
        ]
        assert areas == ["PyTorch", "JAX", "NumPy", "Numerics", "IPU interfaces"], page.name


def test_every_page_is_in_the_navigation() -> None:
    listed = set(
        re.findall(
            r"- (?:[\w ]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
        )
    )
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == pages
