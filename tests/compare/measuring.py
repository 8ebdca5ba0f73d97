"""A pair from its programs to its verdict: two records, two truths, and the comparison."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.compare import making
from tests.compare.judging import Judged, Said, judge
from tests.compare.pair import Made, Pair
from tests.compare.truth import Truth, calls_of, instrumented, truth_of

__all__ = ["Measured", "Workshop"]


@dataclass
class Measured:
    """A pair's outcome."""

    name: str
    judged: Judged | None
    seconds: float
    text: str = ""
    error: str = ""
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def word(self) -> str:
        return "failed" if self.judged is None else self.judged.word

    def plain(self) -> dict[str, Any]:
        """The outcome for JSON, without the rows of the comparison."""
        more = {"word": self.word, "judged": self.judged and asdict(self.judged)}
        return {**vars(self), **more, "found": {**self.found, "rows": None}}


class Workshop:
    """A folder of runs; each text is run once in each way, also by several workshops."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def measure(self, pair: Pair) -> Measured:
        """Make both runs, learn the truth, compare, and judge."""
        begin = time.monotonic()
        said = None
        try:
            texts = dict(zip("ab", pair.texts(), strict=True))
            made = {"a": pair.a, "b": pair.b}
            file = Path(pair.program).name
            records = {name: self.record(texts[name], file, made[name]) for name in "ab"}
            truths = {}
            if pair.effect is not None:
                for name in "ab":
                    marks = frozenset({pair.effect.in_run(name).mark})
                    truths[name] = self.truth(texts[name], file, made[name], marks, records[name])
            said = self.compare(records["a"], records["b"])
            judged = judge(pair, said, records, truths)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            seconds = time.monotonic() - begin
            return Measured(pair.name, None, seconds, said.text if said else "", text)
        seconds = time.monotonic() - begin
        return Measured(pair.name, judged, seconds, said.text, "", dict(said.found))

    def record(self, text: str, file: str, made: Made) -> Path:
        """The record of a program."""
        return self._once((text, file, made), lambda own: making.record(text, file, made, own))

    def truth(self, text: str, file: str, made: Made, marks: frozenset[str], record: Path) -> Truth:
        """Where the marks of a program are; simulated, also of a real run.

        **Raises**: ValueError if the program makes other calls with marks than without.
        """
        marked = self.record(instrumented(text, marks), file, Made(made.ranks, made.reduction))
        truth = truth_of(marked, marks)
        own = {rank: len(calls) for rank, calls in calls_of(record).items()}
        if own != {rank: len(clocks) for rank, clocks in truth.clocks.items()}:
            raise ValueError(f"{file}: other calls with marks than without: {own}")
        return truth

    def compare(self, a: Path, b: Path) -> Said:
        """Compare two records: the answer of `gpusim compare` as text and as JSON."""
        own = self.folder / "compare"
        own.mkdir(exist_ok=True)
        code, text = making.command(["compare", str(a), str(b)], own)
        json_code, output = making.command(["compare", str(a), str(b), "--json"], own)
        if {code, json_code} - {0, 1}:
            raise RuntimeError(f"codes {code} and {json_code}\n{text}")
        return Said(json.loads(output), text, (code, json_code))

    def _once(self, key: Any, make: Callable[[Path], Path]) -> Path:
        own = self.folder / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        whole = own / "whole"  # written last
        if not whole.exists():
            shutil.rmtree(own, ignore_errors=True)
            whole.write_text(make(own).name)
        return own / whole.read_text()
