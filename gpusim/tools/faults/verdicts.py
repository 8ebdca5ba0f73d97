"""The verdict of a run with faults, against two runs without."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .observations import Observation, Problem

__all__ = ["BAD", "VERDICTS", "Reference", "Verdict", "judge", "reference_of"]

VERDICTS = ("different", "hung", "unnamed", "named", "recovered", "no effect")
"""The verdicts, from the worst on."""

BAD = frozenset({"different", "hung", "unnamed"})
"""Those with which a program would not survive."""

LATE = re.compile(r"time[d]?[ -]?out|watchdog|expired", re.IGNORECASE)
"""Words of an error that names a wait that was too long."""

LOST = re.compile(
    r"closed by peer|connection (reset|refused|closed)|broken pipe|watchdog|time[d]?[ -]?out",
    re.IGNORECASE,
)
"""Words of an error that names a rank that is gone."""

WRONG = re.compile(
    r"\bnan\b|\binf\b|non-?finite|infinite|overflow|corrupt|checksum|crc|diverge|exploded|"
    r"unpickling|pickle|decode",
    re.IGNORECASE,
)
"""Words of an error that names values that are wrong."""

TORN = re.compile(
    r"corrupt|truncat|checksum|crc|EOF|no such file|not found|missing|metadata|"
    r"pytorchstreamreader|central directory|unpickling|pickle|decode|\.(pt|distcp|safetensors)",
    re.IGNORECASE,
)
"""Words of an error that names a file that is not whole."""

WORDS = {
    "exit": LOST,
    "kill": LOST,
    "raise": LOST,
    "hang": LATE,
    "late": LATE,
    "store-timeout": LATE,
    "torn": re.compile(f"{LOST.pattern}|{TORN.pattern}", re.IGNORECASE),
    "missing": re.compile(f"{LOST.pattern}|{TORN.pattern}", re.IGNORECASE),
    "flip": WRONG,
    "flip-result": WRONG,
    "nan": WRONG,
}
"""By kind of fault: words by which an error names its effect."""


class Verdict(NamedTuple):
    """A verdict, and why, in one sentence."""

    name: str
    why: str


@dataclass(frozen=True)
class Reference:
    """The results of the runs without faults, as far as they repeat.

    **Attributes**: `observation` has only what repeats; `changing` says in words what does not.
    """

    observation: Observation
    changing: tuple[str, ...] = ()


def reference_of(first: Observation, second: Observation) -> Reference:
    """Keep what two runs without faults have in common.

    >>> first, second = (Observation(0, lines={0: each, 1: "done"}) for each in ("2 s", "3 s"))
    >>> found = reference_of(first, second)
    >>> found.observation.lines, found.changing
    ({1: 'done'}, ('the last line of rank 0',))
    """
    changing: list[str] = []
    lines = {rank: line for rank, line in first.lines.items() if second.lines.get(rank) == line}
    changing += [f"the last line of rank {rank}" for rank in first.lines if rank not in lines]
    bits = {}
    for rank, own in first.bits.items():
        theirs = second.bits.get(rank, {})
        bits[rank] = {name: text for name, text in own.items() if theirs.get(name) == text}
        changing += [f"the {_NAMES[name]} of rank {rank}" for name in own if name not in bits[rank]]
    files = {name: text for name, text in first.files.items() if second.files.get(name) == text}
    changing += [f"the file {name}" for name in first.files if name not in files]
    kept = replace(first, lines=lines, bits=bits, files=files)
    return Reference(kept, tuple(changing))


_NAMES = {"weights": "weights", "states": "optimizer's state"}


def judge(reference: Reference, found: Observation, checked: bool = False) -> Verdict:
    """The verdict of a run.

    **Arguments**: `checked`: whether --check looked at the runs.
    """
    if not found.happened:
        return Verdict("no effect", "no fault happened")
    if found.expired:
        return Verdict("hung", "the run took too much of this machine's time, and was ended")
    if found.hung:
        return Verdict("hung", found.hung)
    new = [text for text in found.findings if text not in reference.observation.findings]
    if new:
        return Verdict("named", f"found by --check: {new[0]}")
    if found.code == 0 or (checked and not found.problems and _only_findings(reference, found)):
        other = _difference(reference.observation, found)
        if other:
            return Verdict("different", other)
        again = found.attempts - 1
        how = f" after {again} restart{'s' * (again > 1)}" if again else ""
        return Verdict("recovered", f"the bits of the run without faults{how}")
    return _named(found)


def _only_findings(reference: Reference, found: Observation) -> bool:
    """Whether the exit code is that of findings which the run without faults has too."""
    return found.code == 1 and bool(reference.observation.findings)


def _difference(usual: Observation, found: Observation) -> str:
    """The first thing that is different; empty if all is the same."""
    for name in ("weights", "states"):
        for rank, own in usual.bits.items():
            if name in own and found.bits.get(rank, {}).get(name) != own[name]:
                return f"the {_NAMES[name]} of rank {rank} differ" + "s" * (name == "states")
    for rank, line in usual.lines.items():
        if found.lines.get(rank) != line:
            return f"rank {rank} prints {found.lines.get(rank, '')!r:.120}, not {line!r:.120}"
    for file, text in usual.files.items():
        if found.files.get(file) != text:
            return f"the file {file} {'differs' if file in found.files else 'is not there'}"
    return ""


def _named(found: Observation) -> Verdict:
    """The verdict of a run that has ended with an error.

    The last start counts: its first failure is of a rank that a fault befell there, or the error
    says so, or says the effect. Else the report leads to something that is not the fault.
    """
    last = found.attempts - 1
    again = f"start {found.attempts} fails: " if last else ""
    root = _first(found.problems, last)
    for fault, site in found.happened:
        mine = root is not None and (root.rank, last) == (fault.rank, fault.attempt)
        if root is not None and mine:
            where = f" at {site}" if site else ""
            return Verdict("named", f"{again}rank {root.rank} {_short(root.how)}{where}")
    own = [each for each in found.problems if each.attempt == last and not each.by_agent]
    said = [f"rank {each.rank} {each.how} {each.message}" for each in own] + [found.error]
    for fault, _ in found.happened:
        for text in said:
            if match := WORDS[fault.kind].search(text):
                return Verdict("named", f"{again}{_short(text)} (it says {match[0]!r})")
    shown = next((_short(text) for text in said if text), _short(_last_line(found.output)))
    return Verdict("unnamed", f"{again}{shown or 'it ends without an error'}")


def _first(problems: Sequence[Problem], attempt: int) -> Problem | None:
    """The first failure of a start."""
    return next((p for p in problems if p.attempt == attempt and not p.by_agent), None)


def _short(text: str) -> str:
    """The first line of a text, cut."""
    line = next((each.strip() for each in text.splitlines() if each.strip()), "")
    return line if len(line) <= 160 else f"{line[:157]}..."


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
