"""The first state of a pair of runs that differs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DIFFERENT", "REFUSED", "SAME", "Finding", "Pair"]

SAME, DIFFERENT, REFUSED = "same", "different", "refused"


@dataclass(frozen=True)
class Finding:
    """A state that is another than in the run that was never interrupted.

    **Attributes**: `state`, its kind: weights, buffers, optimizer, groups (options of parameter
    groups, such as the learning rate), scheduler, scaler, random, data, steps, or saved (what the
    script saves besides); `name`, of the tensor or generator; `text`, a sentence; `rank`, of the
    resumed run; `step`, optimizer steps that are done, over both runs; `site`, file:line where it
    was loaded, if it was.
    """

    state: str
    name: str
    text: str
    rank: int | None = None
    step: int | None = None
    site: str = ""

    def as_json(self) -> dict[str, Any]:
        """As `--json` has it."""
        record = asdict(self)
        file, _, line = record.pop("site").rpartition(":")
        return record | {"file": file or None, "line": int(line) if line.isdigit() else None}


@dataclass(frozen=True)
class Pair:
    """A size at which was saved, and one at which it was resumed.

    **Attributes**: `verdict`, SAME, DIFFERENT or REFUSED; `findings`, the first state that differs
    of each kind, the first of all in front; `error`, of a run that was refused.
    """

    save: int
    load: int
    step: int
    verdict: str
    findings: tuple[Finding, ...] = ()
    error: str = ""

    @property
    def first(self) -> Finding | None:
        return self.findings[0] if self.findings else None

    def as_json(self) -> dict[str, Any]:
        """As `--json` has it."""
        record: dict[str, Any] = {"save": self.save, "load": self.load, "step": self.step}
        record |= {"verdict": self.verdict, "error": self.error or None}
        record["first"] = None if self.first is None else self.first.as_json()
        return record | {"findings": [each.as_json() for each in self.findings]}
