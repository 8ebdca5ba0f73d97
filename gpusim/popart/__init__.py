"""The parts of PopART that PopXL programs use: options, devices, exceptions and enumerations.

Graphs are made by `gpusim.popxl`, which PopART's own sessions run too. Its builders are missing.
"""

from __future__ import annotations

from gpusim.popxl._options import SessionOptions
from gpusim.popxl.exceptions import (
    popart_exception,
    popart_internal_exception,
    poplar_application_runtime_error,
    poplar_exception,
    poplibs_error,
)

from . import _internal
from .devices import (
    DeviceConnectionType,
    DeviceInfo,
    DeviceManager,
    DeviceSelectionCriterion,
    DeviceType,
    SyncPattern,
)
from .sessions import AnchorReturnType, DataFlow, InferenceSession, PyStepIO, TrainingSession
from .settings import (
    CommGroup,
    CommGroupType,
    DataType,
    ReplicatedTensorSharding,
    TensorLocation,
    TensorStorage,
    VariableRetrievalMode,
    VariableSettings,
    VirtualGraphMode,
)

__version__ = "3.3.0+gpusim"  # the PopART whose names these are

__all__ = [
    "AnchorReturnType",
    "CommGroup",
    "CommGroupType",
    "DataFlow",
    "DataType",
    "DeviceConnectionType",
    "DeviceInfo",
    "DeviceManager",
    "DeviceSelectionCriterion",
    "DeviceType",
    "InferenceSession",
    "PyStepIO",
    "ReplicatedTensorSharding",
    "SessionOptions",
    "SyncPattern",
    "TensorLocation",
    "TensorStorage",
    "TrainingSession",
    "VariableRetrievalMode",
    "VariableSettings",
    "VirtualGraphMode",
    "__version__",
    "_internal",
    "poplar_application_runtime_error",
    "poplar_exception",
    "poplibs_error",
    "popart_exception",
    "popart_internal_exception",
]


def __getattr__(name: str) -> object:
    raise AttributeError(
        f"gpusim has no popart.{name}: of PopART it has what PopXL programs use, "
        f"{', '.join(public for public in __all__ if not public.startswith('_'))}"
    )
