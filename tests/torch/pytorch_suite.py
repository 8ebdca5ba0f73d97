"""PyTorch's own tests of torch.distributed, on real gloo processes and on simulated ranks.

`python -m tests.torch.pytorch_suite` runs each test of `DistributedTest._DistTestBase`, which is in
the installed torch, in three modes: `gloo` (real processes), `processes` and `threads` (gpusim's
ranks). It prints a table of what passed, failed, was skipped, died or hung, and the counts.

Each test has a process of its own, forked from one that has imported torch, so that a crash, an
exit or a hang is that test's alone. `Watch` decides by progress which ones hang, and shows stacks.

`SUITE_DEVICE=cpu` in the environment runs the tests of GPUs too, on simulated ones.

Two things differ from PyTorch's runner. A rank that fails ends the others of its test, as their
pipes do there. And PyTorch's `Barrier` between ranks, which counts files named by process and
gives up after 10 seconds, is one of a store without a limit: threads share the process.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import fnmatch
import functools
import importlib
import importlib.util
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.oracles.progress import TICK, Watch

__all__ = ["MODES", "Case", "Outcome", "fork", "names", "run", "table"]

MODES = ("gloo", "processes", "threads")
RANKS = 4
JOBS = 3
SUITE = "torch.testing._internal.distributed.distributed_test"
NEVER = datetime.timedelta(hours=10)  # the Watch ends what waits in vain
OUTCOMES = ("passed", "failed", "skipped", "died", "hung")
#: Classes with more tests; a test of this module's has some.
MORE: tuple[type, ...] = ()
LONGEST = 400  # characters of an error in the JSON


@dataclass(frozen=True)
class Case:
    """A test in a mode."""

    test: str
    mode: str


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    **Attributes**: `kind`, one of OUTCOMES; `error`, the first line of why; `output`, which the
    ranks printed, with the traceback; `stacks` of a case that hung.
    """

    kind: str
    error: str = ""
    output: str = ""
    stacks: str = ""


# The tests


@functools.cache
def suite(ranks: int = RANKS) -> Any:
    """Return PyTorch's module of tests. Its decorators read the number of ranks on import."""
    before = dict(os.environ)
    os.environ.update(_environment(ranks))
    if importlib.util.find_spec("expecttest") is None:  # torch.testing's, for tests of texts
        sys.modules["expecttest"] = stand_in = types.ModuleType("expecttest")
        vars(stand_in)["TestCase"] = unittest.TestCase
    try:
        module = importlib.import_module(SUITE)
    finally:
        os.environ.clear()
        os.environ.update(before)
    importlib.import_module("torch").set_num_threads(1)
    importlib.import_module("gpusim.torch.distributed")
    return module


