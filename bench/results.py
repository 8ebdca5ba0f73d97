"""The results of a run, and their JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from bench.cases import Case, size_name
from bench.timing import Timing
from gpusim.files import atomic_write

SCHEMA = 1
OURS = "gpusim"
LIMIT = "memory limit"
ARITHMETIC = "arithmetic"


def times_as_long(above: Timing | None, below: Timing | None, by: str = "min") -> float | None:
    """How many times as long the first takes as the second; None without either."""
    if above is None or below is None:
        return None
    numerator, denominator = getattr(above, by), getattr(below, by)
    return float(numerator / denominator) if denominator else math.inf


class Part:
    """A part of the results that `dataclasses.asdict` writes, and this reads."""

    problem: str | None = None  # the reason for missing times

    @property
    def notes(self) -> list[str]:
        """The problems, each with what it is about."""
        return [f"{self}: {self.problem}"] if self.problem else []

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        return cls(**_with_timings(given))


TIMING = {each.name for each in fields(Timing)}


def _with_timings(given: Any) -> Any:
    """The same with a Timing for each object that has the fields of one."""
    if not isinstance(given, dict):
        return given
    if given.keys() == TIMING:
        return Timing(**given)
    return {name: _with_timings(value) for name, value in given.items()}


@dataclass(frozen=True)
class Entry(Part):
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

    @classmethod
    def of(cls, given: dict[str, Any]) -> Outcome:
        """The inverse of `to_dict`."""
        entries = {entry["name"]: Entry.of(entry) for entry in given["entries"]}
        rest = given["load"], given["extra_bytes"], given.get("kernels")
        return cls(Case.of(given), entries, *rest)

    def to_dict(self) -> dict[str, Any]:
        names = [name for name in self.entries if self._timing(name) and name != OURS]
        return {
            **self.case.describe(),
            **{name: getattr(self.case, name) for name in ("moved_bytes", "input_bytes")},
            **{name: getattr(self, name) for name in ("extra_bytes", "load", "kernels")},
            "ratios": {n: {by: self.ratio(n, by=by) for by in ("min", "median")} for n in names},
            "entries": [asdict(entry) for entry in self.entries.values()],
        }

    def _timing(self, name: str) -> Timing | None:
        return self.entries[name].timing if name in self.entries else None

    def seconds(self, name: str) -> float | None:
        """A participant's fastest call."""
        timing = self._timing(name)
        return timing.min if timing else None

    def ratio(self, name: str, over: str = OURS, by: str = "min") -> float | None:
        """How many times as long `name` takes as `over`."""
        return times_as_long(self._timing(name), self._timing(over), by)


@dataclass(frozen=True)
class Overhead(Part):
    """The microseconds of an operation; None after a failure, which the note describes."""

    name: str
    microseconds: float | None
    note: str = ""


@dataclass(frozen=True)
class Exchange(Part):
    """A collective over the instances of a World, beside raw MPI's on the same data."""

    collective: str
    order: str  # of a sum; else empty
    instances: int
    held: int  # replicas of each instance
    elements: int  # of a replica's float32 value
    ours: Timing | None = None  # of the slowest instance, in a call that all begin together
    raw: Timing | None = None  # the same of raw MPI
    problem: str | None = None

    def ratio(self, by: str = "min") -> float | None:
        """How many times as long as raw MPI it takes."""
        return times_as_long(self.ours, self.raw, by)

    @property
    def notes(self) -> list[str]:
        return super().notes if self.collective or not self.problem else [self.problem]

    def __str__(self) -> str:
        what = " ".join(part for part in (self.collective, self.order) if part)
        return f"{what}, {self.instances} instances of {size_name((self.held, self.elements))}"


@dataclass(frozen=True)
class Training(Part):
    """A step of training on simulated replicas, beside plain PyTorch's."""

    replicas: int
    batch: int  # samples of each replica
    ours: Timing | None = None  # all replicas in lockstep
    model: Timing | None = None  # as a trainingModel; None for more replicas than one may have
    loop: Timing | None = None  # one replica after the other
    whole: Timing | None = None  # the limit: all samples as one batch, without replicas' gradients
    problem: str | None = None

    def ratio(self, name: str = "loop", over: str = "ours") -> float | None:
        """How many times as long as `over` another way takes."""
        return times_as_long(getattr(self, name), getattr(self, over))

    def __str__(self) -> str:
        return f"{self.replicas} replicas"


@dataclass(frozen=True)
class Start(Part):
    """The seconds of a process's first psum by a compiled kernel."""

    variant: str  # of the sum
    cold_import: float = 0.0  # of `import gpusim`
    cold: float = 0.0  # of the psum, with an empty cache
    later_import: float = 0.0
    later: float = 0.0  # of the fastest process that found the kernel in the cache
    problem: str | None = None

    def __str__(self) -> str:
        return self.variant


