"""docs/check.md has a section for every kind, and the check finds what its programs have."""

from __future__ import annotations

import sys

import pytest

from gpusim.torch.distributed.checks.findings import KINDS
from tests.check.page import ELSEWHERE, IMPORTS, JOIN, LEAVE, PAGE, SNIPPETS, Snippet, spoken

TEXT = PAGE.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux")
@pytest.mark.parametrize(("kind", "snippet"), SNIPPETS.items(), ids=list(SNIPPETS))
def test_program_of_a_kind_has_it_alone(kind: str, snippet: Snippet) -> None:
    """And the page has what the check says of it."""
    said = snippet.run()
    assert [each["kind"] for each in said.findings] == [kind], said.output
    assert said.code == 1
    assert spoken(said.findings[0]) in TEXT


@pytest.mark.rule
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ELSEWHERE])
def test_page_has_a_section_for_every_kind(kind: str) -> None:
    _, heading, rest = TEXT.partition(f"\n### {kind}\n")
    assert heading
    section = rest.partition("\n### ")[0]
    assert SNIPPETS[kind].shown in section
    for words in KINDS[kind]:
        assert words in " ".join(section.split())


@pytest.mark.rule
def test_page_has_the_lines_that_programs_share() -> None:
    assert f"```py\n{IMPORTS}\n{JOIN}```" in TEXT
    assert LEAVE.strip() in TEXT
