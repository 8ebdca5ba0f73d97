"""Every collective once: its record, on stacked arrays or on lists with an array per replica.

A call takes its values first, as an array (R, *batch, *s) or a list of R arrays (*batch, *s), and
returns a `Result`. ``batch_ndim`` says how many axes after the replicas' are other mapped axes,
outermost first; all axis arguments count in s. Values that are the same on all replicas are handed
in broadcast along axis 0 (stride 0), or as a list of one object. Results that alias their input
are read-only. Linear collectives carry their adjoint as ``.transpose``. Inside a `gpusim.World` R
counts this instance's replicas, and the call reaches all instances.
"""

from __future__ import annotations

from .dispatch import run
from .exchange import all_to_all, pswapaxes
from .extremes import axis_index, pargmax, pargmin, pmax, pmin
from .gather import all_gather, pgather, psum_scatter
from .operand import Result
from .permute import pbroadcast, ppermute, pshuffle
from .ragged import ragged_all_to_all
from .record import Call, Collective, collective
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
    # records
    "Call",
    "Collective",
    "Result",
    "collective",
    "run",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
