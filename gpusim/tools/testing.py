"""Tests on simulated ranks: what the pytest plugin `pytest_gpusim` does with a test that is marked.

A rank that fails does not end the others: they go on up to where they have to wait, so that the
report can say which ranks failed, which passed, and which were waiting for what.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import subprocess
import sys
import tempfile
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TextIO

import numpy as np
import pytest

import gpusim
from gpusim.errors import GpusimError, ReplicaError
from gpusim.maps.call_site import is_users
from gpusim.maps.scheduler import ReplicaEnded
from gpusim.reduction import Reduction
from gpusim.runtime import environment
from gpusim.tools.torchrun import RankOutputs, TaggedStream
from gpusim.trees import flatten

__all__ = [
    "REPORTS",
    "InstanceReports",
    "RanksMark",
    "call",
    "parametrize",
    "prepare",
    "run_in_processes",
]

REPORTS = "GPUSIM_TEST_REPORTS"
"""The variable that names the folder of reports, in the processes of `processes=True`."""

SHARED_BY_RANKS = ("capfd", "capfdbinary", "capsysbinary", "capteesys", "subtests")
"""pytest's fixtures that ranks cannot share."""

MOST_LINES = 6
"""Lines about other ranks."""

SKIPS = (pytest.skip.Exception, unittest.SkipTest)
ENDS = (pytest.exit.Exception, KeyboardInterrupt)


# ---------------------------------------------------------------- the mark


@dataclass(frozen=True)
class RanksMark:
    """The arguments of `pytest.mark.ranks`.

    **Attributes**: `reduction` is what `order` or `reduction` say; None for the default. The others
    are as given.

    **Raises**: TypeError or ValueError for arguments that the mark does not take.
    """

    count: int | Sequence[int]
    order: str | None = None
    reduction: Any = None
    schedule: str = "turns"
    init: bool | str = True
    axis: str | None = None
    processes: bool = False

    def __post_init__(self) -> None:
        counts = self.counts
        if not counts or any(type(n) is not int or n < 1 for n in counts):
            raise ValueError(
                f"count={self.count!r}: expected an integer from 1, or a list of them"
            )
        if len(set(counts)) < len(counts):
            raise ValueError(f"count={self.count!r}: expected different numbers of ranks")
        if self.schedule not in ("turns", "free"):
            raise ValueError(f"schedule={self.schedule!r}: expected 'turns' or 'free'")
        if not isinstance(self.init, (bool, str)):
            raise TypeError(
                f"init={self.init!r}: expected True, False, or the backend's name for "
                "init_process_group"
            )
        if not isinstance(self.processes, bool):
            raise TypeError(f"processes={self.processes!r}: expected True or False")
        if self.axis is not None and not isinstance(self.axis, str):
            raise TypeError(f"axis={self.axis!r}: expected the name of an axis")
        for name, chosen in (("axis", self.axis is not None), ("processes", self.processes)):
            if chosen and self.init is not True:
                raise ValueError(f"init={self.init!r}: expected no {name}; it is torch's")
        if self.processes and self.axis is not None:
            raise ValueError(f"axis={self.axis!r}: expected no processes=True")
        if self.processes and self.schedule != "turns":
            raise ValueError(f"schedule={self.schedule!r}: expected no processes=True")
        self._check_reduction()

    def _check_reduction(self) -> None:
        if self.order is not None and self.reduction is not None:
            raise ValueError(
                f"order={self.order!r}, reduction={self.reduction!r}: expected one of them"
            )
        if self.order is not None and not isinstance(self.order, str):
            raise TypeError(f"order={self.order!r}: expected a name; reduction= takes a Reduction")
        given = self.order or self.reduction
        if isinstance(given, str):
            given = Reduction(order=given)
        of_torch = self.axis is None and not self.processes
        if not isinstance(given, Reduction | None) and not (of_torch and callable(given)):
            raise TypeError(f"reduction={given!r}: expected a gpusim.Reduction, or a name")
        object.__setattr__(self, "reduction", given)

    @property
    def counts(self) -> tuple[Any, ...]:
        many = isinstance(self.count, (list, tuple))
        return tuple(self.count) if many else (self.count,)  # type: ignore[arg-type]


