"""Checks the built documentation: links, anchors, examples as code, search, and weight.

python -m tests.project.site site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["HEAVIEST", "Page", "faults"]

HEAVIEST = 500_000  # bytes of a page, which a phone loads and lays out
FETCHED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src")}
PROMPT = ">>>"
NOT_FETCHED = {"canonical", "next", "prev"}  # `rel` of links that a browser only notes
SERVED = {"404.html"}  # pages that only a server shows, with links from its root


class Page(HTMLParser):
    """The ids and links of a page, and what the browser would fetch from elsewhere.

    **Attributes**: `ids`, `links` (all, as they are written), `fetched` (with a scheme), and
    `prompts`, the text of elements outside of code that begins with Python's prompt.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.prompts: list[str] = []
        self.quotes = 0
        self.code = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        for name in ("href", "src"):
            link = given.get(name)
            if link is None:
                continue
            self.links.append(link)
            notes = tag == "link" and given.get("rel") in NOT_FETCHED
            if (tag, name) in FETCHED and urlsplit(link).netloc and not notes:
                self.fetched.append(link)
        self.code += tag in ("pre", "code")
        self.quotes += tag == "blockquote"

    def handle_endtag(self, tag: str) -> None:
        self.code -= tag in ("pre", "code")
        self.quotes -= tag == "blockquote"

    def handle_data(self, data: str) -> None:
        if self.quotes > 1 or (not self.code and data.lstrip().startswith(PROMPT)):
            self.prompts.append(" ".join(data.split())[:60])


def faults(site: Path) -> list[str]:
    """Return the faults of the pages of a folder, a line each."""
    paths = sorted(site.glob("**/*.html"))
    if not paths:
        return [f"{site}: expected pages, and found none"]
    pages = {path.resolve(): Page(path.read_text()) for path in paths}
    found: list[str] = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve()).as_posix()
        found += [f"{name}: fetches {link}" for link in page.fetched]
        found += [f"{name}: an example is text, not code: {text}" for text in page.prompts if text]
        if name not in SERVED:
            wrong = (broken(path, link, pages) for link in page.links)
            found += [f"{name}: {fault}" for fault in wrong if fault]
        if path.stat().st_size > HEAVIEST:
            found.append(f"{name}: {path.stat().st_size:,} bytes, expected at most {HEAVIEST:,}")
    return found + search_faults(site)


def broken(path: Path, link: str, pages: dict[Path, Page]) -> str:
    """Why a link of a page leads nowhere, or nothing."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return f"links to {link}, which does not exist"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return f"links to {link}, whose page has no such anchor"
    return ""


def search_faults(site: Path) -> list[str]:
    """Why search would not work in pages that are opened as files."""
    index = site / "search" / "search_index.js"
    if not index.exists():
        return ["search/search_index.js: missing: search needs a server (the plugin `offline`)"]
    text = (site / "index.html").read_text()
    found = []
    if not re.search(r'<script src="[^":]*iframe-worker[^":]*\.js"', text):
        found.append("index.html: has no iframe-worker of its own, which search needs in files")
    if not index.read_text().startswith("var __index"):
        found.append("search/search_index.js: expected 'var __index' at its start")
    return found


def main() -> int:
    found = faults(Path(sys.argv[1]))
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
