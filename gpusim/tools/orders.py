"""`gpusim torchrun --orders N`: the same program with calls that complete at other times."""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gpusim.tools.findings import write_report
from gpusim.tools.forked import run_in_fork
from gpusim.tools.progress import progress
from gpusim.torch.distributed.checks.completions import first_difference
from gpusim.torch.distributed.checks.findings import Finding

__all__ = ["run_orders"]

TAGGED = re.compile(r"\[rank *(\d+)\]: (.*)")
"""A line of a rank's, as the command shows it."""


def run_orders(options: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Run the program as it is, then in other orders, up to the first with another result.

    Results are what calls are posted with, and what ranks print. `run` is the command with one run.

    **Returns**: the exit code: 1 if the check has findings, or an order has another result.
    """
    with tempfile.TemporaryDirectory(prefix="gpusim-orders-") as scratch:
        runs = _Runs(options, run, Path(scratch))
        code, shown = runs.run(None, shown=True), runs.left
        if shown is None or shown["failed"]:
            write_report(options.check_report, shown["findings"] if shown else [])
            return code or 1
        found, text = None, f"{options.orders} other orders have the same result"
        with progress(options.orders + 1) as advance:
            runs.run(None)
            usual = runs.result()
            for number in range(options.orders):
                advance(f"order {number}", 1)
                runs.run(number)
                found = runs.difference(usual, number)
                if found is not None and runs.differs_by_itself(usual):
                    found = None
                    text = "orders are not compared: the program has another result in each run"
                    break
                if found is not None:
                    text = "\n".join(found.lines())
                    break
    print(f"gpusim torchrun: check: {text}", file=sys.stderr)
    findings = shown["findings"] + ([found.as_json()] if found is not None else [])
    write_report(options.check_report, findings)
    return 1 if findings else code


class _Result(NamedTuple):
    """The result of a run: whether it failed, its calls' operands, and ranks' lines."""

    failed: bool
    values: dict[int, Any]
    lines: dict[int, list[str]]


class _Runs:
    """The runs of one program, each in a fork of its own."""

    def __init__(
        self,
        options: argparse.Namespace,
        command: Callable[[argparse.Namespace], int],
        folder: Path,
    ) -> None:
        self.options, self.command, self.folder = options, command, folder
        self.output = folder / "output"
        self.left: dict[str, Any] | None = None

    def run(self, number: int | None, shown: bool = False) -> int:
        """Run it in an order; `left` is then what the run has left. The exit code."""
        own = copy.copy(self.options)
        own.orders, own.check_report = 0, None
        own.check_order, own.check_values = number, self.folder / "values.json"
        if not shown:
            own.quiet, own.summary, own.record, own.trace = True, False, None, None
        own.check_values.unlink(missing_ok=True)
        code = run_in_fork(lambda: self.command(own), None if shown else self.output)
        if code > 128:
            raise KeyboardInterrupt
        exists = own.check_values.exists()
        self.left = json.loads(own.check_values.read_text()) if exists else None
        return code

    def result(self) -> _Result:
        """The result of the last run."""
        lines: dict[int, list[str]] = {}
        for line in self.output.read_text(errors="replace").splitlines():
            if match := TAGGED.match(line):
                lines.setdefault(int(match[1]), []).append(match[2])
        left = self.left or {"failed": True, "values": {}}
        values = {int(rank): rows for rank, rows in left["values"].items()}
        return _Result(left["failed"], values, lines)

    def difference(self, usual: _Result, number: int | None) -> Finding | None:
        """The first difference of the last run, if there is one."""
        own = self.result()
        again = f"--check-order {number} runs it again"
        if own.failed:
            said = self.output.read_text(errors="replace").strip().splitlines()[-1:]
            text = f"the program fails in order {number}: {' '.join(said)}; {again}"
            return Finding("result-differs", "the program", [], text)
        first = first_difference(usual.values, own.values)
        if first:
            rank, (call, site, words) = min(first.items(), key=lambda each: each[1][0])
            text = (
                f"in order {number} call {call} of rank {rank}, {words}, is posted with other "
                f"values; {again}"
            )
            return Finding("result-differs", site, sorted(first), text, words)
        for rank in sorted(usual.lines):
            for one, other in zip(usual.lines[rank], own.lines.get(rank, []), strict=False):
                if one != other:
                    text = f"in order {number} rank {rank} prints {other!r}, not {one!r}; {again}"
                    return Finding("result-differs", "the program", [rank], text)
        return None

    def differs_by_itself(self, usual: _Result) -> bool:
        """Whether the program has another result in the usual order too."""
        self.run(None)
        return self.difference(usual, None) is not None
