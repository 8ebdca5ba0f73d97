"""JAX's parallel collectives, by their JAX names, inside vmap, pmap and shard_map.

Every function takes values inside a map and the name of a mapped axis (or a tuple of names,
row-major in the tuple's order). Each is a collective of `gpusim.collectives`, where its record has
its definition, its docstring and its transpose.
"""

from __future__ import annotations

from . import collectives
from .maps.bind import MappedCollective
from .maps.names import axis_index, axis_size

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pargmax",
    "pargmin",
    "pbroadcast",
    "pgather",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "ragged_all_to_all",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


psum = MappedCollective(collectives.psum, __name__)
pmean = MappedCollective(collectives.pmean, __name__)
pmax = MappedCollective(collectives.pmax, __name__)
pmin = MappedCollective(collectives.pmin, __name__)
pargmax = MappedCollective(collectives.pargmax, __name__)
pargmin = MappedCollective(collectives.pargmin, __name__)
psum_scatter = MappedCollective(collectives.psum_scatter, __name__)
all_gather = MappedCollective(collectives.all_gather, __name__)
all_to_all = MappedCollective(collectives.all_to_all, __name__)
pswapaxes = MappedCollective(collectives.pswapaxes, __name__)
ppermute = MappedCollective(collectives.ppermute, __name__)
pshuffle = MappedCollective(collectives.pshuffle, __name__)
pbroadcast = MappedCollective(collectives.pbroadcast, __name__)
pgather = MappedCollective(collectives.pgather, __name__)
ragged_all_to_all = MappedCollective(collectives.ragged_all_to_all, __name__)
