"""Makes code blocks of the doctests in docstrings, which Markdown would take for quotes in quotes.

An extension of griffe, which reads the docstrings for docs/reference; mkdocs.yml names it.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

__all__ = ["Doctests", "fenced"]

PROMPT = re.compile(r"( *)>>>( |$)")
FENCE = re.compile(r" *(```|~~~)")
DIRECTIVE = re.compile(r" *# *doctest: .*")


def fenced(text: str) -> str:
    """A docstring with a fence around each run of doctests.

    **Arguments**:

    - `text`: the docstring, without the indentation of its function.

    **Returns**: The text in Markdown. Directives such as `# doctest: +SKIP` are left out, and
    `<BLANKLINE>` is an empty line. Text that is in a fence already stays.
    """
    written: list[str] = []
    indent: str | None = None  # of the doctest that the line belongs to
    code = False
    for line in text.split("\n"):
        start = None if code else PROMPT.match(line)
        if start and indent is None:
            indent = start[1]
            if written[-2:] == [f"{indent}```", ""]:
                del written[-2]  # one block with the doctest above
            else:
                written += [""] * bool(written and written[-1]) + [f"{indent}```pycon"]
        if indent is not None and not line.strip():
            written.append(f"{indent}```")
            indent = None
        elif indent is None:
            code ^= bool(FENCE.match(line))
        else:
            line = DIRECTIVE.sub("", line)
            line = "" if line.strip() == "<BLANKLINE>" else line
        written.append(line)
    return "\n".join(written if indent is None else [*written, f"{indent}```"])


class Doctests(Extension):
    """Puts a fence around the doctests of each docstring that is read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
