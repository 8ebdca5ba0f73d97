"""make gpu: everything that a machine with a GPU can check, from what is installed there.

Needs no network: packages that the machine lacks come from the folder `wheels`, which
`make gpu-wheels` fills. Results are written as they come. What has passed, of the same sources on
the same GPU, is not run again. A limit of time is shared by the steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import machine
from tests.gpu import borrowed, needs, results, wheels
from tests.gpu.process import GRACE, ROOT, Done
from tests.gpu.process import run as run_process
from tests.gpu.steps import STEPS, Context, Step

WORK = ROOT / ".gpu"  # the installed wheels, and compiled kernels
BOOT = Path("/proc/sys/kernel/random/boot_id")
LIMIT = 540.0  # seconds for one step
PROBE = 180.0  # seconds for the first look at the GPU, and for importing PyTorch from a cold disk
TAIL = 2.0  # seconds for the last words
WORDS = {True: "passed", False: "FAILED", None: "not run"}
LEFT = "left"
FAILED, WRONG_ARGUMENTS, UNFINISHED, INTERRUPTED = 1, 2, 3, 130  # exit codes


class Display:
    """The output: lines of the steps, and how far they are.

    On a terminal the last line tells the time; else a line does after half a minute of silence.
    """

    SILENCE = 30.0

    def __init__(self, log: Path) -> None:
        self._log = log.open("a", encoding="utf-8", errors="replace")
        self._terminal = sys.stdout.isatty()
        self._said = self._start = self._step_start = time.monotonic()
        self._name, self._percent = "", 0
        self._limit = self._expected = self._later = 0.0

    def begin(self, name: str, limit: float, expected: float, later: float) -> None:
        """A step begins: the seconds that it may take, that it and that those behind it need."""
        self._name, self._limit, self._percent = name, limit, 0
        self._expected, self._later = expected, later
        self._step_start = time.monotonic()
        self.line(f"--- {name}\n")

    def line(self, text: str) -> None:
        self._log.write(text)
        self._log.flush()
        if self._terminal:
            print("\r\033[K", end="")
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
        self._said = time.monotonic()
        percent = re.search(r"\[ *(\d+)%\]$", text.rstrip())
        self._percent = int(percent[1]) if percent else self._percent

    def tick(self) -> None:
        now = time.monotonic()
        if not self._terminal and now - self._said < self.SILENCE:
            return
        spent = now - self._step_start
        left = max(0.0, self._expected - spent)
        if self._percent:
            left = spent * (100 - self._percent) / self._percent
        left = min(left, self._limit - spent)
        text = (
            f"{self._name}: {_clock(spent)} of at most {_clock(self._limit)}; in all "
            f"{_clock(now - self._start)}, about {_clock(left + self._later)} left"
        )
        if self._terminal:
            print(f"\r\033[K{text}", end="", flush=True)
        else:
            print(f"... {text}", flush=True)
            self._said = now


def _clock(seconds: float) -> str:
    return f"{int(max(0, seconds)) // 60}:{int(max(0, seconds)) % 60:02}"


Probe = Callable[[dict[str, str]], dict[str, Any]]


def parser(steps: Sequence[str]) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, epilog=f"steps, in this order: {', '.join(steps)}"
    )
    add = made.add_argument
    step: dict[str, Any] = {"action": "append", "choices": list(steps), "metavar": "STEP"}
    add("--only", **step, help="run this step; may be repeated")
    add("--skip", **step, default=[], help="leave this step out; may be repeated")
    add("--again", action="store_true", help="run steps and tests that have passed before, too")
    add("--limit", type=_seconds, help="seconds for all; what is left runs the next time")
    add(
        "--carry",
        type=Path,
        metavar="FOLDER",
        help="on a borrowed machine: go on from this folder's results and kernels, leave them too",
    )
    add("--step-limit", type=_seconds, default=LIMIT, help="seconds for one step (default 540)")
    add("--out", type=Path, help="folder of the results (default $OUT, else bench/results)")
    add("--wheels", type=Path, default=wheels.FOLDER, help="folder of wheels (default wheels)")
    add(
        "--fake",
        action="store_true",
        default=bool(os.environ.get(needs.FAKE)),
        help="on a simulated GPU: CuPy on the host's memory",
    )
    add("--kernels", metavar="ARCH", help="compile all kernels for such a GPU instead, without one")
    return made


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


_seconds.__name__ = "number of seconds"  # argparse names it in errors


def main(
    arguments: Sequence[str] | None = None,
    steps: Mapping[str, Step] = STEPS,
    probe: Probe | None = None,
) -> int:
    """Run the steps; see the module.

    **Arguments**:

    - `steps`, `probe`: others than those of `make gpu`, for tests.

    **Returns**: the exit code: 0 if all steps have passed, 1 if one has failed or nothing can run,
    2 for wrong arguments, 3 if the time is over and steps are left, 130 after Ctrl-C.
    """
    given = parser(list(steps)).parse_args(arguments)
    if given.kernels:
        words = [sys.executable, "-m", "tests.gpu.kernels", given.kernels]
        environment = _environment(given.wheels, fake=False)
        return subprocess.run(words, env=environment, cwd=ROOT, check=False).returncode
    out = given.out or Path(os.environ.get("OUT") or ROOT / "bench" / "results")
    try:
        out = out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        display = Display(out / "gpu-log.txt")
    except OSError as error:
        print(f"make gpu: the results cannot be written: {error}", file=sys.stderr)
        return WRONG_ARGUMENTS
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # also where a shell ignores them
        signal.signal(number, _interrupt)
    try:
        return _run(given, out, display, steps, probe or _probe)
    except KeyboardInterrupt:
        print("\nmake gpu: interrupted; run it again to go on", file=sys.stderr)
        return INTERRUPTED


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _run(
    given: argparse.Namespace,
    out: Path,
    display: Display,
    steps: Mapping[str, Step],
    probe: Probe,
) -> int:
    end = time.monotonic() + (given.limit or float("inf")) - TAIL
    if given.carry:
        end -= borrowed.END
        borrowed.take(given.carry, out, WORK)
    try:
        environment = _environment(given.wheels, given.fake)
        found = probe(environment)
    except RuntimeError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return FAILED
    lacking = needs.missing(found)
    if lacking:
        print(needs.screen(lacking))
    if any(need.costs == needs.ALL for need in lacking):
        print("make gpu: nothing can run here", file=sys.stderr)
        return FAILED
    gpu, file = found["gpu"], out / "gpu-results.jsonl"
    key = results.key_of(gpu, found["versions"])
    about = found.pop("machine")
    began = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    results.append(file, step="run", key=key, found=found, machine=about, started=began)
    print(f"{gpu['name']}, driver {gpu['driver']}, commit {about['commit']}; results in {out}")
    running = _Running(given, out, display, steps, environment, found, key, end)
    try:
        table = running.all(given.only or list(steps))
    finally:
        if given.carry:
            borrowed.leave(out, WORK)
    display.line("---\n")
    for name, word, seconds, said in table:
        display.line(f"{name:10} {word:8} {seconds:7.1f} s  {said}\n")
    words = {word for _, word, _, _ in table}
    if LEFT in words and WORDS[False] not in words:
        display.line("make gpu: time is over; run it again for the steps that are left\n")
    return FAILED if WORDS[False] in words else UNFINISHED if LEFT in words else 0


Row = tuple[str, str, float, str]  # a step, the word for its end, its seconds, and a line about it


@dataclass(frozen=True)
class _Running:
    """The run of steps, which ends at the time `end`."""

    given: argparse.Namespace
    out: Path
    display: Display
    steps: Mapping[str, Step]
    environment: dict[str, str]
    found: dict[str, Any]
    key: str
    end: float

    @property
    def file(self) -> Path:
        return self.out / "gpu-results.jsonl"

    def all(self, names: Sequence[str]) -> list[Row]:
        """Run these steps: those that are not skipped and have not passed."""
        chosen = [name for name in names if name not in self.given.skip]
        passed = set() if self.given.again else _passed(self.file, self.key)
        table = [(name, WORDS[True], 0.0, "by an earlier run") for name in chosen if name in passed]
        left = [name for name in chosen if name not in passed]
        most = self.given.step_limit
        plan = _plan(self.steps, left, self.end - time.monotonic(), most)
        planned = ", ".join(f"{name} {seconds:.0f}" for name, seconds in plan.items())
        print(f"the plan, in seconds: {planned}; in all {_clock(sum(plan.values()))}")
        while left:
            share = _share(self.steps, left, self.end - time.monotonic(), most)
            name, *left = left
            if table and table[-1][:2] == ("smoke", WORDS[False]):
                table += [(later, LEFT, 0.0, "smoke has failed") for later in (name, *left)]
                break
            if share <= 0:
                table.append((name, LEFT, 0.0, "no time"))
                continue
            later = sum(plan[name] for name in left)
            self.display.begin(name, share, self.steps[name].expected, later)
            table.append(self.one(name, share))
        return table

    def one(self, name: str, share: float) -> Row:
        """Run a step, and record its end. One that is cut because all time is limited has not
        failed."""
        # An orderly end, and the kill of what has none, are in the share.
        grace, start = min(GRACE, share / 5), time.monotonic()
        cut = start + share - grace
        word, said = "interrupted", ""
        try:
            verdict, said = self.steps[name].run(self.context(name, cut, grace))
            word = WORDS[verdict]
        except TimeoutError:
            word, said = WORDS[False], "cut before its last command"
        except Exception as error:  # the other steps go on
            word, said = WORDS[False], f"{type(error).__name__}: {error}"
        finally:
            seconds = round(time.monotonic() - start, 1)
            limited = share < self.given.step_limit
            if word == WORDS[False] and limited and time.monotonic() >= cut:
                word = LEFT
            ended = {"ended": word, "seconds": seconds, "said": said}
            results.append(self.file, step=name, key=self.key, **ended)
        return name, word, seconds, said

    def context(self, name: str, cut: float, grace: float) -> Context:
        """What the step runs with; its commands are interrupted at the time `cut`."""
        recorded = {results.FILE: str(self.file), results.KEY: self.key, results.STEP: name}

        def command(words: Sequence[str], most: float | None = None, **variables: str) -> Done:
            left = min(most or float("inf"), cut - time.monotonic())
            if left <= 0:
                raise TimeoutError
            everything = self.environment | recorded | variables
            show, tick = self.display.line, self.display.tick
            return run_process(words, left, everything, show, tick, grace)

        return Context(
            command,
            self.out,
            self.file,
            self.key,
            began=len(results.records(self.file, self.key)),
            device=machine.slug(self.found["gpu"]["name"]),
            fake=self.given.fake,
            again=self.given.again,
            without_torch=needs.without_torch(self.found),
        )


def _share(steps: Mapping[str, Step], names: Sequence[str], left: float, most: float) -> float:
    """The seconds that the first of these steps may take; 0 if the time does not reach for it.

    The first steps are worth most: each may take what those behind it do not need at least. One
    that hangs may take twice what is expected, so that the others are begun, too.
    """
    if left == float("inf"):
        return most
    least, *behind = (min(steps[name].least, most) for name in names)
    if left < least / 2:  # half: the kill of a step before took longer
        return 0.0
    for kept in behind:  # the first of those behind for which there is time
        if left - kept < least:
            break
        left -= kept
    return min(left, 2 * steps[names[0]].expected, most)


def _plan(
    steps: Mapping[str, Step], names: Sequence[str], left: float, most: float
) -> dict[str, float]:
    """The seconds of each step, if none takes longer than expected."""
    plan = {}
    for index, name in enumerate(names):
        plan[name] = min(_share(steps, names[index:], left, most), steps[name].expected)
        left -= plan[name]
    return plan


def _passed(file: Path, key: str) -> set[str]:
    """The steps whose last end, of the same key, is that they passed."""
    ends = {line["step"]: line["ended"] for line in results.records(file, key) if "ended" in line}
    return {step for step, ended in ends.items() if ended == WORDS[True]}


def _environment(folder: Path, fake: bool) -> dict[str, str]:
    """The variables of all commands: packages from wheels, caches, and settings for one GPU."""
    paths = [str(ROOT)]
    environment = dict(os.environ)
    if any(folder.glob("*.whl")):
        site = WORK / "site"
        problem = wheels.install(folder, site)
        if problem:
            print(f"make gpu: the wheels in {folder} are not used: {problem}", file=sys.stderr)
        else:
            paths.append(str(site))
        if not problem and (site / "bin" / "mpirun").exists():
            environment["PATH"] = f"{site / 'bin'}:{environment.get('PATH', '')}"
            libraries = environment.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [f"{site / 'lib'}", libraries]))
            environment["OPAL_PREFIX"] = str(site)
    environment["PYTHONPATH"] = ":".join(filter(None, [*paths, environment.get("PYTHONPATH")]))
    caches = WORK / ("fake-cache" if fake else "cache")
    environment |= {
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUPY_CACHE_DIR": str(caches / "cupy"),
        "GPUSIM_CACHE_DIR": str(caches / "gpusim"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # else JAX takes most of the GPU's memory
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    if fake:
        environment["GPUSIM_FAKE_CUDA"] = "1"
    caches.mkdir(parents=True, exist_ok=True, mode=0o700)
    return environment


def _probe(environment: dict[str, str]) -> dict[str, Any]:
    """What is here, as a process of its own sees it: a broken driver may hang.

    That process answers in parts. One that hangs or is killed loses only the parts that follow. A
    whole answer is kept until the machine is started again, or something else is installed.
    """
    asked, file = _asked(environment), WORK / "probe.json"
    try:
        kept = json.loads(file.read_text())
        if kept["asked"] == asked:
            return dict(kept["found"])
    except (OSError, ValueError, KeyError):
        pass  # not asked yet
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        said: list[str] = []
        command = [sys.executable, "-m", "tests.gpu.needs", answer.name]
        done = run_process(command, PROBE, environment, said.append)
        found: dict[str, Any] = {}
        for part in answer:
            if part.endswith("\n"):  # else it was killed while it wrote
                found |= json.loads(part)
    if not found:
        reason = "it hangs" if done.code is None else f"exit code {done.code}"
        raise RuntimeError(f"the GPU cannot be asked: {reason}: {''.join(said[-3:])}")
    if found["gpu"] and needs.without_torch(found) is None:
        file.write_text(json.dumps({"asked": asked, "found": found}))
    return found


def _asked(environment: dict[str, str]) -> str:
    """A digest of all that an answer depends on."""
    paths = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", needs.FAKE)
    installed = sorted(f"{found.name} {found.version}" for found in metadata.distributions())
    about = [
        BOOT.read_text() if BOOT.exists() else str(time.time()),
        sys.version,
        sys.prefix,
        [environment.get(name) for name in paths],
        installed,
        results.key_of(),
        machine.commit(),
    ]
    return hashlib.sha256(repr(about).encode()).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
