"""The agent of `gpusim torchrun`: ranks that fail begin anew, or the report names who failed first.

torchrun's agent waits until a rank's process ends badly, ends the others by SIGTERM, and starts all
of them again as often as --max-restarts says, with a new rendezvous. A launch whose ranks may die
(`gpusim.torch.distributed.faults`) ends the others in a deterministic way; here are the starts, the
variables that ranks of each start have, the files in which `@record` leaves errors, and the report.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpusim.tools.error_files import ErrorFiles, error_files, variables
from gpusim.tools.options import UsageError, note

if TYPE_CHECKING:
    from gpusim.torch.distributed.faults.endings import Ending, Endings
    from gpusim.torch.distributed.faults.plans import Fault

__all__ = [
    "Failure",
    "Outcome",
    "SIGNALS",
    "add_elastic",
    "check_elastic",
    "error_files",
    "is_elastic",
    "last_outcome",
    "run_attempts",
    "show_outcome",
    "variables",
]

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""The signals that torchrun passes on to ranks, unless it is told others."""

MOST_SHOWN = 8
"""How many failures the report has beside the first one."""

MOST_LINES = 60
"""How many lines of a traceback the report has, the last ones."""

WIDTH = 60
"""The width of the report's rules, in characters; torchrun's."""

OURS = "gpusim_ranks.py:"
"""The hook of init_process_group, which is not a place in the program."""

ALONE = {
    "--faults": "plans of faults",
    "--max-restarts": "ranks that begin anew",
}

RunOnce = Callable[[int, Sequence[Mapping[str, str]]], "Endings"]


def add_elastic(parser: Any) -> None:
    """Add --max-restarts and --faults."""
    from gpusim.tools.options import whole_number

    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="begin anew up to N times, with all ranks, when a rank has ended badly; the others "
        "see what c10d shows until the agent ends them (default: %(default)s: an error ends all)",
    )
    parser.add_argument(
        "--faults",
        metavar="PLAN",
        help="let faults happen: 'kill rank=2 call=17', several with commas between; exit, kill, "
        "raise, hang, late, store-timeout, torn, missing, flip, flip-result, nan",
    )


def is_elastic(options: argparse.Namespace) -> bool:
    """Whether ranks may die, and the others go on until the agent ends them."""
    watched = getattr(options, "watched", False)  # of a campaign
    return bool(options.faults) or options.max_restarts > 0 or watched


def check_elastic(options: argparse.Namespace, ranks: int, processes: bool) -> None:
    """Read the plan into `options.plan`, and refuse options that contradict it.

    **Raises**: UsageError.
    """
    from gpusim.torch.distributed.faults.plans import PlanError, check_ranks, parse

    options.plan = ()
    if not is_elastic(options) and options.faults is None:
        return
    name = "--faults" if options.faults is not None else "--max-restarts"
    if options.instances > 1:
        raise UsageError(f"{name}: {ALONE[name]} are for one instance: leave out --instances")
    if not processes:
        if name == "--max-restarts" and not options.threads and options.device != "cuda":
            # torchrun's own words, which a script's README has: they were never of use here.
            note(options, "--max-restarts: ranks that are threads do not begin anew")
            options.max_restarts = 0
            return
        way = "--threads" if options.threads else f"--device {options.device}"
        way = "--processes" if way == "--device None" else f"leave out {way}"
        raise UsageError(f"{name}: {ALONE[name]} are for ranks as processes: {way}")
    if options.orders or options.check_order is not None:
        raise UsageError(f"{name}: --orders and --check-order compare runs without failures")
    if options.faults is None:
        return
    if options.schedule == "free":
        raise UsageError("--faults: the same plan has the same end in turns: leave out --schedule")
    try:
        options.plan = parse(options.faults)
        check_ranks(options.plan, ranks)
    except PlanError as error:
        raise UsageError(f"--faults: {error}") from None


# ---------------------------------------------------------------- starts


