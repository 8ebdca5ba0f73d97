"""gpusim's collectives on torch tensors: the same names and bits, differentiable and traceable.

`vmap` (in lockstep, on torch.func.vmap) and `pmap` (a thread for each replica) bind axis names;
`trace_axes` binds them where a graph is traced. Needs PyTorch: ``pip install 'gpusim[torch]'``.
"""

from __future__ import annotations

from .. import optional as _optional

if not _optional.available("torch"):
    _optional.require("gpusim.torch needs", "torch")

from .axes import trace_axes
from .batching_rules import install as _install_batching_rules
from .collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pargmax,
    pargmin,
    pbroadcast,
    pgather,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    pswapaxes,
    ragged_all_to_all,
)
from .pmap import pmap
from .tensors import as_array, as_tensor
from .vmap import vmap

_install_batching_rules()

__all__ = [
    # maps
    "vmap",
    "pmap",
    "trace_axes",
    # folds
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "pargmax",
    "pargmin",
    "psum_scatter",
    # rearrangements
    "all_gather",
    "all_to_all",
    "pbroadcast",
    "pgather",
    "ppermute",
    "pshuffle",
    "pswapaxes",
    "ragged_all_to_all",
    # where a replica stands
    "axis_index",
    "axis_size",
    # tensors and arrays
    "as_array",
    "as_tensor",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
