"""Options: all groups together, and what reads them from files and variables."""

from __future__ import annotations

import copy
import os
from typing import Any, Self

from gpusim.poptorch._logging import logger
from gpusim.poptorch.options import config_file, devices, outputs, replication, reports
from gpusim.poptorch.options.base import items
from gpusim.poptorch.options.devices import DeviceOptions
from gpusim.poptorch.options.distributed import _DistributedOptions
from gpusim.poptorch.options.jit import _JitOptions
from gpusim.poptorch.options.locations import _TensorLocationOptions
from gpusim.poptorch.options.outputs import OutputOptions
from gpusim.poptorch.options.popart import _PopartOptions
from gpusim.poptorch.options.precision import _PrecisionOptions
from gpusim.poptorch.options.progress import ProgressBar
from gpusim.poptorch.options.replication import ReplicationOptions
from gpusim.poptorch.options.reports import LOCATION_EXCLUDES, ReportOptions
from gpusim.poptorch.options.strategies import PipelinedExecution
from gpusim.poptorch.options.training import _TrainingOptions

__all__ = ["Options"]

DEFAULTS = replication.DEFAULTS | devices.DEFAULTS | outputs.DEFAULTS | reports.DEFAULTS
GROUPS = ("Distributed", "Jit", "Precision", "TensorLocations", "Training")


class Options(ReplicationOptions, DeviceOptions, OutputOptions, ReportOptions):
    """How a model is compiled and run.

    Methods set and can be chained; what they set is read as attributes. An executor or a
    DataLoader freezes the options it is given: then setting is an AttributeError.

    Reads OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK, POPTORCH_CACHE_DIR, and
    POPTORCH_DEFAULT_OPTIONS, in `from_json`'s form. ValueError for invalid values.

    >>> options = Options().deviceIterations(10).replicationFactor(4)
    >>> options.Training.gradientAccumulation(8).gradient_accumulation
    8
    >>> options.device_iterations, options.replication_factor
    (10, 4)
    >>> options.deviceIterations(0)
    Traceback (most recent call last):
    ...
    ValueError: device_iterations=0: expected a number of at least 1
    """

    def __init__(self) -> None:
        self._jit = _JitOptions()
        self._popart = _PopartOptions()
        self._graphProcessing = _PrecisionOptions(self._popart)
        self._training = _TrainingOptions(self._popart)
        self._distributed = _DistributedOptions()
        self._tensor_locations = _TensorLocationOptions()
        self._execution_strategy = PipelinedExecution()
        self._source_location_excludes = list(LOCATION_EXCLUDES)
        self._relax_optimizer_checks = False
        self._show_compilation_progress_bar = True
        self._log_to_file = False
        self._module_namescope_enabled = True
        super().__init__(**copy.deepcopy(DEFAULTS))
        self._read_environment()

    def _read_environment(self) -> None:
        if path := os.environ.get("POPTORCH_CACHE_DIR"):
            logger.info("POPTORCH_CACHE_DIR is set: setting cache path to %s", path)
            self.enableExecutableCaching(path)
        if text := os.environ.get("POPTORCH_DEFAULT_OPTIONS"):
            try:
                self.from_json(text)
            except Exception as error:
                error.add_note("in the environment variable POPTORCH_DEFAULT_OPTIONS")
                raise

    # ---------------------------------------------------------------- groups

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        """Where tensors lie."""
        return self._tensor_locations

    @property
    def Distributed(self) -> _DistributedOptions:
        """The number of this process and of all."""
        return self._distributed

    @property
    def Jit(self) -> _JitOptions:
        """The translation of the model to a graph."""
        return self._jit

    @property
    def Precision(self) -> _PrecisionOptions:
        """Rounding and partial results."""
        return self._graphProcessing

    @property
    def Training(self) -> _TrainingOptions:
        """Options of training alone."""
        return self._training

    @property
    def _Popart(self) -> _PopartOptions:
        """PopART's own options."""
        return self._popart

    # ---------------------------------------------------------------- randomness and data

    def randomSeed(self, random_seed: int) -> Self:
        """Seed the device's random numbers, and PyTorch's. AssertionError for other types."""
        assert isinstance(random_seed, int)
        self.createOrSet(random_seed=random_seed)
        try:
            import torch
        except ImportError:  # nothing to seed
            return self
        torch.manual_seed(random_seed)
        return self

    def enableStableNorm(self, enabled: bool) -> Self:
        """Choose whether norms use the slower formula that loses fewer digits."""
        self._popart.set("enableStableNorm", enabled)
        return self

    def enableSyntheticData(self, enabled: bool) -> Self:
        """Choose whether inputs are random numbers that are made on the device."""
        random_normal, off = 2, 0  # PopART's SyntheticDataMode
        self._popart.set("syntheticDataMode", random_normal if enabled else off)
        return self

    # ---------------------------------------------------------------- files, copies, dictionaries

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Set options from a file: one call on each line, as in a program, without `options.`.

        The file is not run: calls of options' methods are all it can do, with literals, PopTorch's
        enumerations, TensorLocationSettings, stages, phases and strategies as arguments. Empty
        lines and comments are skipped.

        **Raises**:

        - ConfigFileError: for a line that is not Python or not allowed, which it shows. Nothing is
          set if a line is not Python.
        - what the methods raise, with a note that names the line.
        """
        config_file.load_file(self, filepath)
        return self

    def from_json(self, string: str) -> None:
        """Set options from a JSON object: methods by name, with their arguments.

        A list is several arguments; "Training.gradientAccumulation" is a method of a group, and
        "OutputMode.All" a member of an enumeration.

        ValueError for other JSON than an object; AttributeError for an unknown method.

        >>> options = Options()
        >>> options.from_json('{"outputMode": ["OutputMode.EveryN", 2], "logDir": "logs"}')
        >>> options.output_mode, options.output_return_period, options.log_dir
        (1, 2, 'logs')
        """
        config_file.load_json(self, string)

    def toDict(self) -> dict[str, Any]:
        """All options but Jit's and Precision's own, by name, in the backend's form.

        AssertionError while the output mode is Default: training and inference differ in it.
        """
        assert not self.defaultOutputMode(), "An output mode must be picked before serialisation"
        found: dict[str, Any] = {**self._execution_strategy.backendOptions()}
        found.update(self._popart.options)
        self.update(found)
        for group in (self._training, self._distributed, self._tensor_locations):
            group.update(found)
        if self._show_compilation_progress_bar:
            found["compilation_progress_bar_fn"] = ProgressBar()
        return found

    def clone(self) -> Self:
        """A copy that shares nothing with these options, and is not frozen."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        groups = {name: getattr(self, name) for name in GROUPS}
        rest = {
            "_Popart": self._popart,
            "execution_strategy": self._execution_strategy,
            "module_namescope_enabled": self._module_namescope_enabled,
            "relax_optimizer_checks": self._relax_optimizer_checks,
            "show_compilation_progress_bar": self._show_compilation_progress_bar,
            "source_location_excludes": self._source_location_excludes,
        }
        return f"{type(self).__name__}({items(self._values | groups | rest)})"