def mark_of(item: Any) -> RanksMark | None:
    """The arguments of the mark of a test; None if it has none.

    **Raises**: pytest's Failed, without a traceback, for wrong arguments.
    """
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return None
    try:
        return RanksMark(*mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        text = str(error).replace("RanksMark.__init__()", "ranks()")
        pytest.fail(f"{item.nodeid}: pytest.mark.ranks: {text}", pytrace=False)


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make a test for each of several counts."""
    mark = mark_of(metafunc.definition)
    if mark is None or not isinstance(mark.count, (list, tuple)):
        return
    if "world_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world_size")
    metafunc.parametrize("world_size", mark.counts, ids=[f"ranks{n}" for n in mark.counts])


def count_of(item: pytest.Function, mark: RanksMark) -> int:
    """The number of ranks of one test."""
    if isinstance(mark.count, int):
        return mark.count
    count: int = item.callspec.params["world_size"]
    return count


def prepare(item: pytest.Item) -> None:
    """Refuse tests that cannot run on ranks, before their fixtures are evaluated."""
    mark = mark_of(item)
    assert mark is not None

    def refuse(why: str) -> None:
        pytest.fail(f"{item.nodeid}: pytest.mark.ranks: {why}", pytrace=False)

    function = getattr(item, "obj", None)
    if type(item) is not pytest.Function or function is None:
        refuse(f"expected a test function, got a {type(item).__name__}")
        return
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        refuse("expected a test function, got an async one")
    if getattr(function, "is_hypothesis_test", False):
        refuse(
            "hypothesis would draw other examples on each rank; call "
            "gpusim.torch.distributed.launch or gpusim.pmap in the test"
        )
    if item.config.getoption("trace", False):
        refuse("--trace works with one rank; use breakpoint() or --pdb")
    if not mark.processes:
        for name in item._fixtureinfo.argnames:
            if name in SHARED_BY_RANKS:
                refuse(f"ranks cannot share the fixture {name!r}; capsys works for each rank")
    if has_own_rank(item):
        # Is not evaluated then: it is another value in each rank.
        item.funcargs["rank"] = environment.read().instance if mark.processes else None


def has_own_rank(item: pytest.Function) -> bool:
    """Whether the test has the plugin's fixture `rank` as an argument."""
    fixtures = item._fixtureinfo.name2fixturedefs.get("rank", ())
    return (
        "rank" in item._fixtureinfo.argnames
        and bool(fixtures)
        and fixtures[-1].func.__module__ == "pytest_gpusim"
    )


# ---------------------------------------------------------------- ranks of one process


def call(item: pytest.Function) -> bool | None:
    """Run the test function on all ranks; None if this process is one of its ranks."""
    mark = mark_of(item)
    assert mark is not None
    if mark.processes:
        with reduced(mark.reduction):
            return _call_here(item)
    TestRun(item, mark).execute()
    return True


def _call_here(item: pytest.Function) -> bool:
    item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
    return True


@contextlib.contextmanager
def reduced(reduction: Reduction | None) -> Iterator[None]:
    """A block in which collectives add in this way."""
    if reduction is None:
        yield
    else:
        with gpusim.reduction(reduction):
            yield


class Captured(NamedTuple):
    """What `capsys.readouterr` returns."""

    out: str
    err: str


class TestOutputs(RankOutputs):
    """Output with the tags of ranks; or, for `capsys`, kept for each rank."""

    __test__ = False  # no class of tests

    def __init__(self, keep: bool) -> None:
        super().__init__(None, None)
        self.keep = keep

    def enter(self, rank: int) -> None:
        super().enter(rank)
        self.local.kept = {}

    def leave(self) -> None:
        if self.keep:
            for stream, text in self.local.kept.items():
                super().write(stream, text)
        super().leave()

    def write(self, stream: TextIO, text: str) -> int:
        if not self.keep or getattr(self.local, "rank", None) is None:
            return super().write(stream, text)
        self.local.kept[stream] = self.local.kept.get(stream, "") + text
        return len(text)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which standard output and error go here."""
        self.streams = sys.stdout, sys.stderr
        tagged: Any = [TaggedStream(stream, self) for stream in self.streams]
        sys.stdout, sys.stderr = tagged
        try:
            yield
        finally:
            sys.stdout, sys.stderr = self.streams


class RankCapsys:
    """`capsys` in a rank: what the rank itself has written."""

    def __init__(self, outputs: TestOutputs) -> None:
        self._outputs = outputs

    def readouterr(self) -> Captured:
        """What this rank has written since the last call."""
        kept = self._outputs.local.kept
        return Captured(*(kept.pop(stream, "") for stream in self._outputs.streams))

    def disabled(self) -> Any:
        pytest.fail("capsys.disabled() does not work in a rank", pytrace=False)


class RankMonkeyPatch:
    """`monkeypatch` in a rank, whose environment and working directory are its own.

    They end with the rank. The rest is undone after the test, the last change first.
    """

    def __init__(self, shared: pytest.MonkeyPatch) -> None:
        self._shared = shared
        own = pytest.MonkeyPatch()
        self.setenv, self.delenv, self.chdir = own.setenv, own.delenv, own.chdir

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)


class Failure(NamedTuple):
    """An exception of a rank, with its traceback: several ranks may raise the same object."""

    error: BaseException
    trace: TracebackType | None


def alike(one: Failure, other: Failure) -> bool:
    """Whether two ranks failed with the same type of exception at the same line."""
    return type(one.error) is type(other.error) and place(one.trace) == place(other.trace)


@dataclass
class TestRun:
    """One test on its ranks, and how each of them ended."""

    __test__ = False

    item: pytest.Function
    mark: RanksMark
    failed: dict[int, Failure] = field(default_factory=dict)
    skipped: dict[int, BaseException] = field(default_factory=dict)
    ended: dict[int, TracebackType | None] = field(default_factory=dict)
    passed: dict[int, Any] = field(default_factory=dict)
    ranks: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.count = count_of(self.item, self.mark)
        self.function: Callable[..., Any] = self.item.obj
        funcargs = self.item.funcargs
        self.given = {name: funcargs[name] for name in self.item._fixtureinfo.argnames}
        self.outputs = TestOutputs("capsys" in self.given)

    # In a rank's thread

    def run_rank(self, rank: int, arguments: dict[str, Any]) -> None:
        """Run the test in a rank, and note how it ends."""
        self.outputs.enter(rank)
        try:
            self.begin()
            self.passed[rank] = self.function(**arguments)
        except ReplicaEnded as ended:
            self.ended[rank] = ended.__traceback__
            raise
        except SKIPS as skipped:
            self.skipped[rank] = skipped
        except ENDS:
            raise
        except BaseException as error:
            self.failed[rank] = Failure(error, error.__traceback__)
            if self.mark.schedule == "free":  # ranks may poll for ever for what does not come
                raise
        finally:
            self.outputs.leave()

    def begin(self) -> None:
        """Initialise torch's process group, if the mark does not say otherwise."""
        if self.mark.axis is None and self.mark.init is not False:
            from torch import distributed as dist

            dist.init_process_group(None if self.mark.init is True else self.mark.init)

    # In the main thread

    def execute(self) -> None:
        """Run all ranks, and raise what the test is to end with."""
        arguments = [self.arguments_of(rank) for rank in range(self.count)]
        error: GpusimError | None = None
        try:
            with self.outputs.in_place():
                if self.mark.axis is None:
                    self.launch(arguments)
                else:
                    self.map(arguments)
        except GpusimError as raised:
            if isinstance(raised, ReplicaError) and isinstance(raised.__cause__, ENDS):
                raise raised.__cause__ from None
            error = raised
        self.conclude(error)

    def launch(self, arguments: Sequence[dict[str, Any]]) -> None:
        """Run the ranks as gpusim.torch.distributed.launch does."""
        try:
            import torch  # noqa: F401
        except ModuleNotFoundError as error:
            pytest.fail(
                f"pytest.mark.ranks needs torch ({error}); with axis='i' it runs the test in "
                "gpusim.pmap, without torch",
                pytrace=False,
            )
        from gpusim.torch.distributed.ranks import environment_of, run_ranks

        def run(rank: Any) -> None:
            self.ranks[rank.index] = rank
            self.run_rank(rank.index, arguments[rank.index])

        environments = [environment_of(rank, self.count, self.count) for rank in range(self.count)]
        run_ranks(run, environments, self.mark.reduction, self.mark.schedule)

    def map(self, arguments: Sequence[dict[str, Any]]) -> None:
        """Run the ranks as gpusim.pmap does."""

        def run(rank: Any) -> np.ndarray:
            self.run_rank(int(rank), arguments[int(rank)])
            return np.zeros(0)

        schedule = {"turns": "one", "free": "cores"}[self.mark.schedule]
        with reduced(self.mark.reduction):
            gpusim.pmap(run, self.mark.axis, schedule=schedule)(np.arange(self.count))

    def arguments_of(self, rank: int) -> dict[str, Any]:
        """The test's arguments, as a process of this rank would have them."""
        memo: dict[int, Any] = {}
        own: dict[str, Any] = {}
        for name, value in self.given.items():
            if name == "rank" and has_own_rank(self.item):
                value = rank
            elif name == "capsys":
                value = RankCapsys(self.outputs)
            elif isinstance(value, pytest.MonkeyPatch):
                if self.mark.axis is None and self.mark.schedule == "turns":
                    value = RankMonkeyPatch(value)
            elif holds_data(value):
                value, why = deep_copy(value, memo)
                if why:
                    pytest.fail(f"the argument {name!r} has no copy for each rank: {why}", False)
            own[name] = value
        return own

    def conclude(self, error: GpusimError | None) -> None:
        """Raise what the test ends with, if it does not pass."""
        if self.failed:
            first = next(iter(self.failed.values()))  # in time
            rank = min(rank for rank, other in self.failed.items() if alike(other, first))
            failure = self.failed[rank]
            notes = [f"rank {rank} of {self.count} failed", *self.describe(rank)]
            raise with_notes(failure.error, notes).with_traceback(failure.trace)
        if error is not None:
            traces = [(rank, trace) for rank, trace in sorted(self.ended.items()) if trace]
            own = [(rank, of_user(trace)) for rank, trace in traces]
            rank, trace = next(((r, t) for r, t in own if t is not None), (None, None))
            notes = [] if rank is None else [f"shown: rank {rank} of {self.count}"]
            notes += self.describe_skipped()
            raise with_notes(error, notes).with_traceback(trace)
        if self.skipped:
            rank, skipped = min(self.skipped.items())
            if len(self.skipped) == self.count:
                raise skipped
            lines = [*self.describe_skipped(), f"{names(sorted(self.passed))} did not"]
            pytest.fail(
                f"{'; '.join(lines)}: expected all {self.count} ranks to skip the test, or none",
                pytrace=False,
            )
        returned = next((value for value in self.passed.values() if value is not None), None)
        if returned is not None:
            warnings.warn(
                pytest.PytestReturnNotNoneWarning(
                    f"{self.item.nodeid} returned {type(returned)!r}; did you mean `assert`?"
                ),
                stacklevel=1,
            )

    def describe(self, shown: int) -> list[str]:
        """How the ranks ended that are not shown, in a few lines."""
        first = self.failed[shown]
        doing: dict[str, list[int]] = {}
        for rank in range(self.count):
            if rank == shown:
                continue
            if rank in self.failed:
                error, trace = self.failed[rank]
                text = str(error).partition("\n")[0]
                what = f"failed with {type(error).__name__} at {place(trace)[0]}: {text:.100}"
                if alike(self.failed[rank], first):
                    what = "failed at the same line"
            elif rank in self.passed:
                what = "passed"
            elif rank in self.skipped:
                continue
            elif rank in self.ended:
                what = self.describe_wait(rank, self.ended[rank])
            else:
                what = "had not begun"
            doing.setdefault(what, []).append(rank)
        lines = [f"{names(ranks)} {what}" for what, ranks in doing.items()]
        lines += self.describe_skipped()
        if len(lines) > MOST_LINES:
            lines[MOST_LINES - 1 :] = [f"and {len(lines) - MOST_LINES + 1} more lines like these"]
        return lines

    def describe_skipped(self) -> list[str]:
        reasons: dict[str, list[int]] = {}
        for rank, error in sorted(self.skipped.items()):
            reasons.setdefault(str(error), []).append(rank)
        return [f"{names(ranks)} skipped the test ({why})" for why, ranks in reasons.items()]

    def describe_wait(self, rank: int, trace: TracebackType | None) -> str:
        """What a rank did when it was ended."""
        waits_for: str = getattr(self.ranks.get(rank), "waits_for", "")
        if waits_for:
            operation, _, site = waits_for.rpartition(" at ")
            return f"waited in {operation.rstrip(',')} at {short(site)}"
        site, function = place(trace)
        return f"waited in {function} at {site}" if function else f"was at {site}"


def with_notes(error: BaseException, notes: Sequence[str]) -> BaseException:
    for note in notes:
        error.add_note(note)
    return error


def holds_data(value: Any) -> bool:
    """Whether a value is or contains tensors, arrays, modules, optimizers or generators."""
    kinds: tuple[type, ...] = (np.ndarray, np.random.Generator)
    if torch := sys.modules.get("torch"):
        kinds += (
            torch.Tensor,
            torch.Generator,
            torch.nn.Module,
            torch.optim.Optimizer,
            torch.optim.lr_scheduler.LRScheduler,
        )
    return any(isinstance(leaf, kinds) for leaf in flatten(value)[0])


def deep_copy(value: Any, memo: dict[int, Any]) -> tuple[Any, str]:
    """A deep copy, and an empty text; or the reason why there is none."""
    try:
        return copy.deepcopy(value, memo), ""
    except Exception as error:
        return value, str(error) or type(error).__name__


def names(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> names([3]), names([0, 1, 2, 4, 6, 7])
    ('rank 3', 'ranks 0-2, 4, 6, 7')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}"


def users_frames(trace: TracebackType | None) -> Iterator[tuple[TracebackType, str]]:
    """The entries of a traceback that are the user's, each with the function it calls."""
    while trace is not None:
        following = trace.tb_next
        name = trace.tb_frame.f_globals.get("__name__", "")
        if is_users(trace.tb_frame) and not name.startswith("gpusim."):
            yield trace, "" if following is None else called(following.tb_frame)
        trace = following


def called(frame: FrameType) -> str:
    """The name of the function, or of the collective, that a frame runs."""
    name = frame.f_code.co_name
    return getattr(frame.f_locals.get("self"), "__name__", name) if name == "__call__" else name


def place(trace: TracebackType | None) -> tuple[str, str]:
    """file:line of the innermost code of the user's, and the function that it called."""
    found = list(users_frames(trace))
    if not found:
        return "unknown line", ""
    entry, function = found[-1]
    return short(f"{entry.tb_frame.f_code.co_filename}:{entry.tb_lineno}"), function


def of_user(trace: TracebackType | None) -> TracebackType | None:
    """A traceback of the user's own code alone; None if there is none."""
    own: TracebackType | None = None
    for entry, _ in reversed(list(users_frames(trace))):
        own = TracebackType(own, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return own


def short(site: str) -> str:
    """A call site relative to the working directory."""
    return site.removeprefix(os.getcwd() + os.sep)


# ---------------------------------------------------------------- ranks that are processes


def run_in_processes(item: pytest.Item) -> bool | None:
    """Run a test with processes=True, each with a pytest of its own, by poprun.

    None for another test, and in these processes.
    """
    if REPORTS in os.environ or type(item) is not pytest.Function:
        return None
    try:
        mark = mark_of(item)
    except pytest.fail.Exception:
        return None  # the test's setup raises it
    if mark is None or not mark.processes:
        return None
    count, config = count_of(item, mark), item.config
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with tempfile.TemporaryDirectory(prefix="gpusim-tests-") as folder:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST_")}
        environ.pop("PYTEST_CURRENT_TEST", None)
        done = subprocess.run(
            command_line(item, count),
            cwd=config.invocation_params.dir,
            env=environ | {REPORTS: folder},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        reports = [read_reports(config, Path(folder, str(i))) for i in range(count)]
    for report in combine(item, reports, done):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def command_line(item: pytest.Function, count: int) -> list[str]:
    """poprun with a pytest that runs one test."""
    config = item.config
    option = config.option
    plugins = [word for name in ["pytest_gpusim", *option.plugins] for word in ("-p", name)]
    words = [sys.executable, "-m", "gpusim.tools.launch", "--num-instances", str(count)]
    words += [sys.executable, "-m", "pytest", *plugins, "-p", "no:cacheprovider", "--quiet"]
    words += [f"--rootdir={config.rootpath}", f"--import-mode={config.getoption('importmode')}"]
    if config.inipath is not None:
        words.append(f"--config-file={config.inipath}")
    words += [f"--override-ini={each}" for each in option.override_ini or ()]
    words += [f"--pythonwarnings={each}" for each in option.pythonwarnings or ()]
    if config.pluginmanager.hasplugin("xdist"):
        words += ["-n", "0"]
    return [*words, f"{item.path}::{item.nodeid.partition('::')[2]}"]


class InstanceReports:
    """A plugin of the processes: writes reports for the pytest that has started them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.path = Path(os.environ[REPORTS], str(environment.read().instance))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with self.path.open("a") as file:
            file.write(json.dumps(data) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """End a process whose test has failed at once: others may wait for it in MPI."""
        if exitstatus:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exitstatus)


def read_reports(config: pytest.Config, path: Path) -> list[pytest.TestReport]:
    """What one process has written; less if it was killed."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            data = json.loads(line)
            hook = config.hook.pytest_report_from_serializable
            found.append(hook(config=config, data=data))
    return found


def combine(
    item: pytest.Function,
    instances: Sequence[list[pytest.TestReport]],
    done: subprocess.CompletedProcess[str],
) -> list[pytest.TestReport]:
    """One test's reports from those of its processes."""
    failed = [i for i, own in enumerate(instances) if any(report.failed for report in own)]
    skipped = [i for i, own in enumerate(instances) if any(report.skipped for report in own)]
    if failed:
        found = instances[failed[0]]
        for report in found:
            report.sections = [(f"{title} (rank {failed[0]})", s) for title, s in report.sections]
            if report.failed:
                text = f"{names(failed)} of {len(instances)} failed\n{done.stderr}".rstrip()
                report.sections.append(("processes", text))
        return found
    problem = ""
    if done.returncode or not all(instances):
        problem = f"the processes ended with code {done.returncode}\n{done.stdout}{done.stderr}"
    elif len(skipped) not in (0, len(instances)):
        others = [i for i in range(len(instances)) if i not in skipped]
        problem = (
            f"{names(skipped)} skipped the test, {names(others)} did not: expected all "
            f"{len(instances)} ranks to skip it, or none"
        )
    if not problem:
        return instances[0]
    return [
        pytest.TestReport(
            item.nodeid, item.location, dict(item.keywords), "failed", problem.rstrip(), "call"
        )
    ]