def _environment(ranks: int) -> dict[str, str]:
    own = {"BACKEND": "gloo", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    return own | {"OMP_NUM_THREADS": "1"}


@functools.cache
def tests(ranks: int = RANKS) -> type:
    """Return the class whose methods are the tests, as PyTorch's own files make it."""
    module = suite(ranks)
    bases = (*MORE, module.TestDistBackend, module.DistributedTest._DistTestBase)
    return type("Tests", bases, {})


def names(pattern: str = "", ranks: int = RANKS) -> list[str]:
    """Return the names of the tests that contain a pattern, or match one with `*`."""
    whole = unittest.TestLoader().getTestCaseNames(tests(ranks))
    wanted = pattern if "*" in pattern else f"*{pattern}*"
    return [name for name in whole if fnmatch.fnmatch(name, wanted)]


# In a rank


def body(test: str, ranks: int, folder: str, rank: int) -> str:
    """Run a test on one rank as PyTorch's `TestDistBackend._run` does; why it is skipped, or ''.

    **Raises**: what the test raises.
    """
    dist = importlib.import_module("torch.distributed")
    common = importlib.import_module("torch.testing._internal.common_distributed")
    utils = importlib.import_module("torch.testing._internal.common_utils")
    module = suite(ranks)
    case = tests(ranks)(test)
    case.rank, case.file_name = rank, f"{folder}/init"
    seconds = module.CUSTOM_PG_TIMEOUT.get(test)  # None: PyTorch's minute is short here
    dist.init_process_group(
        init_method=case.init_method,
        backend=module.BACKEND,
        world_size=ranks,
        rank=rank,
        timeout=NEVER if seconds is None else datetime.timedelta(seconds=seconds),
    )
    meet = _Meeting(_store(folder, ranks), ranks)
    case._barrier = meet
    meet()
    utils.set_rng_seed()
    try:
        getattr(case, test)()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as end:
        reasons = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
        if end.code in reasons:
            return f"skipped: {reasons[end.code]}"
        if end.code in (None, 0):
            return ""
        raise RuntimeError(f"the test called sys.exit({end.code!r})") from None
    meet()
    with contextlib.suppress(AssertionError, ValueError):  # the test has done so
        dist.destroy_process_group()
    return ""


def _store(folder: str, ranks: int) -> Any:
    """Return a store of all ranks that has no limit in time, beside that of the default group."""
    dist = importlib.import_module("torch.distributed")
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    if os.environ.get("SUITE_MODE") == "gloo":
        store = dist.FileStore(f"{folder}/meetings", ranks)
        store.set_timeout(NEVER)
        return store
    return dist.PrefixStore("meetings", c10d._get_default_store())


class _Meeting:
    """The tests' `_barrier`: returns when `wait_for` ranks have called it as often."""

    def __init__(self, store: Any, ranks: int) -> None:
        self.store, self.ranks, self.number = store, ranks, 0

    def __call__(self, wait_for: int | None = None, timeout: float = 0) -> None:
        self.number += 1
        arrived = self.store.add(f"arrived {self.number}", 1)
        if arrived >= (wait_for or self.ranks):
            self.store.set(f"met {self.number}", "1")
        self.store.wait([f"met {self.number}"], NEVER)


# In the process of a case


def _run_case(case: Case, ranks: int, folder: Path) -> dict[str, str]:
    """Run the ranks of a case; its outcome as JSON."""
    module = suite(ranks)
    module.INIT_METHOD = f"file://{folder}/shared"
    for name in ("barrier", "test_dir"):
        (folder / name).mkdir()
    os.environ |= _environment(ranks) | {
        "TEMP_DIR": str(folder),
        "INIT_METHOD": module.INIT_METHOD,
        "TMPDIR": str(folder),
        "SUITE_MODE": case.mode,
    }
    program = functools.partial(body, case.test, ranks, str(folder))
    try:
        reasons = (
            _gloo(program, ranks, folder) if case.mode == "gloo" else _ours(program, ranks, case)
        )
    except Exception as error:
        cause = error.__cause__ if type(error).__name__ == "ReplicaError" else None
        trace = "".join(traceback.format_exception(error))
        return {"kind": "failed", "error": _line(cause or error), "trace": trace}
    skips = [reason for reason in reasons if reason]
    return {"kind": "skipped", "error": skips[0]} if skips else {"kind": "passed", "error": ""}


def _ours(program: Callable[[int], str], ranks: int, case: Case) -> list[str]:
    launch = importlib.import_module("gpusim.torch.distributed").launch
    device = os.environ.get("SUITE_DEVICE") or None
    if device:
        common: Any = importlib.import_module("torch.testing._internal.common_distributed")
        common.TEST_CUDA = True
        for module in (common, suite(ranks)):  # which ask for GPUs as a script does
            vars(module)["__name__"] = "pytorch"
    results: list[str] = launch(program, ranks, processes=case.mode == "processes", device=device)
    return results


def _gloo(program: Callable[[int], str], ranks: int, folder: Path) -> list[str]:
    """Run a function on forked processes; the first that fails ends the others."""
    waiting = {
        fork(functools.partial(_write, program, rank, folder)): rank for rank in range(ranks)
    }
    failure: Exception | None = None
    while waiting:
        process, status = os.wait()
        rank = waiting.pop(process)
        if failure is None and status:
            code = os.waitstatus_to_exitcode(status)
            file = folder / f"error{rank}"
            failure = _Failed(
                file.read_text() if file.exists() else f"rank {rank} ended with exit code {code}"
            )
            for other in waiting:
                os.kill(other, signal.SIGKILL)
    if failure is not None:
        raise failure
    return [(folder / f"reason{rank}").read_text() for rank in range(ranks)]


class _Failed(Exception):
    """A process of gloo has failed; its text is the rank's error."""


def _write(program: Callable[[int], str], rank: int, folder: Path) -> int:
    try:
        (folder / f"reason{rank}").write_text(program(rank))
    except BaseException as error:
        traceback.print_exc()
        (folder / f"error{rank}").write_text(_line(error))
        return 1
    return 0


def _line(error: BaseException) -> str:
    """The first line of an error, with its type."""
    if isinstance(error, _Failed):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:LONGEST]


