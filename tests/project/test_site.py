"""The checks of the built site find what is wrong; doctests of docstrings become code blocks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.project.site import HEAVIEST, faults

ROOT = Path(__file__).parents[2]
HEAD = (
    '<head><link rel="icon" href="logo.svg"><script src="assets/iframe-worker.js"></script></head>'
)
PAGE = '<h1 id="top">One</h1><a href="two.html#there">two</a><pre><code>&gt;&gt;&gt; 1</code></pre>'


def site(folder: Path, **pages: str) -> Path:
    """A small site without a fault, or with other pages."""
    given = {"index": PAGE, "two": '<p id="there">Two <a href="#there">here</a></p>', **pages}
    (folder / "search").mkdir()
    (folder / "assets").mkdir()
    (folder / "search" / "search_index.js").write_text("var __index = {}")
    (folder / "assets" / "iframe-worker.js").touch()
    (folder / "logo.svg").touch()
    for name, text in given.items():
        (folder / f"{name}.html").write_text(HEAD + text)
    return folder


def test_a_sound_site_has_no_faults(tmp_path: Path) -> None:
    assert faults(site(tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('<a href="none.html">x</a>', "links to none.html, which does not exist"),
        ('<a href="two.html#gone">x</a>', "links to two.html#gone, whose page has no such anchor"),
        ('<a href="#gone">x</a>', "links to #gone, whose page has no such anchor"),
        ('<img src="images/none.png">', "links to images/none.png, which does not exist"),
        ('<script src="https://example.org/x.js"></script>', "fetches https://example.org/x.js"),
        ("<p>&gt;&gt;&gt; 1 + 1</p>", "an example is text, not code: >>> 1 + 1"),
        (
            "<blockquote><blockquote><p>1 + 1</p></blockquote></blockquote>",
            "an example is text, not code: 1 + 1",
        ),
        ("x" * HEAVIEST, "bytes, expected at most"),
    ],
    ids=["page", "anchor", "own-anchor", "picture", "fetched", "prompt", "quotes", "weight"],
)
def test_a_fault_is_named_with_its_page(tmp_path: Path, text: str, fault: str) -> None:
    (found,) = faults(site(tmp_path, three=text))
    assert found.startswith("three.html: ") and fault in found


def test_links_to_other_sites_and_quotes_are_no_faults(tmp_path: Path) -> None:
    text = (
        '<a href="https://example.org">x</a><blockquote>said</blockquote><a href="mailto:a">a</a>'
    )
    assert faults(site(tmp_path, three=text)) == []


def test_search_needs_its_index_as_a_script_and_a_worker(tmp_path: Path) -> None:
    folder = site(tmp_path)
    (folder / "index.html").write_text(PAGE)
    (folder / "search" / "search_index.js").write_text("{}")
    assert len(faults(folder)) == 2
    (folder / "search" / "search_index.js").unlink()
    assert [fault.partition(":")[0] for fault in faults(folder)] == ["search/search_index.js"]


def test_a_folder_without_pages_is_a_fault(tmp_path: Path) -> None:
    assert faults(tmp_path) == [f"{tmp_path}: expected pages, and found none"]


def hook() -> ModuleType:
    """The extension that mkdocs.yml names; it needs griffe, of the extra docs."""
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("doctests", ROOT / "docs/hooks/doctests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("Adds.||>>> 1 + 1|2", "Adds.||```pycon|>>> 1 + 1|2|```"),
        ("Adds.|>>> 1|1||More.", "Adds.||```pycon|>>> 1|1|```||More."),
        (">>> 1|1||>>> 2|2", "```pycon|>>> 1|1||>>> 2|2|```"),
        ("- item|  >>> 1|  1", "- item||  ```pycon|  >>> 1|  1|  ```"),
        (">>> f()  # doctest: +SKIP|a|<BLANKLINE>|b", "```pycon|>>> f()|a||b|```"),
        ("```|>>> 1|```|text", "```|>>> 1|```|text"),
        ("```|x|```|>>> 1|1", "```|x|```||```pycon|>>> 1|1|```"),
        ("no example >>> here", "no example >>> here"),
    ],
    ids=["last", "text-after", "two", "in-a-list", "directive", "fenced", "after-a-fence", "none"],
)
def test_doctests_become_code_blocks(lines: str, expected: str) -> None:
    assert hook().fenced(lines.replace("|", "\n")).replace("\n", "|") == expected


def test_the_site_uses_the_extension_and_fetches_nothing() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert "extensions: [docs/hooks/doctests.py]" in text
    assert "  - offline\n" in text and "  font: false" in text
    assert "polyfills: [assets/javascripts/iframe-worker.js]" in text
