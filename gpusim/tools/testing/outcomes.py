"""A test on the ranks of one process, and how each of them ended; without pytest.

A rank that fails does not end the others: they go on up to where they have to wait, so that the
report can say which ranks failed, which passed, and which waited for what.
"""

from __future__ import annotations

import contextlib
import sys
import unittest
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

import gpusim
from gpusim.errors import GpusimError, ReplicaError, explain
from gpusim.maps.ending import ReplicaEnded
from gpusim.reduction import Reduction
from gpusim.tools.testing.failures import (
    Failure,
    alike,
    names,
    of_user,
    place,
    short,
    shown_trace,
    stack_of,
    with_notes,
)
from gpusim.tools.testing.mark import RanksMark
from gpusim.tools.testing.outputs import RankedOutputs

__all__ = ["RankedTest", "ends", "reduced", "skips"]

__unittest = True  # unittest leaves the frames of such modules out of tracebacks

MOST_LINES = 6
"""Lines about other ranks."""

UNREAD = "result-unread"
"""The kind of findings that no test fails by: it may ask no more than that its calls return."""


def skips() -> tuple[type[BaseException], ...]:
    """The exceptions that skip a test: unittest's, and pytest's where it is loaded."""
    outcomes = sys.modules.get("_pytest.outcomes")
    return (unittest.SkipTest, *((outcomes.Skipped,) if outcomes else ()))


def ends() -> tuple[type[BaseException], ...]:
    """The exceptions that end the whole run of tests."""
    outcomes = sys.modules.get("_pytest.outcomes")
    return (KeyboardInterrupt, *((outcomes.Exit,) if outcomes else ()))


@contextlib.contextmanager
def reduced(reduction: Reduction | None) -> Iterator[None]:
    """A block in which collectives add in this way."""
    if reduction is None:
        yield
    else:
        with gpusim.reduction(reduction):
            yield


