"""Executors: models that train and infer on simulated replicas when they are called.

- `models`: trainingModel, inferenceModel, load. `executor`: PoplarExecutor.
- `executable`: a compiled model. `call`: one call of it. `training`: its updates. `gradients`:
  accumulation and reduction of gradients.
- `arguments`, `custom_parsers`: inputs. `micro_batches`: their parts for replicas and steps.
  `outputs`: the tensors that a call returns. `counters`: times of both.
- `weights`: on the device and on the host. `wrapping`: classes that fetch them on access.
  `grouping`: groups of replicas with weights of their own.
- `instances`: the other processes. `devices`: the IPUs. `hooks`, `context`: for the program's own
  code. `profile`, `logs`: traces and log files.
- `saving`: files of compiled models; `described` and `pickled` are their parts.
"""

from __future__ import annotations

from .context import isRunningOnIpu, poptorchAtExit
from .custom_parsers import (
    ICustomArgParser,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from .executor import PoplarExecutor
from .hooks import registerPostCompileHook, registerPreCompileHook
from .models import inferenceModel, load, trainingModel

__all__ = [
    "ICustomArgParser",
    "PoplarExecutor",
    "inferenceModel",
    "isRunningOnIpu",
    "load",
    "poptorchAtExit",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "trainingModel",
]
