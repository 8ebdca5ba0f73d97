"""Executors: models that train and infer on simulated replicas when they are called.

- `models`: trainingModel, inferenceModel, load. `executor`: PoplarExecutor.
- `executable`: what is compiled. `call`: one call of it. `training`: its updates, and `gradients`:
  how they are accumulated and reduced.
- `arguments`, `custom_parsers`: what goes in, and `micro_batches`: to which replica. `synthetic`:
  what goes in instead. `outputs`, `anchors`: what comes out. `counters`: when.
- `weights`: on the device and on the host. `wrapping`: what makes them come when looked at.
  `grouping`: groups of replicas with weights of their own.
- `instances`: the other processes. `devices`: the IPUs. `hooks`, `context`: for programs that want
  to know. `profile`, `log_file`: what is told, and `repeats`: how often.
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
