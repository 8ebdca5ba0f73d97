"""JAX programs with gpusim's sums beside plain JAX's: their time, CPU time and compilation.

A process of `bench.in_jax_program` has one number of devices; its participants take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from threading import Timer
from typing import Any

from bench import machine
from bench.peers.remote import ROOT, end
from bench.results import InJax
from bench.timing import Timing

PATIENCE = 300.0  # seconds for an answer
REDUCTIONS = ("linear", "tree", "ring")
VALUE = 256 * 1024  # bytes of a device's operand
RUN, COMPILE = "run", "compile"
PSUM, INSERTED = "psum in shard_map", "x.sum(0)"


@dataclass(frozen=True)
class Case:
    """The measurements of one process: a program with each of the reductions, and without."""

    measures: str
    program: str
    devices: int
    dtype: str = "float32"
    size: int = VALUE  # bytes of a device's operand, where the program runs
    reductions: Sequence[str] = REDUCTIONS


RUNS = tuple(
    Case(RUN, program, devices, dtype)
    for devices in (64, 8)
    for program in (PSUM, INSERTED)
    for dtype in ("float32", "bfloat16")
)
COMPILATIONS = tuple(
    Case(COMPILE, program, 8, reductions=REDUCTIONS[:1])
    for program in (INSERTED, "training step of an MLP", "gradient of a transformer block")
)
CASES = RUNS + COMPILATIONS


class Failure(Exception):
    """A process cannot measure a case; the message says why."""


class Process:
    """`bench.in_jax_program` on so many devices."""

    def __init__(self, devices: int) -> None:
        self._log = tempfile.TemporaryFile()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.in_jax_program"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the bench, which then ends it
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass
        end(self._process)
        self._process.stdout.close()
        self._log.close()

    def measure(self, case: Case, budget: float) -> dict[str, Any]:
        """The program's answer. **Raises**: Failure with its error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            asked = json.dumps({**asdict(case), "budget": budget})
            self._process.stdin.write(f"{asked}\n".encode())
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone, and so is the answer
        timer = Timer(PATIENCE, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").split("\n")
            raise Failure(next((s.strip() for s in reversed(said) if s.strip()), "no answer")[:160])
        answer: dict[str, Any] = json.loads(line)
        if "problem" in answer:
            raise Failure(answer["problem"])
        return answer


def in_jax_cases(budget: float, cases: Sequence[Case] = CASES) -> Iterator[InJax]:
    """The results of each case, one for each reduction; `budget` seconds for each case."""
    if find_spec("jax") is None:
        yield InJax("", "", 0, problem="JAX is not installed")
        return
    for devices in dict.fromkeys(case.devices for case in cases):
        with Process(devices) as process:
            for case in cases:
                if case.devices == devices:
                    yield from _measure(process, case, budget)


def _measure(process: Process, case: Case, budget: float) -> Iterator[InJax]:
    made = InJax(
        case.measures,
        case.program,
        case.devices,
        case.dtype,
        case.size if case.measures == RUN else 0,
        load=machine.load(),
    )
    try:
        answer = process.measure(case, budget)
    except Failure as error:
        yield replace(made, problem=str(error))
        return
    timings = {name: Timing(**given) for name, given in answer["timings"].items()}
    problems, cpu = answer["problems"], answer["cpu"]
    for reduction in case.reductions:
        found = replace(
            made,
            reduction=reduction,
            ours=timings.get(reduction),
            xla=timings.get(""),
            ours_cpu=cpu.get(reduction),
            xla_cpu=cpu.get(""),
            problem=problems.get(reduction, problems.get("")),
        )
        ratio = found.ratio()
        print(f"{found}: {'-' if ratio is None else f'{ratio:.2f}x'}", file=sys.stderr)
        yield found