def fork(run: Callable[[], int]) -> int:
    """Fork a process that runs a function and ends with its exit code; its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _live(case: Case, ranks: int, folder: Path) -> int:
    """The process of a case: its output and its outcome go to the folder."""
    os.setpgid(0, 0)
    warnings.resetwarnings()  # those of pytest
    faulthandler.disable()  # pytest's, which writes elsewhere
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    result = _run_case(case, ranks, folder)
    print(result.pop("trace", ""), file=sys.stderr)
    (folder / "outcome.part").write_text(json.dumps(result))
    (folder / "outcome.part").rename(folder / "outcome")
    return 0


# In the process that starts them


class _Running:
    """Cases that run at a time, each in its process. Owner: the thread that made it."""

    def __init__(self, ranks: int, root: Path) -> None:
        self.ranks, self.root = ranks, root
        self.cases: dict[int, Case] = {}
        self.stacks: dict[str, str] = {}
        self.watched = root / "now"
        self.watched.mkdir()
        self.watch = Watch(self.watched)
        self.last_look = time.monotonic()

    def start(self, case: Case) -> None:
        folder = self._folder(case)
        folder.mkdir()
        process = fork(functools.partial(_live, case, self.ranks, folder))
        self.cases[process] = case
        (self.watched / str(process)).write_text(folder.name)

    def ended(self) -> tuple[Case, Outcome]:
        """Wait for the next case that ends."""
        while True:
            for process, case in self.cases.items():
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    (self.watched / str(process)).unlink()
                    del self.cases[process]
                    self._end_ranks(process)
                    return case, self._outcome(case, os.waitstatus_to_exitcode(status))
            time.sleep(0.02)
            if time.monotonic() - self.last_look > TICK:
                self._look()

    def stop(self) -> None:
        """End all cases that run."""
        for process in self.cases:
            self._end_ranks(process)
            os.waitpid(process, 0)

    def _look(self) -> None:
        before, words = len(self.watch.stopped), io.StringIO()
        with contextlib.redirect_stdout(words):
            self.watch.look()
        for name in self.watch.stopped[before:]:
            self.stacks[name] = self.stacks.get(name, "") + words.getvalue()
        self.last_look = time.monotonic()

    def _end_ranks(self, process: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)

    def _folder(self, case: Case) -> Path:
        return self.root / f"{case.mode}-{case.test}"

    def _outcome(self, case: Case, code: int) -> Outcome:
        folder = self._folder(case)
        output = (folder / "output").read_text(errors="replace")
        told = folder / "outcome"
        stacks = self.stacks.get(folder.name, "")
        if stacks:
            return Outcome("hung", "no progress", output, stacks)
        if not told.exists():
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Outcome("died", how, output)
        result = json.loads(told.read_text())
        shutil.rmtree(folder, ignore_errors=True)
        return Outcome(result["kind"], result["error"], output)


def run(
    cases: Iterable[Case], ranks: int = RANKS, jobs: int = JOBS
) -> Iterator[tuple[Case, Outcome]]:
    """Run cases, `jobs` at a time; each with its outcome, as they end.

    The calling process is forked from, so it should have no threads that hold locks, and imports
    torch.testing, which changes global flags of torch's: `fork` one for it.
    """
    suite(ranks)
    tests(ranks)
    left = list(cases)[::-1]
    with tempfile.TemporaryDirectory(prefix="pytorch-suite-", ignore_cleanup_errors=True) as root:
        running = _Running(ranks, Path(root))
        try:
            while left or running.cases:
                while left and len(running.cases) < jobs:
                    running.start(left.pop())
                yield running.ended()
        finally:
            running.stop()


# The table


def table(results: dict[str, dict[str, Outcome]], whole: bool = False) -> str:
    """Return a table of the outcomes by test, and their counts by mode.

    Unless `whole`, rows whose modes agree are left out.
    """
    modes = list(results)
    tests_run = sorted({name for outcomes in results.values() for name in outcomes})
    lines = [f"{'test':<64}" + "".join(f"{mode:<11}" for mode in modes)]
    for name in tests_run:
        row = [results[mode].get(name) for mode in modes]
        if not whole and len({outcome.kind for outcome in row if outcome}) == 1 != len(modes):
            continue
        lines.append(f"{name:<64}" + "".join(f"{o.kind if o else '-':<11}" for o in row).rstrip())
        lines += [
            f"    {mode}: {outcome.error[:150]}"
            for mode, outcome in zip(modes, row, strict=True)
            if outcome and outcome.kind not in ("passed", "skipped")
        ]
    counts = [Counter(outcome.kind for outcome in results[mode].values()) for mode in modes]
    lines += ["", f"{len(tests_run)} tests"]
    lines += [
        f"{kind:<64}" + "".join(f"{count[kind]:<11}" for count in counts).rstrip()
        for kind in OUTCOMES
    ]
    return "\n".join(lines)


def _bar(done: int, whole: int, last: str) -> None:
    if sys.stderr.isatty():
        filled = "#" * (30 * done // max(whole, 1))
        print(f"\r\033[K[{filled:<30}] {done}/{whole} {last:.60}", end="", file=sys.stderr)
        if done == whole:
            print(file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if no test that passes on gloo does anything else in another mode."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torch.pytorch_suite", description=__doc__
    )
    parser.add_argument("--mode", action="append", choices=MODES, help="all unless given")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--jobs", type=int, default=JOBS, help="tests at a time")
    parser.add_argument("-k", default="", metavar="PATTERN", help="part of a name, or one with *")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all outcomes")
    help = "a FILE of --json, whose outcomes on gloo are taken: only what passed there is run"
    parser.add_argument("--like", type=Path, metavar="FILE", help=help)
    parser.add_argument("--all", action="store_true", help="show all rows, not those that differ")
    parser.add_argument("--output", action="store_true", help="show what failing tests printed")
    options = parser.parse_args(arguments)
    modes = options.mode or [mode for mode in MODES if mode != "gloo" or not options.like]
    wanted = names(options.k, options.ranks)
    results: dict[str, dict[str, Outcome]] = {mode: {} for mode in modes}
    if options.like:
        told = json.loads(options.like.read_text())["gloo"]
        wanted = [test for test in wanted if test in told and told[test]["kind"] == "passed"]
        results = {"gloo": {test: Outcome(**told[test]) for test in wanted}, **results}
    cases = [Case(test, mode) for mode in modes for test in wanted]
    for done, (case, outcome) in enumerate(run(cases, options.ranks, options.jobs), 1):
        results[case.mode][case.test] = outcome
        _bar(done, len(cases), f"{case.mode} {case.test} {outcome.kind}")
        if outcome.stacks or (options.output and outcome.kind not in ("passed", "skipped")):
            print(f"== {case.mode} {case.test}: {outcome.kind}\n{outcome.output}{outcome.stacks}")
        if options.json:
            options.json.write_text(
                json.dumps({m: {t: asdict(o) for t, o in r.items()} for m, r in results.items()})
            )
    print(table(results, options.all))
    real = results.get("gloo", {})
    differ = [
        name
        for mode in modes
        for name, outcome in results[mode].items()
        if name in real and real[name].kind == "passed" != outcome.kind
    ]
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
