"""Runs of one script under plans of faults, each in a fork of this process and a folder of its own.

The campaign's process has torch and the script's large modules imported, and runs nothing itself.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import linecache
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from gpusim.files import replace_text
from gpusim.tools.forked import begin_fork, exit_code
from gpusim.torch.distributed.faults import watching
from gpusim.torch.distributed.faults.plans import Fault, plan_text

from .folders import PLACE, check_size, copy_folder, digests, stamps
from .observations import Observation, Problem, read_observation

__all__ = ["Runner"]

TAGGED = re.compile(r"\[rank *(\d+)\]: (.*)")
LAST = 1 << 16
"""Bytes of a run's output that are looked at, the last ones."""

PATIENCE, TIMES = 120.0, 30.0
"""Seconds of this machine's time that a run may take, and times the run without faults."""

GRACE = 10.0
"""Seconds in which a run may end its ranks by itself after SIGTERM."""

LOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    "gpusim.torch.distributed.faults.dying",
    "gpusim.torch.distributed.faults.survivors",
    "gpusim.torch.distributed.faults.files",
    "gpusim.torch.distributed.faults.stores",
    "gpusim.torch.distributed.faults.values",
    "gpusim.torch.distributed.launching",
    "gpusim.tools.elastic",
    "gpusim.tools.faults.observing",
    "gpusim.recording",
)
"""Modules that each run needs, and that each fork would import for itself."""

SHARED = ("gpusim", "torch")
"""Modules of these packages that a run imports are imported before the forks."""

NOT_SHARED = ("torch._inductor", "torch.utils.tensorboard", "torch.testing")


@dataclass(frozen=True)
class _Running:
    """A run that has begun: its place in the list, its folder, and when it is to be over."""

    place: int
    process: int
    folder: Path
    limit: float


