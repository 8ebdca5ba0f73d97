"""Maps of functions over replicas: vmap, pmap and shard_map, and the arrays that functions see in
them."""

from .mapped_array import MappedArray, at, dispatch, rules
from .mapped_array.per_replica import per_replica
from .mapped_array.settings import per_replica_route
from .pmap import pmap
from .shard_map import Mesh, P, set_mesh, shard_map
from .vmap import vmap

__all__ = [
    "MappedArray",
    "Mesh",
    "P",
    "at",
    "dispatch",
    "per_replica",
    "per_replica_route",
    "pmap",
    "rules",
    "set_mesh",
    "shard_map",
    "vmap",
]