@dataclass(frozen=True)
class SmallCall(Part):
    """A call on small arrays, whose time is mostly dispatch."""

    name: str
    before: int  # Python calls that it made in an older checkout
    calls: int | None = None  # Python calls that it makes
    ours: Timing | None = None
    numpy: Timing | None = None  # of one NumPy call
    old: Timing | None = None  # of the older checkout
    problem: str | None = None

    def ratio(self, over: str) -> float | None:
        """How many times as long gpusim takes as `over`."""
        return times_as_long(self.ours, getattr(self, over))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class RanksCase(Part):
    """A step of a torch.distributed program on simulated ranks."""

    case: str  # the program of `bench.ranks_program`
    ranks: int
    #: Of a step: "turns" and "free" are gpusim's, "threaded" and "LocalTensor" PyTorch's.
    timings: dict[str, Timing] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # why a participant has no timing
    load: float | None = None  # the machine's before

    def ratio(self, name: str, over: str = "turns", by: str = "min") -> float | None:
        """How many times as long `name` takes as `over`."""
        return times_as_long(self.timings.get(name), self.timings.get(over), by)

    @property
    def notes(self) -> list[str]:
        return [f"{name}: {text} ({self})" for name, text in self.problems.items()]

    def __str__(self) -> str:
        return f"{self.case} on {self.ranks} ranks"


@dataclass(frozen=True)
class InJax(Part):
    """A JAX program with gpusim's sums, beside the same with XLA's."""

    measures: str  # "run" or "compile"
    program: str
    devices: int
    dtype: str = ""
    size: int = 0  # bytes of a device's operand, of a run
    reduction: str = ""
    ours: Timing | None = None
    xla: Timing | None = None
    ours_cpu: float | None = None  # CPU seconds of a call, the mean
    xla_cpu: float | None = None
    load: float | None = None  # the machine's before
    problem: str | None = None

    def ratio(self, by: str = "median") -> float | None:
        """How many times as long as plain JAX it takes."""
        return times_as_long(self.ours, self.xla, by)

    @property
    def cpu_ratio(self) -> float | None:
        """How many times the CPU time of plain JAX it takes."""
        return self.ours_cpu / self.xla_cpu if self.ours_cpu and self.xla_cpu else None

    def __str__(self) -> str:
        size = f" of {self.size // 1024} KiB" if self.size else ""
        parts = [self.measures, f"{self.program}{size}", self.dtype, self.reduction]
        return f"{' '.join(filter(None, parts))} on {self.devices} devices"


@dataclass(frozen=True)
class Verdict(Part):
    """A target and its measurement; `met` is None without one."""

    description: str
    ratio: float | None
    target: str
    met: bool | None
    basis: str = ""


#: The fields of a file that describe its run.
ABOUT = "machine started load_before load_after seconds bandwidth interrupted".split()
#: By its name in a file, the attribute of each part and the class of its items.
PARTS: dict[str, tuple[str, type[Part]]] = {
    "overheads": ("overheads", Overhead),
    "small": ("small", SmallCall),
    "starts": ("starts", Start),
    "worlds": ("exchanges", Exchange),
    "trainings": ("trainings", Training),
    "ranks": ("ranks", RanksCase),
    "jax": ("in_jax", InJax),
    "targets": ("targets", Verdict),
}


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
    in_jax: list[InJax] = field(default_factory=list)
    targets: list[Verdict] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in ABOUT},
            "cases": [outcome.to_dict() for outcome in self.outcomes],
            **{key: [asdict(item) for item in getattr(self, at)] for key, (at, _) in PARTS.items()},
        }

    @classmethod
    def of(cls, given: dict[str, Any]) -> Results:
        """The inverse of `to_dict`; older files lack some parts.

        **Raises**: ValueError for another version or thing.
        """
        if not isinstance(given, dict):
            raise ValueError(f"a JSON {type(given).__name__}: expected an object")
        if given.get("schema") != SCHEMA:
            raise ValueError(f"schema {given.get('schema')!r}: expected {SCHEMA}")
        read: dict[str, Any] = {name: given[name] for name in ABOUT}
        for key, (attribute, kind) in PARTS.items():
            read[attribute] = [*map(kind.of, given.get(key, []))]
        return cls(**read, outcomes=[Outcome.of(case) for case in given["cases"]])

    def save(self, path: Path) -> None:
        """Write the JSON; the file is whole at any time."""
        with atomic_write(path) as file:
            file.write(json.dumps(_rounded(self.to_dict()), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        return cls.of(json.loads(path.read_text()))


def _rounded(value: Any) -> Any:
    """Five significant digits: more are noise, and make the files hard to read."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [*map(_rounded, value)] if isinstance(value, list) else value
