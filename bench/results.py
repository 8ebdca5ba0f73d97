"""The results of a run, and their JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cases import Case, size_name
from bench.timing import Timing
from gpusim.files import atomic_write

SCHEMA = 1
OURS = "gpusim"
LIMIT = "memory limit"
ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class Entry:
    """One participant in one case: its seconds, or the problem."""

    name: str
    timing: Timing | None = None
    problem: str | None = None
    #: How its result compares with the exact one: "equal" to gpusim's bits, or how far off.
    agreement: str | None = None


@dataclass(frozen=True)
class Outcome:
    """A case and all who took part in it."""

    case: Case
    entries: dict[str, Entry]
    load: float | None
    extra_bytes: int | None = None  # gpusim's peak memory beyond the inputs
    kernels: str | None = None  # gpusim's: "compiled" or "numpy"

    def seconds(self, name: str) -> float | None:
        """A participant's fastest call."""
        entry = self.entries.get(name)
        return entry.timing.min if entry and entry.timing else None

    def ratio(self, name: str, over: str = OURS, by: str = "min") -> float | None:
        """How many times as long `name` takes as `over`."""
        above, below = self.entries.get(name), self.entries.get(over)
        if above is None or below is None or above.timing is None or below.timing is None:
            return None
        numerator: float = getattr(above.timing, by)
        denominator: float = getattr(below.timing, by)
        return numerator / denominator if denominator else math.inf


@dataclass(frozen=True)
class Overhead:
    """The microseconds of an operation; None after a failure, which the note describes."""

    name: str
    microseconds: float | None
    note: str = ""


@dataclass(frozen=True)
class Exchange:
    """A collective over the instances of a World, beside raw MPI's on the same data.

    **Attributes**:

    - `order`: of a sum; else empty.
    - `instances`: their number.
    - `held`: how many replicas each of them holds.
    - `elements`: of a replica's float32 value.
    - `ours`, `raw`: the slowest instance's time, of a call that all begin together.
    - `problem`: the reason if there are no times.
    """

    collective: str
    order: str
    instances: int
    held: int
    elements: int
    ours: Timing | None = None
    raw: Timing | None = None
    problem: str | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> Exchange:
        """The inverse of `dataclasses.asdict`."""
        timings = {name: given[name] and Timing(**given[name]) for name in ("ours", "raw")}
        return cls(**(given | timings))

    def ratio(self, by: str = "min") -> float | None:
        """How many times as long as raw MPI it takes."""
        if self.ours is None or self.raw is None:
            return None
        ours: float = getattr(self.ours, by)
        raw: float = getattr(self.raw, by)
        return ours / raw if raw else math.inf

    def __str__(self) -> str:
        what = " ".join(part for part in (self.collective, self.order) if part)
        return f"{what}, {self.instances} instances of {size_name((self.held, self.elements))}"


@dataclass(frozen=True)
class Training:
    """A step of training on simulated replicas, beside plain PyTorch's.

    **Attributes**:

    - `replicas`: their number.
    - `batch`: samples of each of them.
    - `ours`: all replicas in lockstep.
    - `model`: the same as a trainingModel; None for more replicas than one may have.
    - `loop`: one replica after the other.
    - `whole`: all samples as one batch, which has no gradients of replicas: the limit.
    - `problem`: the reason if there are no times.
    """

    replicas: int
    batch: int
    ours: Timing | None = None
    model: Timing | None = None
    loop: Timing | None = None
    whole: Timing | None = None
    problem: str | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> Training:
        """The inverse of `dataclasses.asdict`."""
        names = ("ours", "model", "loop", "whole")
        return cls(**given | {name: given[name] and Timing(**given[name]) for name in names})

    def ratio(self, name: str = "loop", over: str = "ours") -> float | None:
        """How many times as long as `over` another way takes."""
        other: Timing | None = getattr(self, name)
        ours: Timing | None = getattr(self, over)
        return other.min / ours.min if other and ours else None


@dataclass(frozen=True)
class Start:
    """The seconds of a process's first psum by a compiled kernel.

    **Attributes**:

    - `variant`: of the sum.
    - `cold_import`, `cold`: of `import gpusim` and of the psum, with an empty cache.
    - `later_import`, `later`: the same, of the fastest process that found the kernel in the cache.
    - `problem`: the reason if there are no times, which are then 0.
    """

    variant: str
    cold_import: float = 0.0
    cold: float = 0.0
    later_import: float = 0.0
    later: float = 0.0
    problem: str | None = None


@dataclass(frozen=True)
class SmallCall:
    """A call on small arrays, whose time is mostly dispatch.

    **Attributes**:

    - `before`: the Python calls that it made in an older checkout.
    - `calls`: the Python calls that it makes.
    - `ours`, `numpy`, `old`: by gpusim, by one NumPy call, and by the older checkout.
    - `problem`: the reason if there are no times.
    """

    name: str
    before: int
    calls: int | None = None
    ours: Timing | None = None
    numpy: Timing | None = None
    old: Timing | None = None
    problem: str | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> SmallCall:
        """The inverse of `dataclasses.asdict`."""
        names = ("ours", "numpy", "old")
        return cls(**given | {name: given[name] and Timing(**given[name]) for name in names})

    def ratio(self, over: str) -> float | None:
        """How many times as long gpusim takes as `over`."""
        other: Timing | None = getattr(self, over)
        return self.ours.min / other.min if other and self.ours else None