@dataclass(frozen=True)
class Failure:
    """A rank that has ended badly.

    **Attributes**: `how` says it in words that follow the rank's name; `message` is that of the
    error file, or of the exception, and `traceback` likewise; `recorded` says that there was an
    error file. `code` is the exit code, or minus the signal's number; `by_agent` says that the
    agent has ended it, as another rank had failed. `site` is where its last call was, and `faults`
    are those of the plan that had happened to it.
    """

    attempt: int
    rank: int
    how: str
    message: str
    code: int
    traceback: str = ""
    by_agent: bool = False
    site: str = ""
    recorded: bool = False
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a run has ended, over all its starts.

    **Attributes**: `attempts` is how many starts there were; `failures` are all ranks that have
    ended badly, by start, the first failure first; `recovered` says that there were failures and
    the last start ended well; `hung` is the text of why no rank could go on, with no limit that
    would have ended that; `error` is gpusim's own error that ended all, `hung`'s too; `left` are
    the faults that did not happen, and why; `happened` those that did.
    """

    attempts: int
    failures: list[Failure] = field(default_factory=list)
    recovered: bool = False
    hung: str = ""
    error: Exception | None = None
    left: list[tuple[Fault, str]] = field(default_factory=list)
    happened: list[Fault] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether the last start did not end well."""
        last = self.attempts - 1
        return self.error is not None or any(each.attempt == last for each in self.failures)

    @property
    def root(self) -> Failure | None:
        """The first failure of the last start, if it failed."""
        last = self.attempts - 1
        return next((each for each in self.failures if each.attempt == last), None)


# Written by the command's thread at the end of a run; read by campaigns, in the same process.
last_outcome: Outcome | None = None
"""The outcome of the last run of this process."""


def run_attempts(options: argparse.Namespace, run_once: RunOnce, ranks: int = 1) -> Outcome:
    """Start all ranks, and again after a failure, as often as --max-restarts says.

    **Arguments**: `options` has `max_restarts` and `plan`; `run_once` starts `ranks` ranks, and
    waits for their ends: it gets the number of the start, and the variables to add by rank.

    **Returns**: the outcome, which `last_outcome` has too.
    """
    global last_outcome
    failures: list[Failure] = []
    left: list[tuple[Fault, str]] = []
    happened: list[Fault] = []
    attempt, error = 0, None
    with error_files() as files:
        while True:
            endings = run_once(attempt, variables(files, ranks, attempt, options.max_restarts))
            failures += failures_of(endings, attempt, files)
            left += endings.left
            happened += endings.happened
            error = endings.error
            root = endings.root
            if error is not None or root is None or attempt >= options.max_restarts:
                break
            attempt += 1
            how = f"rank {root.rank} {one_line(str(root))}"
            how += "".join(f" ({each})" for each in faults_of(endings, root.rank))
            print(
                f"gpusim torchrun: {how}; all ranks begin anew, restart {attempt} of "
                f"{options.max_restarts}",
                file=sys.stderr,
            )
    later = [each for each in options.plan if each.attempt > attempt]
    left += [(each, f"there was no start {each.attempt}") for each in later]
    last_outcome = Outcome(
        attempt + 1,
        failures,
        bool(attempt) and error is None and all(each.attempt < attempt for each in failures),
        str(error) if error is not None and is_hang(error) else "",
        error,
        left,
        happened,
    )
    return last_outcome


def is_hang(error: Exception) -> bool:
    """Whether an error says that no rank can go on."""
    from gpusim.errors import DeadlockError

    return isinstance(error, DeadlockError)


def failures_of(endings: Endings, attempt: int, files: ErrorFiles) -> list[Failure]:
    """The ranks of one start that have ended badly, in the order in which they ended."""
    ended = [endings.ranks[rank] for rank in endings.order]
    bad = [each for each in ended if each.code]
    root = endings.root
    if root is not None:
        bad.remove(root)
        bad.insert(0, root)
    found = []
    for each in bad:
        found.append(failure_of(each, attempt, files, faults_of(endings, each.rank)))
    return found


