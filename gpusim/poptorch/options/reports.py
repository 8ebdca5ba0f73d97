"""Options of logs, progress, names, profiles, caches and strictness."""

from __future__ import annotations

import os
from typing import Any, Self

from gpusim.poptorch._logging import logger
from gpusim.poptorch.options.base import OptionsDict
from gpusim.poptorch.options.popart import _PopartOptions

__all__ = ["DEFAULTS", "LOCATION_EXCLUDES", "ReportOptions"]

DEFAULTS: dict[str, Any] = {"log_dir": ".", "max_repeat_logs": 4}
LOCATION_EXCLUDES = ("install/poptorch", "site-packages/torch", "site-packages/poptorch")
PROFILED = ("debug.allowOutOfMemory", "autoReport.directory", "autoReport.all")


class ReportOptions(OptionsDict):
    """Logs, profiles, caches, and names in them."""

    _popart: _PopartOptions
    _source_location_excludes: list[str]
    _show_compilation_progress_bar: bool
    _log_to_file: bool
    _relax_optimizer_checks: bool
    _module_namescope_enabled: bool

    def sourceLocationExcludes(self, excludes: list[str]) -> Self:
        """Leave out stack frames whose path has one of these parts, instead of the default ones."""
        self._source_location_excludes = list(excludes)
        return self

    def appendToLocationExcludes(self, *excludes: str) -> Self:
        """Also leave out stack frames whose path has one of these parts."""
        self._source_location_excludes = [*self._source_location_excludes, *excludes]
        return self

    def showCompilationProgressBar(self, show: bool = True) -> Self:
        """Choose whether to draw a bar while the model is compiled, as by default."""
        self._show_compilation_progress_bar = show
        return self

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self:
        """Choose whether to log unexpected attributes of optimizers at DEBUG, not as warnings."""
        self._relax_optimizer_checks = relax
        return self

    def logDir(self, log_dir: str) -> Self:
        """Also write the log to the file poptorch.log in this folder."""
        self.set(log_dir=log_dir)
        self._log_to_file = True
        return self

    def maxRepeatLogs(self, max_lines: int | None) -> Self:
        """Limit how often a log line repeats; 4 times by default, None for no limit."""
        self.checkIsFrozen()
        assert max_lines is None or isinstance(max_lines, int), (
            f"Unexpected type {type(max_lines)} for option max_repeat_logs. Expected {int}"
        )
        self._values["max_repeat_logs"] = max_lines  # of two types, which `set` refuses
        return self

    def modelName(self, name: str) -> Self:
        """Set the model's name in profiles; "training" or "inference" without it."""
        self.createOrSet(model_name=name)
        return self

    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> Self:
        """Set the folder of traced gradients of models; None for none."""
        if path is not None:
            self._popart.set("cachePath", os.fspath(path))
        self._popart.set("enableEngineCaching", path is not None)
        return self

    def logCycleCount(self, log_cycle_count: bool) -> Self:
        """Choose whether to log the cycles of a run, at DEBUG."""
        self._popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    def enableProfiling(self, profile_dir: str | None = None) -> Self:
        """Write a trace of what runs when, in the trace event format, which Perfetto opens.

        The file is trace.json in a folder with the model's name (`modelName`), in this folder or
        the current one. POPLAR_ENGINE_OPTIONS overrides this, with a warning in the log.
        """
        environment = os.environ.get("POPLAR_ENGINE_OPTIONS", "")
        if any(option in environment for option in PROFILED):
            logger.warning(
                "Profiling setting overridden by environment variable. Check content of "
                "POPLAR_ENGINE_OPTIONS."
            )
        values = ("true", profile_dir or ".", "true")
        self._popart.merge("engineOptions", dict(zip(PROFILED, values, strict=True)))
        return self

    def disableModuleNamescope(self) -> Self:
        """Name operations without the modules that they are in."""
        self._module_namescope_enabled = False
        return self
