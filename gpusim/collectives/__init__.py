"""Every collective once, on stacked arrays or lists with one array per replica.

Each takes its values first, as an array (R, *batch, *s) or a list of R arrays (*batch, *s), and
returns a `Result`. ``batch_ndim`` says how many axes after the replicas' are other mapped axes,
outermost first; all axis arguments count in s. Values that are the same on all replicas are handed
in broadcast along axis 0 (stride 0), or as a list of one object. Results that alias their input
are read-only. Linear collectives carry their adjoint as ``.transpose``.
"""

from __future__ import annotations

from .exchange import all_to_all, pswapaxes
from .gather import all_gather, pgather
from .indices import axis_index, pargmax, pargmin, pmax, pmin
from .linear import LinearCollective
from .operand import Result
from .permute import pbroadcast, ppermute, pshuffle
from .ragged import ragged_all_to_all
from .scatter import psum_scatter
from .sums import all_reduce, pmean, psum

__all__ = [
    # folds
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "all_reduce",
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
    # replica numbers
    "axis_index",
    "pargmax",
    "pargmin",
    # types
    "LinearCollective",
    "Result",
]
