"""Collectives of a World of two instances beside raw MPI's on the same data.

`bench.world_program` measures, in processes under mpirun; this starts it and reads its output.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO

from bench import machine, mpirun
from bench.cases import MI, Size
from bench.peers.remote import ROOT, end
from bench.results import Exchange

INSTANCES = 2
#: Replicas that an instance holds, elements of each one's float32 value.
SIZES: tuple[Size, ...] = ((1, 4 * MI), (1, 16 * MI), (4, 4 * MI), (4, 16 * MI))
QUICK_SIZES = tuple(size for size in SIZES if size[1] == 4 * MI)
PATIENCE = 300.0  # seconds for all of it
ERROR = re.compile(r"[\w.]*Error(:|$)")  # a traceback's last line, and none of its source lines
COPIES = 6  # of an instance's values, that it needs beside all values of one


def exchanges(
    budget: float, sizes: Sequence[Size] = SIZES, patience: float = PATIENCE
) -> Iterator[Exchange]:
    """The results, one after the other; `budget` seconds for each collective and size.

    If nothing can be measured, an Exchange says why.
    """
    start = mpirun.command(INSTANCES)
    if start is None:
        yield failure("mpirun is not installed")
        return
    free = machine.available_bytes()
    fitting = [size for size in sizes if free is None or needed(size) <= free]
    for held, elements in set(sizes) - set(fitting):
        yield failure("not enough memory", held, elements)
    if not fitting:
        return
    names = [f"{held}x{elements}" for held, elements in fitting]
    with tempfile.TemporaryFile() as log:
        yield from _run([*start, *program(), str(budget), *names], log, patience)


def program() -> list[str]:
    return [sys.executable, "-m", "bench.world_program"]


def needed(size: Size) -> int:
    """The memory that all instances take, about: instance 0 holds all values to check the sums."""
    held, elements = size
    return INSTANCES * held * elements * 4 * (COPIES + 1)


def failure(problem: str, held: int = 0, elements: int = 0) -> Exchange:
    return Exchange("", "", INSTANCES, held, elements, None, None, problem)


def _run(command: Sequence[str], log: IO[bytes], patience: float) -> Iterator[Exchange]:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=mpirun.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,  # Ctrl-C is for the bench, which then ends it
    )
    late = threading.Event()

    def give_up() -> None:
        late.set()
        end(process, patience=0)

    timer = threading.Timer(patience, give_up)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"{"):
                yield Exchange.of(json.loads(line))
        code = process.wait()
        if late.is_set():
            yield failure(f"not done in {patience:g} s")
        elif code:
            log.seek(0)
            said = log.read().decode(errors="replace").splitlines()
            words = (text.strip() for text in said if ERROR.match(text.strip()))
            yield failure(next(words, f"exit code {code}")[:160])
    finally:
        timer.cancel()
        end(process, patience=0)
        if process.stdout is not None:
            process.stdout.close()