@dataclass(frozen=True)
class RanksCase:
    """A step of a torch.distributed program on simulated ranks.

    **Attributes**:

    - `case`, `ranks`: the program of `bench.ranks_program`, and on how many ranks it runs.
    - `timings`: of a step, by participant: "turns" and "free" are gpusim's, "threaded" and
      "LocalTensor" PyTorch's.
    - `problems`: why a participant has no timing.
    - `load`: the machine's before.
    """

    case: str
    ranks: int
    timings: dict[str, Timing] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    load: float | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> RanksCase:
        """The inverse of `dataclasses.asdict`."""
        timings = {name: Timing(**timing) for name, timing in given["timings"].items()}
        return cls(**given | {"timings": timings})

    def ratio(self, name: str, over: str = "turns", by: str = "min") -> float | None:
        """How many times as long `name` takes as `over`."""
        above, below = self.timings.get(name), self.timings.get(over)
        if above is None or below is None:
            return None
        ratio: float = getattr(above, by) / getattr(below, by)
        return ratio

    def __str__(self) -> str:
        return f"{self.case} on {self.ranks} ranks"


@dataclass(frozen=True)
class Verdict:
    """A target and its measurement; `met` is None without one."""

    description: str
    ratio: float | None
    target: str
    met: bool | None
    basis: str = ""


#: The fields of a file that describe its run.
ABOUT = (
    "machine", "started", "load_before", "load_after", "seconds", "bandwidth", "interrupted"
)  # fmt: skip


@dataclass
class Results:
    """All results of a run."""

    machine: dict[str, Any]
    started: str
    load_before: float | None = None
    load_after: float | None = None
    seconds: float = 0.0
    bandwidth: float | None = None  # bytes read and written in a second, by the fastest copy
    interrupted: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    overheads: list[Overhead] = field(default_factory=list)
    small: list[SmallCall] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    ranks: list[RanksCase] = field(default_factory=list)
    targets: list[Verdict] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in ABOUT},
            "cases": [_outcome_to_dict(outcome) for outcome in self.outcomes],
            "overheads": [asdict(overhead) for overhead in self.overheads],
            "small": [asdict(call) for call in self.small],
            "starts": [asdict(start) for start in self.starts],
            "worlds": [asdict(exchange) for exchange in self.exchanges],
            "trainings": [asdict(training) for training in self.trainings],
            "ranks": [asdict(case) for case in self.ranks],
            "targets": [asdict(verdict) for verdict in self.targets],
        }

    @classmethod
    def of(cls, given: dict[str, Any]) -> Results:
        """The inverse of `to_dict`. **Raises**: ValueError for another version or thing."""
        if not isinstance(given, dict):
            raise ValueError(f"a JSON {type(given).__name__}: expected an object")
        if given.get("schema") != SCHEMA:
            raise ValueError(f"schema {given.get('schema')!r}: expected {SCHEMA}")
        return cls(
            **{name: given[name] for name in ABOUT},
            outcomes=[_outcome_of(case) for case in given["cases"]],
            overheads=[Overhead(**overhead) for overhead in given["overheads"]],
            small=[SmallCall.of(call) for call in given.get("small", [])],
            starts=[Start(**start) for start in given.get("starts", [])],
            exchanges=[Exchange.of(exchange) for exchange in given.get("worlds", [])],
            trainings=[Training.of(training) for training in given.get("trainings", [])],
            ranks=[RanksCase.of(case) for case in given.get("ranks", [])],
            targets=[Verdict(**verdict) for verdict in given["targets"]],
        )

    def save(self, path: Path) -> None:
        """Write the JSON; the file is whole at any time."""
        with atomic_write(path) as file:
            file.write(json.dumps(_rounded(self.to_dict()), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        return cls.of(json.loads(path.read_text()))


def _outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    names = [name for name, entry in outcome.entries.items() if entry.timing and name != OURS]
    return {
        **outcome.case.describe(),
        "moved_bytes": outcome.case.moved_bytes,
        "input_bytes": outcome.case.input_bytes,
        "extra_bytes": outcome.extra_bytes,
        "load": outcome.load,
        "kernels": outcome.kernels,
        "ratios": {
            name: {by: outcome.ratio(name, by=by) for by in ("min", "median")} for name in names
        },
        "entries": [asdict(entry) for entry in outcome.entries.values()],
    }


def _outcome_of(given: dict[str, Any]) -> Outcome:
    entries = {}
    for entry in given["entries"]:
        timing = Timing(**entry["timing"]) if entry["timing"] else None
        entries[entry["name"]] = Entry(**(entry | {"timing": timing}))
    return Outcome(
        Case.of(given), entries, given["load"], given["extra_bytes"], given.get("kernels")
    )


def _rounded(value: Any) -> Any:
    """Five significant digits: more are noise, and make the files hard to read."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
