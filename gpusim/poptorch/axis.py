"""The axis that PopTorch's replicas are on: what runs a model binds it, and collectives of
poptorch_experimental_addons run over it."""

from __future__ import annotations

from ..maps.axis_environment import axis_environment

__all__ = ["AXIS", "inside_replicas"]

AXIS = "gpusim.poptorch.replicas"
"""Its name: that of gpusim.torch's axes, a string, so that operators of a graph can carry it."""


def inside_replicas() -> bool:
    """Whether this is the code of a replica, one that is traced included.

    >>> inside_replicas()
    False
    """
    return any(entry.name == AXIS for entry in axis_environment())
