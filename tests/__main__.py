"""`python -m tests` runs a lane of the suite: what make's targets and CI call.

It calls pytest once for the tests that do not fork and once for those that do, watches that they
make progress, and prints the seed, the CPU seconds by area and what failed. The last line is
pytest's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tests.oracles.budget import AREAS, FORKS, LANES, ROOT, SEED, forks
from tests.oracles.progress import TICK, Watch

#: One thread a process: OpenMP's and OpenBLAS's pools do not survive a fork.
ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PARTS: dict[str, dict[str, str]] = {"plain": {}, "forks": ALONE}
INTERRUPTED, NO_TESTS = 2, 5  # pytest's exit codes


def call(part: str, lane: str, paths: list[str], options: list[str]) -> int:
    """Run pytest, and end the tests that hang."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            **PARTS[part],
            "GPUSIM_TESTS": lane,
            "GPUSIM_TESTS_PART": part,
            "GPUSIM_TESTS_SEED": str(SEED),
            "GPUSIM_TESTS_NOW": folder,
        }
        command = [sys.executable, "-m", "pytest", *paths, *options]
        running = subprocess.Popen(command, cwd=ROOT, env=environment)
        watch = Watch(Path(folder))
        # pytest says what it has done so far. A second SIGINT would cut it off there, so one that
        # the terminal has sent to both is not passed on.
        shared = at_a_terminal()
        before = signal.signal(
            signal.SIGINT, lambda number, _: None if shared else running.send_signal(number)
        )
        try:
            while running.poll() is None:
                watch.look()
                threading.Event().wait(TICK)
        finally:
            signal.signal(signal.SIGINT, before)
            running.terminate()
            running.wait()
    return running.returncode


def at_a_terminal() -> bool:
    """Whether Ctrl-C at a terminal reaches this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def below(pattern: str) -> list[Path]:
    """The test files that a path or pattern names."""
    found: list[Path] = []
    for path in sorted(ROOT.glob(pattern)):
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found


def select(patterns: tuple[str, ...], part: str) -> list[str]:
    """The patterns' paths that have tests of a part; folders stay whole, as pytest sifts them."""
    found = []
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if any(forks(file) == (part == "forks") for file in below(pattern)):
                found.append(str(path.relative_to(ROOT)))
    return found


def named(word: str) -> Path | None:
    """The file or folder whose tests a word of the command names, if it names any."""
    path = ROOT / word.partition("::")[0]
    return None if word.startswith("-") or not path.exists() else path


def of_part(words: list[str], part: str) -> list[str]:
    """The words without files of the other part; of folders pytest itself leaves those out."""
    found = [(word, named(word)) for word in words]
    return [
        word
        for word, path in found
        if path is None or path.is_dir() or forks(path) == (part == "forks")
    ]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests", description=__doc__, epilog="Other options are passed on to pytest."
    )
    parser.add_argument("--lane", choices=LANES, default="change")
    parser.add_argument("--area", choices=AREAS, help="one area, and the quick tests below it")
    parser.add_argument("--part", choices=PARTS, help="one of the two calls of pytest only")
    given, options = parser.parse_known_args(words)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and end pytest
    print(f"Seed {SEED}: SEED={SEED} repeats this run.", flush=True)
    runs: list[tuple[str, tuple[str, ...]]] = [(given.lane, ())]
    if given.area:
        own, needed = AREAS[given.area]
        runs = [("area", needed), ("area" if given.lane == "change" else given.lane, own)]
    chosen = any(map(named, options))
    codes = []
    for part in [given.part] if given.part else PARTS:
        for lane, patterns in runs:
            # Paths in pytest's options replace all. Without paths pytest takes all doctests too.
            every = FORKS if part == "forks" and not chosen else ()
            paths, rest = select(patterns or every, part), of_part(options, part)
            if any(map(named, rest)) if chosen else paths or not given.area:
                print(f"== {part}, {lane}: {' '.join(paths) or 'all'}", flush=True)
                codes.append(call(part, lane, paths, rest))
                if codes[-1] == INTERRUPTED:
                    return INTERRUPTED
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    return failed[0] if failed else (0 if 0 in codes else NO_TESTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
