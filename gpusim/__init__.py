"""gpusim: replicated (SPMD) programs for machines that you do not have, with every bit specified.

`vmap`, `pmap` and `shard_map` run a function for many replicas; `lax` has JAX's parallel
collectives; `Reduction` and `reduction` say in which order and precision they add; `collectives`
are the same operations on stacked arrays.
"""

from . import collectives, fallback, groups, lax, tree
from .delayed import DelayedScaling
from .devices import devices
from .errors import (
    CollectiveMismatchError,
    DeadlockError,
    GpusimError,
    InstanceError,
    ReplicaError,
    ReplicaIndexError,
)
from .formats import Format
from .groups import CommGroupType as CommGroupType  # of Graphcore's interfaces: not listed
from .groups import Groups
from .maps import (
    MappedArray,
    Mesh,
    P,
    at,
    per_replica,
    per_replica_route,
    pmap,
    set_mesh,
    shard_map,
    vmap,
)
from .maps.records import record
from .random import rng
from .reduction import Reduction, as_reduction, reduction
from .rounding import quantise_fpx as quantise_fpx  # of Graphcore's interfaces: not listed
from .rounding import round_to
from .runtime.world import World
from .version import __version__
from .wires import Wire

fallback.kernels.provide("gpusim.compiled")

__all__ = [
    "CollectiveMismatchError",
    "DeadlockError",
    "DelayedScaling",
    "Format",
    "GpusimError",
    "Groups",
    "InstanceError",
    "MappedArray",
    "Mesh",
    "P",
    "Reduction",
    "ReplicaError",
    "ReplicaIndexError",
    "Wire",
    "World",
    "__version__",
    "as_reduction",
    "at",
    "collectives",
    "devices",
    "groups",
    "lax",
    "per_replica",
    "per_replica_route",
    "pmap",
    "record",
    "reduction",
    "rng",
    "round_to",
    "set_mesh",
    "shard_map",
    "tree",
    "vmap",
]

_MODULES = {
    "equal",
    "jax",
    "poptorch",
    "poptorch_experimental_addons",
    "popart",
    "popdist",
    "popxl",
    "study",
    "torch",
}


def __dir__() -> list[str]:
    """The public names, and the public modules that the program has imported."""
    loaded = {name for name in globals() if name in _MODULES or name.startswith("__")}
    return sorted({*__all__, *loaded})
