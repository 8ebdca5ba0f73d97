"""PopTorch's options: one module for each group, and reading them from files and variables.

- `base`: a group of options, and freezing. `options`: all groups together.
- `replication`, `devices`, `outputs`, `reports`: the options' own methods, by subject.
- `training`, `precision`, `distributed`, `locations`, `jit`, `popart`: the groups.
- `strategies`: blocks on IPUs. `attribute`: attributes of operations.
- `config_file`: options from files and variables. `progress`: the bar.
"""

from __future__ import annotations

from .attribute import Attribute
from .base import OptionsDict
from .config_file import ConfigFileError
from .distributed import _DistributedOptions
from .jit import _JitOptions
from .locations import TensorLocationSettings, _TensorLocationOptions
from .options import Options
from .popart import _PopartOptions
from .precision import _PrecisionOptions
from .strategies import (
    BlockId,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    _IExecutionStrategy,
    _IPhasedExecution,
)
from .training import _TrainingOptions

__all__ = [
    "Attribute",
    "BlockId",
    "ConfigFileError",
    "Options",
    "OptionsDict",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
    "_DistributedOptions",
    "_IExecutionStrategy",
    "_IPhasedExecution",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
]
