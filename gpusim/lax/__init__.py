"""JAX's parallel collectives and control flow, by their JAX names, inside every map.

A collective takes values inside a map and the name of a mapped axis (or a tuple of names,
row-major in the tuple's order). Each is a collective of `gpusim.collectives`, where its record has
its definition, its docstring and its transpose. Control flow and dynamic slices work outside of
maps too.
"""

from __future__ import annotations

from typing import NoReturn

from .. import collectives
from ..maps.bind import MappedCollective
from ..maps.names import axis_index, axis_size
from .control import cond, fori_loop, map, scan, select, switch, while_loop
from .slices import (
    dynamic_index_in_dim,
    dynamic_slice,
    dynamic_slice_in_dim,
    dynamic_update_index_in_dim,
    dynamic_update_slice,
    dynamic_update_slice_in_dim,
)
from .variance import pcast, pvary

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "cond",
    "dynamic_index_in_dim",
    "dynamic_slice",
    "dynamic_slice_in_dim",
    "dynamic_update_index_in_dim",
    "dynamic_update_slice",
    "dynamic_update_slice_in_dim",
    "fori_loop",
    "map",
    "pargmax",
    "pargmin",
    "pbroadcast",
    "pcast",
    "pgather",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "pvary",
    "ragged_all_to_all",
    "scan",
    "select",
    "switch",
    "while_loop",
]

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

COLLECTIVES = (
    *(name for name, value in [*globals().items()] if isinstance(value, MappedCollective)),
    *("axis_index", "axis_size"),
)
"""The names that `gpusim.torch` has too, for tensors."""

INSTEAD = {
    "all_gather_invariant": "all_gather: an array is stored once if all replicas hold the same",
    "associative_scan": "a loop, or np.cumsum and the like; across replicas ppermute in a loop",
    "axis_types": "nothing: arrays have no types of axes here",
    "convert_element_type": "x.astype(dtype)",
    "create_token": "nothing: collectives run in the program's order",
    "dot_general": "np.einsum",
    "optimization_barrier": "nothing: each operation runs as it is written",
    "precv": "ppermute, which has the same values (psend and precv are NCCL's, for GPUs only)",
    "psend": "ppermute, which has the same values (psend and precv are NCCL's, for GPUs only)",
    "rsqrt": "1 / np.sqrt(x)",
    "select_n": "select, or np.choose",
    "stop_gradient": "x itself: gpusim.lax has no gradients; gpusim.torch has",
    "top_k": "np.sort or np.argsort, reversed",
}
"""Names of jax.lax that are not here, and what serves instead."""

AS_IN_NUMPY = frozenset(
    "abs acos acosh add argmax argmin asin asinh atan atan2 atanh bitwise_and bitwise_not "
    "bitwise_or bitwise_xor broadcast_shapes cbrt ceil concatenate conj cos cosh cumprod cumsum "
    "dot exp exp2 expand_dims expm1 floor full full_like imag log log1p max min mul neg nextafter "
    "pad pow real reciprocal reshape round sign sin sinh sort split sqrt square squeeze stack sub "
    "tan tanh tile transpose".split()
)
"""Names of jax.lax for which NumPy has a function."""

_NUMPY_NAMES = {"mul": "multiply", "neg": "negative", "sub": "subtract"}


def __getattr__(name: str) -> NoReturn:
    if name in AS_IN_NUMPY:
        instead = f": use np.{_NUMPY_NAMES.get(name, name)}"
    else:
        instead = f": use {INSTEAD[name]}" if name in INSTEAD else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}", name=name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
