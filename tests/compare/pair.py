"""A planted pair of runs: one program, one edit at a marked line, and the cause that is expected.

A line of a program that ends in `# @NAME` is marked. An edit replaces the text of such a line, so
that the place of the edit is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

__all__ = ["MARKED", "PROGRAMS", "Effect", "Made", "Pair", "edited"]

PROGRAMS = Path(__file__).parent / "programs"
MARKED = re.compile(r"^(?P<indent> *)(?P<text>.*?) *# @(?P<name>\w+)$")


@dataclass(frozen=True)
class Made:
    """How a run is made: simulated with a reduction, or by real processes of gloo."""

    ranks: int = 4
    reduction: str = "gloo-ring"
    real: bool = False

    def __str__(self) -> str:
        return f"{'gloo' if self.real else self.reduction} on {self.ranks}"


@dataclass(frozen=True)
class Effect:
    """Where an edit first changes data: the `nth` time that the marked line runs on `ranks`.

    `ranks` is empty for all ranks. `other` is the place in run b, where that is another.
    """

    mark: str
    nth: int = 0
    ranks: tuple[int, ...] = ()
    other: tuple[str, int] | None = None

    def in_run(self, name: str) -> Effect:
        """The effect in run a or b."""
        if name == "a" or self.other is None:
            return self
        return replace(self, mark=self.other[0], nth=self.other[1])


@dataclass(frozen=True)
class Pair:
    """Two runs of a program, of which b has the edit, and the classes of cause that are right.

    **Attributes**:

    - `program`: a file of `programs`, or the path of another.
    - `classes`: those that are right; none for a pair that is equal.
    - `edit`: the new text of marked lines in b; an empty text removes the line.
    - `effect`: where the edit first changes data; None if the runs are of one text, and the
      first call whose results differ is the cause.
    - `both`: edits of both runs.
    - `claims`: fields of the cause that JSON has to have, such as its factor.
    """

    name: str
    says: str
    program: str
    classes: tuple[str, ...] = ()
    edit: Mapping[str, str] = field(default_factory=dict)
    effect: Effect | None = None
    a: Made = Made()
    b: Made = Made()
    both: Mapping[str, str] = field(default_factory=dict)
    claims: Mapping[str, object] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether the runs have to be equal."""
        return not self.classes

    @property
    def real(self) -> bool:
        """Whether one of the runs is made by real processes."""
        return self.a.real or self.b.real

    def texts(self) -> tuple[str, str]:
        """The programs of both runs."""
        base = edited((PROGRAMS / self.program).read_text(), self.both)
        return base, edited(base, self.edit)


def edited(program: str, edits: Mapping[str, str]) -> str:
    """A program whose marked lines have another text, of one line or several; the marks stay.

    **Raises**: KeyError if the program lacks a mark, or has one twice.

    >>> print(edited("for x in y:\\n    z = 1  # @z\\n", {"z": "z = 2"}), end="")
    for x in y:
        z = 2  # @z
    """
    lines, done = program.splitlines(), set()
    for number, line in enumerate(lines):
        found = MARKED.match(line)
        if found is None or found["name"] not in edits:
            continue
        if found["name"] in done:
            raise KeyError(f"the mark {found['name']} stands twice")
        done.add(found["name"])
        lines[number] = "\n".join(
            f"{found['indent']}{part}  # @{found['name']}"
            if part
            else f"{found['indent']}# @{found['name']}"
            for part in edits[found["name"]].split("\n")
        )
    if missing := edits.keys() - done:
        raise KeyError(f"the program lacks the marks {sorted(missing)}")
    return "\n".join(lines) + "\n"
