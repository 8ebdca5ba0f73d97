"""An executor's events with `Options.enableProfiling`: a row for each replica."""

from __future__ import annotations

import json
import os
import time
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from gpusim.poptorch._logging import logger
from gpusim.poptorch.executor.counters import Counters
from gpusim.poptorch.options import Options
from gpusim.recording.traces import Row, Trace, opened, released

__all__ = ["Profile", "Span"]

VARIABLE = "POPLAR_ENGINE_OPTIONS"
DIRECTORY = "autoReport.directory"
WANTED = ("autoReport.all", "autoReport.outputDebugInfo", "autoReport.outputExecutionProfile")
FILE = "trace.json"
NOTHING = nullcontext()


class Profile:
    """An executor's part of a trace: a row for each replica. Without profiling it does nothing.

    **Arguments**

    - `options`: they ask for a trace, and name its folder; `training`: gives the default name.

    **Raises**:

    - ValueError: if POPLAR_ENGINE_OPTIONS is not a JSON object.
    - OSError: if the folder cannot be written.

    Attribute: `path` of the trace, or None.
    """

    def __init__(self, options: Options, training: bool) -> None:
        self._trace: Trace | None = None
        self._rows: list[Row] = []
        self.path = path_of(options, training)
        if self.path is not None:
            self._trace = opened(self.path, {"model": name_of(options, training)}, log_end)
            weakref.finalize(self, released, self._trace)

    def compiled(self, replicas: range, ipus: int) -> None:
        """Make the rows of the replicas, which have `ipus` IPUs each."""
        if self._trace is not None:
            names = [named(replica, ipus) for replica in replicas]
            self._rows = [self._trace.row("replicas", name, (id(self), name)) for name in names]

    def span(self, name: str, category: str, **args: Any) -> AbstractContextManager[None]:
        """A block in which all replicas do something."""
        return NOTHING if self._trace is None else Span(self, name, category, args)

    def add(self, name: str, category: str, begin: float, end: float, **args: Any) -> None:
        """Add an event of all replicas: they run together, so all take as long."""
        if self._trace is not None:
            for row in self._rows:
                self._trace.add(row, name, category, begin, end, **args)

    def flush(self) -> None:
        """Write all events."""
        if self._trace is not None:
            self._trace.flush()


def log_end(path: Path, error: OSError) -> None:
    """Log that a trace ends, as PopTorch logs."""
    logger.warning("Profiling ends: %s cannot be written: %s", path, str(error))


class Span:
    """A block whose time is an event in a profile, unless it raises.

    **Arguments**:

    - `args`: of the event.
    - `device`: to wait for at the end of the block, if it is a GPU.
    - `counters`: whose `device_seconds` the time is added to.
    """

    def __init__(
        self,
        profile: Profile,
        name: str,
        category: str,
        args: dict[str, Any],
        device: torch.device | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._profile, self._event, self._args = profile, (name, category), args
        self._device, self._counters = device, counters

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            return
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        end = time.perf_counter()
        if self._counters is not None:
            self._counters.device_seconds += end - self._begin
        if self._profile.path is not None:
            self._profile.add(*self._event, self._begin, end, **self._args)


def path_of(options: Options, training: bool) -> Path | None:
    """The trace's file; None without profiling."""
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
    """Poplar's engine options; those of the environment override the program's."""
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