class Runner:
    """Runs the script of a campaign.

    **Arguments**: `options` are the command's; `command` is `gpusim torchrun` with one run of it.
    `folder` is for all that runs leave, and is the caller's to remove.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        command: Callable[[argparse.Namespace], int],
        ranks: int,
        folder: Path,
        jobs: int,
    ) -> None:
        self.options, self.command, self.ranks = options, command, ranks
        self.folder, self.jobs = folder, jobs
        self.has_place = any(PLACE in word for word in options.arguments)
        self.home = Path.cwd()
        self.patience = PATIENCE
        self.count = 0
        if not self.has_place:
            check_size(self.home)
            # Once: changes that others make there meanwhile are no run's.
            copy_folder(self.home, folder / "home")

    def prepare(self, first: Observation | None = None) -> None:
        """Import what all runs need, and what the first run's ranks have imported of torch."""
        for name in LOADED:
            importlib.import_module(name)
        if first is not None:
            for name in first.modules:
                if name.split(".")[0] in SHARED and not name.startswith(NOT_SHARED):
                    with suppress(Exception):  # a stand-in, or a module that its package makes
                        importlib.import_module(name)
            for path in first.sources:
                linecache.getline(path, 1)
            self.patience = PATIENCE + TIMES * first.seconds
        # Collections in the forks would copy the memory that they share.
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """Let this process collect its objects again."""
        gc.unfreeze()

    def undisturbed(self) -> Observation:
        """Run it without faults, and see all that faults could disturb."""
        return next(self._run([((), True)]))[1]

    def run(self, faults: tuple[Fault, ...]) -> Observation:
        """Run it with a plan."""
        return next(self.run_all([faults]))[1]

    def run_all(self, plans: Iterable[tuple[Fault, ...]]) -> Iterator[tuple[int, Observation]]:
        """Run it with each of the plans, several at a time.

        Yields the place of a plan and what was observed, as runs end. If the caller stops, those
        that run are ended.
        """
        yield from self._run((faults, False) for faults in plans)

    def _run(
        self, plans: Iterable[tuple[tuple[Fault, ...], bool]]
    ) -> Iterator[tuple[int, Observation]]:
        left = enumerate(plans)
        with self._runs() as (selector, running):
            more = True
            while more or running:
                while more and len(running) < self.jobs:
                    following = next(left, None)
                    if following is None:
                        more = False
                        break
                    place, (faults, counts) = following
                    self._begin(place, faults, counts, selector, running)
                yield from self._wait(selector, running)

    @contextmanager
    def _runs(self) -> Iterator[tuple[DefaultSelector, dict[int, _Running]]]:
        """A block with runs, of which none is left at its end."""
        running: dict[int, _Running] = {}
        selector = DefaultSelector()
        try:
            yield selector, running
        finally:
            for each in running.values():
                with suppress(ProcessLookupError):
                    os.kill(each.process, signal.SIGTERM)
            limit = time.monotonic() + GRACE
            while running and (ready := selector.select(max(0.0, limit - time.monotonic()))):
                for key, _ in ready:
                    self._end(key.fd, selector, running)
            for descriptor, each in list(running.items()):
                _kill(each.process)
                self._end(descriptor, selector, running)
            selector.close()

    def _begin(
        self,
        place: int,
        faults: tuple[Fault, ...],
        counts: bool,
        selector: DefaultSelector,
        running: dict[int, _Running],
    ) -> None:
        self.count += 1
        folder = self.folder / f"run-{self.count}"
        for name in ("", "own", "temporary", "left"):
            (folder / name).mkdir()
        process = begin_fork(lambda: self._in_fork(folder, faults, counts), folder / "errors", True)
        descriptor = os.pidfd_open(process)
        selector.register(descriptor, EVENT_READ)
        limit = time.monotonic() + self.patience
        running[descriptor] = _Running(place, process, folder, limit)

    def _wait(
        self, selector: DefaultSelector, running: dict[int, _Running]
    ) -> Iterator[tuple[int, Observation]]:
        """Wait until a run has ended, and read what it has left."""
        if not running:
            return
        limit = min(each.limit for each in running.values())
        ready = selector.select(max(0.0, limit - time.monotonic()))
        expired = set()
        if not ready:
            for descriptor, each in running.items():
                if each.limit <= time.monotonic():
                    _kill(each.process)
                    expired.add(descriptor)
        for descriptor in [key.fd for key, _ in ready] or sorted(expired):
            own = running[descriptor]
            code = self._end(descriptor, selector, running)
            found = read_observation(own.folder / "left", self.ranks, code)
            shutil.rmtree(own.folder, ignore_errors=True)
            if code in (130, 143) and descriptor not in expired:
                raise KeyboardInterrupt
            yield own.place, replace(found, expired=descriptor in expired)

    def _end(self, descriptor: int, selector: DefaultSelector, running: dict[int, _Running]) -> int:
        """Take a run that has ended from those that run; its exit code."""
        own = running.pop(descriptor)
        selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(own.process, 0)
        # Workers of its ranks, which know no other end.
        _kill(own.process)
        return exit_code(status)

    # In the fork

    def _in_fork(self, folder: Path, faults: tuple[Fault, ...], counts: bool) -> int:
        """Run the command with the plan; the exit code."""
        from gpusim.tools import elastic
        from gpusim.torch.distributed.runners import processes

        processes.is_frozen = True
        begun, imported = _cpu_seconds(), set(sys.modules)
        own = copy.copy(self.options)
        own.quiet, own.verbose, own.only_rank = True, 0, None
        own.faults, own.watched = plan_text(faults) or None, True
        own.arguments = [each.replace(PLACE, str(folder / "own")) for each in own.arguments]
        own.traced = json.dumps({"faults": str(folder / "left")})
        own.check_report = folder / "left" / "findings" if own.check is not None else None
        own.preload = []  # imported already
        own.runs = own.jobs = own.json = own.page = None
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "temporary")
        if not self.has_place:
            if not os.path.isabs(own.script) and not own.module:
                own.script = str(self.home / own.script)
            copy_folder(self.folder / "home", folder / "own")
            os.chdir(folder / "own")
        before = stamps(folder / "own")
        watching.ask(folder / "left", counts)
        code = 1
        try:
            code = self.command(own)
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            outcome = elastic.last_outcome
            shown = [(folder / name).read_bytes() for name in ("output", "errors")]
            names = [(str(folder / "own"), PLACE), (str(folder / "temporary"), "{temporary}")]
            standard, errors = (_clean(each, names) for each in shown)
            left: dict[str, Any] = {
                "lines": _last_lines(standard),
                "output": standard[-LAST:] + errors[-LAST:],
                "files": digests(folder / "own", before),
                "seconds": _cpu_seconds() - begun,
                "findings": _findings(own.check_report),
                "modules": sorted(set(sys.modules) - imported),
            }
            if outcome is not None:
                left |= {"attempts": outcome.attempts, "hung": outcome.hung}
                left["error"] = "" if outcome.error is None else str(outcome.error)
                left["problems"] = [
                    asdict(Problem(each.attempt, each.rank, each.how, each.message, each.by_agent))
                    for each in outcome.failures
                ]
            replace_text(folder / "left" / "left.json", json.dumps(left))
        return code


def _cpu_seconds() -> float:
    import resource  # Windows has none; runs are processes on Linux

    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _kill(process: int) -> None:
    """Kill the process group of a run."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _clean(text: bytes, names: Sequence[tuple[str, str]]) -> str:
    """The text, with words for the run's own folders."""
    shown = text.decode(errors="replace")
    for path, word in names:
        shown = shown.replace(path, word)
    return shown


def _last_lines(text: str) -> dict[int, str]:
    """The last line that each rank has written to its standard output."""
    found = {}
    for line in text.splitlines():
        if match := TAGGED.match(line):
            found[int(match[1])] = match[2]
    return found


def _findings(path: Path | None) -> list[str]:
    if path is None or not path.exists():
        return []
    rows = json.loads(path.read_text())
    return [f"{row.get('kind', '')}: {row.get('text', '')}" for row in rows]