def faults_of(endings: Endings, rank: int) -> tuple[Fault, ...]:
    """The faults of the plan that have happened to a rank."""
    return tuple(fault for fault in endings.happened if fault.rank == rank)


def failure_of(
    ending: Ending, attempt: int, files: ErrorFiles, faults: tuple[Fault, ...]
) -> Failure:
    """A rank that has ended badly, with what it has left in its error file."""
    left = files.read(ending.rank, attempt)
    message, trace = ending.message, ending.traceback
    if left is not None:
        message, trace = left.message or message, left.traceback or trace
    return Failure(
        attempt,
        ending.rank,
        str(ending),
        message,
        ending.code,
        trace,
        ending.by_agent,
        "" if OURS in ending.site else ending.site,
        left is not None,
        faults,
    )


# ---------------------------------------------------------------- the report


def show_outcome(options: argparse.Namespace, outcome: Outcome, local_size: int) -> int:
    """Show who failed, as torchrun's report, and the faults that did not happen; the exit code."""
    for fault, why in outcome.left:
        print(f"gpusim torchrun: did not happen: {fault}: {why}", file=sys.stderr)
    if not outcome.failed:
        if outcome.recovered:
            count = outcome.attempts - 1
            note(options, f"all ranks ended well after {count} restart{'s' * (count > 1)}")
        return 0
    if outcome.root is not None:
        print("\n".join(report(options.script, outcome, local_size)), file=sys.stderr)
    if outcome.error is not None:
        print(f"gpusim torchrun: {outcome.error}", file=sys.stderr)
    return 1


def report(script: str, outcome: Outcome, local_size: int) -> list[str]:
    """The lines of torchrun's report about the last start.

    Without time, host and process ids: the same plan has the same report.
    """
    last = [each for each in outcome.failures if each.attempt == outcome.attempts - 1]
    root, *others = last
    lines = ["=" * WIDTH, f"gpusim torchrun: {script} FAILED", "-" * WIDTH, "Failures:"]
    for place, each in enumerate(others[:MOST_SHOWN], 1):
        lines += section(place, each, local_size, outcome.attempts)
    if len(others) > MOST_SHOWN:
        lines.append(f"  and {len(others) - MOST_SHOWN} more")
    if not others:
        lines.append("  <NO_OTHER_FAILURES>")
    lines += ["-" * WIDTH, "Root Cause (first observed failure):"]
    lines += section(0, root, local_size, outcome.attempts)
    if not root.faults:  # of another rank, which hangs or has ended well
        other = [each for each in outcome.happened if each.attempt == root.attempt]
        lines += [f"  after     : {each}" for each in other]
    return [*lines, "=" * WIDTH]


def section(place: int, failure: Failure, local_size: int, attempts: int) -> list[str]:
    """The lines of one rank that has ended badly."""
    code = str(failure.code)
    if failure.code < 0:
        by = " of the agent" if failure.by_agent else ""
        code += f" ({signal.Signals(-failure.code).name}{by})"
    # Without `@record` the rank has shown its traceback itself: as torchrun, not once more.
    text = failure.how
    if failure.recorded:
        text = failure.traceback or failure.message or failure.how
    trace = text.rstrip().splitlines()[-MOST_LINES:]
    lines = [
        f"[{place}]:",
        f"  rank      : {failure.rank} (local_rank: {failure.rank % local_size})",
        f"  exitcode  : {code}",
    ]
    if attempts > 1:
        lines.append(f"  start     : {failure.attempt + 1} of {attempts}")
    lines += [f"  fault     : {fault}" for fault in failure.faults]
    if failure.site:
        lines.append(f"  last call : {failure.site}")
    return [*lines, f"  traceback : {trace[0]}", *(f"    {line}" for line in trace[1:])]


def one_line(text: str) -> str:
    """The first line of a text."""
    return text.splitlines()[0] if text else ""
