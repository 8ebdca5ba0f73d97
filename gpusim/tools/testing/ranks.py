"""A test on the ranks of one process.

A rank that fails does not end the others: they go on up to where they have to wait, so that the
report can say which ranks failed, which passed, and which waited for what.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import numpy as np
import pytest

import gpusim
from gpusim.errors import GpusimError, ReplicaError, explain
from gpusim.maps.ending import ReplicaEnded
from gpusim.reduction import Reduction
from gpusim.tools.outputs import RankOutputs, TaggedStream
from gpusim.tools.testing.failures import (
    Failure,
    alike,
    names,
    of_user,
    place,
    short,
    shown_trace,
    with_notes,
)
from gpusim.tools.testing.mark import RanksMark, count_of, has_own_rank, mark_of
from gpusim.trees import flatten

__all__ = ["call"]

MOST_LINES = 6
"""Lines about other ranks."""

UNREAD = "result-unread"
"""The kind of findings that no test fails by: it may ask no more than that its calls return."""

SKIPS = (pytest.skip.Exception, unittest.SkipTest)
ENDS = (pytest.exit.Exception, KeyboardInterrupt)


def call(item: pytest.Function) -> None:
    """Run the test function on all ranks; or here, in a process that is one of them."""
    mark = mark_of(item)
    assert mark is not None
    if mark.processes:
        with reduced(mark.reduction):
            item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
    elif mark.equals is not None:
        compare(MarkedTest(item, mark), mark.equals)
    else:
        MarkedTest(item, mark).execute()


def compare(test: MarkedTest, reference_ranks: int) -> None:
    """Run the test on the reference's ranks and on its own, as processes, and compare."""
    from gpusim.tools.equal.checking import check_functions

    def run(rank: int) -> None:
        test.begin()
        test.function(**{name: wide(each) for name, each in test.arguments_of(rank).items()})

    try:
        check_functions(
            run,
            run,
            test.count,
            (),
            reference_ranks=reference_ranks,
            steps=0,
            dtype="float64",
            reduction=test.mark.reduction,
            device=None,
        )
    except ReplicaError as error:
        cause = error.__cause__
        if type(cause).__name__ in ("Skipped", "SkipTest"):  # its type is another process's
            pytest.skip(str(cause))
        raise
    except AssertionError as error:  # the verdict; the test's own come as ReplicaError
        pytest.fail(str(error), pytrace=False)


def wide(value: Any) -> Any:
    """A value whose tensors and modules are float64, as what the test itself makes."""
    import torch

    if isinstance(value, torch.nn.Module):
        return value.double()
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: wide(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(wide(each) for each in value)
    return value


@contextlib.contextmanager
def reduced(reduction: Reduction | None) -> Iterator[None]:
    """A block in which collectives add in this way."""
    if reduction is None:
        yield
    else:
        with gpusim.reduction(reduction):
            yield


class Captured(NamedTuple):
    """The pair that `capsys.readouterr` returns."""

    out: str
    err: str


class RankedOutputs(RankOutputs):
    """Output with the tags of ranks; or, for `capsys`, kept for each rank."""

    def __init__(self, keep: bool) -> None:
        super().__init__(None, None)
        self.keep = keep
        self.kept: dict[int, dict[TextIO, str]] = {}

    def enter(self, rank: int) -> None:
        super().enter(rank)
        self.local.kept = self.kept.setdefault(rank, {})  # also of threads that the rank starts

    def show_kept(self) -> None:
        """Write what the rank of this thread has written and not read."""
        with self.lock:
            kept, self.local.kept = dict(self.local.kept), {}
        for stream, text in kept.items():
            super().write(stream, text)

    def write(self, stream: TextIO, text: str) -> int:
        if not self.keep or getattr(self.local, "rank", None) is None:
            return super().write(stream, text)
        with self.lock:
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

    def __init__(self, outputs: RankedOutputs) -> None:
        self._outputs = outputs

    def readouterr(self) -> Captured:
        """The output of this rank since the last call."""
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


@dataclass
class MarkedTest:
    """One test on its ranks, and how each of them ended."""

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
        self.outputs = RankedOutputs("capsys" in self.given)

    # In a rank's thread

    def run_rank(self, rank: int, arguments: dict[str, Any]) -> None:
        """Run the test in a rank, and note how it ends."""
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
            explain(error)
            self.failed[rank] = Failure(error, error.__traceback__)
            if self.mark.schedule == "free":  # ranks may poll for ever for what does not come
                raise
        finally:
            self.outputs.show_kept()

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
        from gpusim.torch.distributed.launching import as_check, run_ranks
        from gpusim.torch.distributed.runners.threads import environment_of

        def run(rank: Any) -> None:
            self.ranks[rank.index] = rank
            self.run_rank(rank.index, arguments[rank.index])

        environments = [environment_of(rank, self.count, self.count) for rank in range(self.count)]
        around = self.outputs.of_rank
        how = (self.mark.reduction, self.mark.schedule)
        check = as_check(self.mark.check)
        run_ranks(run, environments, *how, around=around, check=check or False)
        if check is not None:
            check.leave_out(UNREAD)
            check.raise_findings()

    def map(self, arguments: Sequence[dict[str, Any]]) -> None:
        """Run the ranks as gpusim.pmap does."""

        def run(rank: Any) -> np.ndarray:
            with self.outputs.of_rank(int(rank)):
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
            notes += [str(error)] if type(error).__name__ == "CheckError" else []
            raise with_notes(failure.error, notes).with_traceback(shown_trace(failure.trace))
        if type(error).__name__ == "CheckError":
            pytest.fail(str(error), pytrace=False)
        if error is not None:
            own = ((rank, of_user(trace)) for rank, trace in sorted(self.ended.items()))
            shown = next(((rank, trace) for rank, trace in own if trace is not None), None)
            notes = [] if shown is None else [f"shown: rank {shown[0]} of {self.count}"]
            notes += self.describe_skipped()
            raise with_notes(error, notes).with_traceback(shown and shown[1])
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
        """The place at which a rank was ended."""
        waits_for: str = getattr(self.ranks.get(rank), "waits_for", "")
        if waits_for:
            operation, _, site = waits_for.rpartition(" at ")
            return f"waited in {operation.rstrip(',')} at {short(site)}"
        site, function = place(trace)
        return f"waited in {function} at {site}" if function else f"was at {site}"


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
