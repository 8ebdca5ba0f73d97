"""An observation: all that is kept of one run of a campaign."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpusim.torch.distributed.faults.plans import Fault
from gpusim.torch.distributed.faults.watching import Seen

__all__ = ["Observation", "Problem", "read_observation", "short_site"]

LARGEST = 1 << 28
"""The most bytes of a file that a run has left for the campaign."""


@dataclass(frozen=True)
class Problem:
    """A rank that has ended badly, in one start of the ranks."""

    attempt: int
    rank: int
    how: str
    message: str
    by_agent: bool = False


@dataclass(frozen=True)
class Observation:
    """One run.

    **Attributes**: `code` is the command's exit code; `happened` the faults that happened, and
    where; `problems` the ranks that have ended badly, by start; `attempts` how many starts there
    were; `hung` says why no rank could go on, and `error` is gpusim's own that ended all;
    `findings` are the check's; `output` is the end of all output; `lines` have the last line on
    each rank's standard output; `bits` are digests of each rank's weights and optimizer states;
    `files` are digests by name; `expired` says that the run was ended as it took too much of this
    machine's time; `seen`, `modules` and `sources` are there if counts were asked for.
    """

    code: int
    happened: tuple[tuple[Fault, str], ...] = ()
    problems: tuple[Problem, ...] = ()
    attempts: int = 1
    hung: str = ""
    error: str = ""
    findings: tuple[str, ...] = ()
    output: str = ""
    lines: dict[int, str] = field(default_factory=dict)
    bits: dict[int, dict[str, str]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    expired: bool = False
    seconds: float = 0.0
    seen: tuple[Seen, ...] = ()
    modules: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


def read_observation(folder: Path, ranks: int, code: int) -> Observation:
    """Read the files of one run.

    A run that was killed has left some of them.
    """
    left = _json(folder / "left.json", {})
    own = {rank: _json(folder / f"rank-{rank}.json", {}) for rank in range(ranks)}
    # A rank that ended well in a start that failed has left a file too.
    bits = {
        rank: {name: str(found[name]) for name in ("weights", "states")}
        for rank, found in own.items()
        if "weights" in found
    }
    seen = tuple(_seen(found["seen"], folder) for found in own.values() if "seen" in found)
    return Observation(
        code,
        _happened(folder / "happened.jsonl"),
        tuple(Problem(**each) for each in left.get("problems", ())),
        left.get("attempts", 1),
        left.get("hung", ""),
        left.get("error", ""),
        tuple(left.get("findings", ())),
        left.get("output", ""),
        {int(rank): line for rank, line in left.get("lines", {}).items()},
        bits,
        left.get("files", {}),
        seconds=left.get("seconds", 0.0),
        seen=seen if len(seen) == ranks else (),
        modules=_names("modules", left, *own.values()),
        sources=_names("sources", *own.values()),
    )


def _names(key: str, *rows: dict[str, Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for row in rows for name in row.get(key, ())))


def _seen(found: dict[str, Any], folder: Path) -> Seen:
    """The calls, files and waits of a rank, files by their names in the run's folder."""
    own = f"{os.path.realpath(folder.parent)}{os.sep}"
    names = [name.removeprefix(own).removeprefix(f"own{os.sep}") for name in found["writes"]]
    return Seen(found["calls"], names, found["waits"])


def _happened(path: Path) -> tuple[tuple[Fault, str], ...]:
    found: dict[Fault, str] = {}
    for line in _text(path).splitlines():
        row: dict[str, Any] = json.loads(line)
        found.setdefault(Fault(**row["fault"]), short_site(row["site"]))
    return tuple(found.items())


def short_site(site: str) -> str:
    """A place in a program, or a file, by the last two parts of its path.

    >>> short_site("/home/me/run/train.py:12")
    'run/train.py:12'
    """
    return "/".join(site.split("/")[-2:])


def _json(path: Path, missing: Any) -> Any:
    text = _text(path)
    return json.loads(text) if text else missing


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(LARGEST)
    except FileNotFoundError:
        return ""
