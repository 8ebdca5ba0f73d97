"""The results as JSON, and as the table of docs/frameworks.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.frameworks.rows import ABSENT, Row

__all__ = ["Case", "page", "read", "table", "write"]

BEGIN, END = "<!-- make frameworks -->", "<!-- end -->"
#: Outcomes that are as they should be.
GOOD = ("equal", "ran", "as one rank")


@dataclass(frozen=True)
class Case:
    """The outcome of a row on a number of ranks.

    **Attributes**: `outcome`: 'equal' to gloo in every bit, 'ran' where gloo does not run it,
    'as one rank' where the values are those of one rank, else 'differs' or 'failed', with the
    `cause`; `machine`, a digest of what the bits may depend on, the processor and the versions of
    all packages; `digest` of all that the simulated ranks wrote; seconds and megabytes of gloo, if
    it ran, and of gpusim.
    """

    family: str
    package: str
    version: str
    what: str
    program: str
    ranks: int
    outcome: str
    cause: str
    steps: int
    machine: str
    digest: str
    seconds: tuple[float | None, float]
    megabytes: tuple[float | None, float]

    @property
    def key(self) -> tuple[str, int]:
        return self.program, self.ranks


def read(file: Path) -> tuple[dict[str, object], dict[tuple[str, int], Case]]:
    """Return what is known of the machine, and the cases of a file; nothing if there is none."""
    if not file.exists():
        return {}, {}
    told = json.loads(file.read_text())
    cases = [
        Case(**each | {name: tuple(each[name]) for name in ("seconds", "megabytes")})
        for each in told["cases"]
    ]
    return told["machine"], {case.key: case for case in cases}


def write(file: Path, machine: Mapping[str, object], cases: Iterable[Case]) -> None:
    """Write the cases, a line each."""
    lines = ",\n".join(json.dumps(asdict(case)) for case in cases)
    part = file.with_suffix(".part")
    part.write_text(f'{{"machine": {json.dumps(machine)},\n"cases": [\n{lines}\n]}}\n')
    part.rename(file)


def page(file: Path, text: str) -> None:
    """Put a table into a page, between its two marks.

    **Raises**: ValueError without the marks.
    """
    before = file.read_text()
    inner = re.compile(f"(?<={re.escape(BEGIN)}\n).*(?={re.escape(END)})", re.DOTALL)
    if not inner.search(before):
        raise ValueError(f"{file} lacks the lines {BEGIN} and {END}")
    file.write_text(inner.sub(lambda _: f"\n{text}\n\n", before))


def table(rows: Sequence[Row], cases: Mapping[tuple[str, int], Case]) -> str:
    """Return the summary by family and the table of all cases, as Markdown."""
    known = [
        replace(cases[row.program, ranks], family=row.family, what=row.what)
        for row in rows
        for ranks in (*row.ranks, *row.scale)
        if (row.program, ranks) in cases
    ]
    return "\n".join([*_summary(known), "", *_whole(known)])


def _summary(cases: Sequence[Case]) -> list[str]:
    lines = ["| framework | version | programs | on ranks | result |", "|---|---|---|---|---|"]
    for family in dict.fromkeys(case.family for case in cases):
        own = [case for case in cases if case.family == family]
        versions = dict.fromkeys(f"{case.package} {case.version}" for case in own)
        counts = {
            outcome: sum(case.outcome == outcome for case in own)
            for outcome in dict.fromkeys(case.outcome for case in own)
        }
        ranks = ", ".join(map(str, sorted({case.ranks for case in own})))
        programs = len({case.program for case in own})
        result = ", ".join(f"{count} {_words(outcome)}" for outcome, count in counts.items())
        lines.append(f"| {family} | {', '.join(versions)} | {programs} | {ranks} | {result} |")
    lines += [f"| {family} | | 0 | | not run: {cause} |" for family, cause in ABSENT.items()]
    return lines


def _whole(cases: Sequence[Case]) -> list[str]:
    lines = [
        "| framework | program | ranks | steps | result | s: gloo, gpusim | MB: gloo, gpusim |",
        "|---|---|---|---|---|---|---|",
    ]
    family = ""
    for case in cases:
        first = "" if case.family == family else case.family
        family = case.family
        cause = f": {case.cause}".replace("|", "\\|") if case.cause else ""
        lines.append(
            f"| {first} | {case.what}, `{case.program}` | {case.ranks} | {case.steps}"
            f" | {_words(case.outcome)}{cause} | {_pair(case.seconds)} | {_pair(case.megabytes)} |"
        )
    return lines


def _words(outcome: str) -> str:
    words = {"equal": "equal to gloo", "as one rank": "equal to one rank", "ran": "ran"}
    return words.get(outcome, f"**{outcome}**")


def _pair(figures: tuple[float | None, float]) -> str:
    """
    >>> _pair((None, 7.4)), _pair((3.2, 1234.0))
    ('–, 7', '3, 1234')
    """
    return ", ".join("–" if figure is None else f"{figure:.0f}" for figure in figures)
