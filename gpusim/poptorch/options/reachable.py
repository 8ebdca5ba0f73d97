"""What files and variables may reach from the options: methods and groups, by their names."""

from __future__ import annotations

import enum
from typing import Any

from gpusim.poptorch import enums
from gpusim.poptorch.options import strategies
from gpusim.poptorch.options.base import OptionsDict
from gpusim.poptorch.options.locations import TensorLocationSettings
from gpusim.poptorch.options.popart import _PopartOptions

__all__ = ["POPTORCH", "method_of"]

# What `poptorch.` may be followed by: values and classes of values, nothing that acts.
POPTORCH: dict[str, Any] = {
    **{name: getattr(enums, name) for name in enums.__all__},
    "TensorLocationSettings": TensorLocationSettings,
    "Stage": strategies.Stage,
    "Phase": strategies.Phase,
    "PipelinedExecution": strategies.PipelinedExecution,
    "ShardedExecution": strategies.ShardedExecution,
    "ParallelPhasedExecution": strategies.ParallelPhasedExecution,
    "SerialPhasedExecution": strategies.SerialPhasedExecution,
}
OWNERS = (
    OptionsDict,
    _PopartOptions,
    strategies.Stage,
    strategies.Phase,
    strategies._IExecutionStrategy,
    enum.Enum,
)
READS_MORE = ("loadFromFile", "from_json")  # a file that reads itself would never end


def method_of(owner: Any, name: str, options: Any) -> Any:
    """An attribute by its name. AttributeError for one that is not for files and variables."""
    popart = name == "_Popart" and owner is options
    if isinstance(owner, enum.EnumMeta):
        reachable = name in owner.__members__
    else:
        reachable = isinstance(owner, OWNERS) and name not in READS_MORE
    if not popart and (name.startswith("_") or not reachable):
        raise AttributeError(f"Invalid attribute {name}.")
    return getattr(owner, name)