class RankedTest:
    """One test on its ranks, and how each of them ended."""

    def __init__(self, mark: RanksMark, count: int, keep: bool = False) -> None:
        self.mark, self.count = mark, count
        self.outputs = RankedOutputs(keep)
        # By rank. Each rank's thread writes its own entries, the main thread reads them afterwards.
        self.failed: dict[int, Failure] = {}
        self.skipped: dict[int, BaseException] = {}
        self.ended: dict[int, TracebackType | None] = {}
        self.passed: dict[int, Any] = {}
        self.ranks: dict[int, Any] = {}
        self.waits: dict[int, str] = {}

    def body(self, rank: int) -> Any:
        """Run the test in a rank; its result."""
        raise NotImplementedError

    def fail(self, text: str) -> NoReturn:
        """Let the test fail for a reason that is not one rank's."""
        raise AssertionError(text)

    # In a rank's thread

    def run_rank(self, rank: int) -> None:
        """Run the test in a rank, and note how it ends."""
        try:
            self.begin()
            self.passed[rank] = self.body(rank)
        except ReplicaEnded as ended:
            self.ended[rank] = ended.__traceback__
            self.note_wait(rank)
            raise
        except skips() as skipped:
            self.skipped[rank] = skipped
        except ends():
            raise
        except BaseException as error:
            explain(error)
            self.failed[rank] = Failure(error, error.__traceback__)
            if self.mark.schedule == "free":  # ranks may poll for ever for what does not come
                raise
        finally:
            self.outputs.show_kept()

    def note_wait(self, rank: int) -> None:
        """Keep the call in which a rank is ended: code that cleans up may make others."""
        self.waits.setdefault(rank, getattr(self.ranks.get(rank), "waits_for", ""))

    def begin(self) -> None:
        """Initialise torch's process group, if the mark does not say otherwise."""
        if self.mark.axis is None and self.mark.init is not False:
            from torch import distributed as dist

            dist.init_process_group(None if self.mark.init is True else self.mark.init)

    # In the main thread

    def execute(self) -> None:
        """Run all ranks, and raise what the test is to end with."""
        error: GpusimError | None = None
        try:
            with self.outputs.in_place():
                if self.mark.axis is None:
                    self.launch()
                else:
                    self.map()
        except GpusimError as raised:
            if isinstance(raised, ReplicaError) and isinstance(raised.__cause__, ends()):
                raise raised.__cause__ from None
            error = raised
        self.conclude(error)

    def launch(self) -> None:
        """Run the ranks as gpusim.torch.distributed.launch does."""
        try:
            import torch  # noqa: F401
        except ModuleNotFoundError as error:
            self.fail(
                f"pytest.mark.ranks needs torch ({error}); with axis='i' it runs the test in "
                "gpusim.pmap, without torch"
            )
        from gpusim.torch.distributed.launching import as_check, run_ranks
        from gpusim.torch.distributed.runners.threads import environment_of

        def run(rank: Any) -> None:
            self.ranks[rank.index] = rank
            self.run_rank(rank.index)

        environments = [environment_of(rank, self.count, self.count) for rank in range(self.count)]
        check = as_check(self.mark.check)
        run_ranks(
            run,
            environments,
            self.mark.reduction,
            self.mark.schedule,
            device=self.mark.device,
            around=self.outputs.of_rank,
            check=check or False,
        )
        if check is not None:
            check.leave_out(UNREAD)
            check.raise_findings()

    def map(self) -> None:
        """Run the ranks as gpusim.pmap does."""

        def run(rank: Any) -> np.ndarray:
            with self.outputs.of_rank(int(rank)):
                self.run_rank(int(rank))
            return np.zeros(0)

        schedule = {"turns": "one", "free": "cores"}[self.mark.schedule]
        with reduced(self.mark.reduction):
            gpusim.pmap(run, self.mark.axis, schedule=schedule)(np.arange(self.count))

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
            self.fail(str(error))
        if error is not None:
            own = ((rank, of_user(trace)) for rank, trace in sorted(self.ended.items()))
            shown = next(((rank, trace) for rank, trace in own if trace is not None), None)
            notes = [] if shown is None else [f"shown: rank {shown[0]} of {self.count}"]
            notes += self.describe_skipped()
            notes += [] if shown is None else self.describe_stacks(shown[0])
            raise with_notes(error, notes).with_traceback(shown and shown[1])
        if self.skipped:
            rank, skipped = min(self.skipped.items())
            if len(self.skipped) == self.count:
                raise skipped
            lines = [*self.describe_skipped(), f"{names(sorted(self.passed))} did not"]
            self.fail(
                f"{'; '.join(lines)}: expected all {self.count} ranks to skip the test, or none"
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

    def describe_stacks(self, shown: int) -> list[str]:
        """Where the ranks were ended that are not shown: ranks with the same stack together."""
        stacks: dict[Sequence[str], list[int]] = {}
        for rank, trace in sorted(self.ended.items()):
            stacks.setdefault(stack_of(trace), []).append(rank)
        lines: list[str] = []
        for stack, ranks in stacks.items():
            others = [rank for rank in ranks if rank != shown]
            if not others or not stack:
                continue
            if shown in ranks:
                lines.append(f"{names(others)}: the same stack")
            else:
                lines += [f"{names(others)}:", *(f"  {line}" for line in stack)]
        return lines

    def describe_skipped(self) -> list[str]:
        """Which ranks have skipped the test, and why."""
        reasons: dict[str, list[int]] = {}
        for rank, error in sorted(self.skipped.items()):
            reasons.setdefault(str(error), []).append(rank)
        return [f"{names(ranks)} skipped the test ({why})" for why, ranks in reasons.items()]

    def describe_wait(self, rank: int, trace: TracebackType | None) -> str:
        """The place at which a rank was ended."""
        waits_for = self.waits.get(rank, "")
        if waits_for:
            operation, _, site = waits_for.rpartition(" at ")
            return f"waited in {operation.rstrip(',')} at {short(site)}"
        site, function = place(trace)
        return f"waited in {function} at {site}" if function else f"was at {site}"
