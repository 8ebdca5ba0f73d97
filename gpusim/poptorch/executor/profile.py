"""What an executor writes of itself with `Options.enableProfiling`: a row for each replica."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpusim.poptorch.options import Options
from gpusim.poptorch.traces import Row, Trace, opened, released

__all__ = ["Profile"]

VARIABLE = "POPLAR_ENGINE_OPTIONS"
DIRECTORY = "autoReport.directory"
WANTED = ("autoReport.all", "autoReport.outputDebugInfo", "autoReport.outputExecutionProfile")
FILE = "trace.json"


class Profile:
    """An executor's part of a trace: a row for each replica. Without profiling it does nothing.

    **Arguments**

    - `options`: whether and where; `training`: of which the default name is made.

    ValueError for a POPLAR_ENGINE_OPTIONS that is no JSON object; OSError for a folder that cannot
    be written.

    Attribute: `path` of the trace, or None.
    """

    def __init__(self, options: Options, training: bool) -> None:
        self._trace: Trace | None = None
        self._rows: list[Row] = []
        self.path = path_of(options, training)
        if self.path is not None:
            self._trace = opened(self.path, {"model": name_of(options, training)})
            weakref.finalize(self, released, self._trace)

    def compiled(self, replicas: range, ipus: int) -> None:
        """The model is compiled for these replicas, each with so many IPUs."""
        if self._trace is not None:
            names = [named(replica, ipus) for replica in replicas]
            self._rows = [self._trace.row("replicas", name, (id(self), name)) for name in names]

    @contextmanager
    def span(self, name: str, category: str, **args: Any) -> Iterator[None]:
        """A block in which all replicas do something."""
        begin = time.perf_counter()
        yield
        self.add(name, category, begin, time.perf_counter(), **args)

    def add(self, name: str, category: str, begin: float, end: float, **args: Any) -> None:
        """What all replicas have done: all at once, so that all of them took as long."""
        if self._trace is not None:
            for row in self._rows:
                self._trace.add(row, name, category, begin, end, **args)

    def flush(self) -> None:
        """Write what there is."""
        if self._trace is not None:
            self._trace.flush()


def path_of(options: Options, training: bool) -> Path | None:
    """The trace's file; None if nobody asked for one."""
    engine = engine_options(options)
    if not any(str(engine.get(name)).lower() == "true" for name in WANTED):
        return None
    processes = options.Distributed.numProcesses
    name = f"trace.{options.Distributed.processId}.json" if processes > 1 else FILE
    return Path(str(engine.get(DIRECTORY, "."))) / name_of(options, training) / name


def name_of(options: Options, training: bool) -> str:
    if options.exists("model_name"):
        return str(options.model_name)
    return "training" if training else "inference"


def engine_options(options: Options) -> dict[str, Any]:
    """Poplar's engine options: the program's, and those of the environment, which count more."""
    found = dict(options._Popart.options.get("engineOptions", {}))
    if text := os.environ.get(VARIABLE, "").strip():
        try:
            found |= dict(json.loads(text).items())
        except (ValueError, AttributeError):
            raise ValueError(f"{VARIABLE}={text!r}: expected a JSON object") from None
    return found


def named(replica: int, ipus: int) -> str:
    first = replica * ipus
    return f"replica {replica} (IPU{f' {first}' if ipus == 1 else f's {first}-{first + ipus - 1}'})"
