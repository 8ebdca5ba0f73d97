"""The collectives where instances share the replicas out: each with the bits of one process.
What is moved, and what is folded where, is decided here; engines only move it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..exchange import all_to_all, pswapaxes
from ..gather import all_gather, pgather
from ..indices import pargmax, pargmin, pmax, pmin
from ..permute import pbroadcast, ppermute, pshuffle
from ..ragged import ragged_all_to_all
from ..scatter import psum_scatter
from ..sums import all_reduce, pmean, psum
from . import folds, ragged, rearrange
from .spread import Spread, all_gather_bytes

__all__ = ["Spread", "all_gather_bytes", "run"]

_Across = Callable[..., Any]

# The transposes that are collectives of their own; the others are one of these.
_WAYS: dict[Any, _Across] = {
    all_gather: rearrange.all_gather,
    all_reduce: folds.all_reduce,
    all_to_all: rearrange.all_to_all,
    all_to_all.transpose: rearrange.all_to_all_transpose,
    pargmax: folds.pargmax,
    pargmin: folds.pargmin,
    pbroadcast: rearrange.pbroadcast,
    pbroadcast.transpose: folds.pbroadcast_transpose,
    pgather: rearrange.pgather,
    pmax: folds.pmax,
    pmean: folds.pmean,
    pmin: folds.pmin,
    ppermute: rearrange.ppermute,
    ppermute.transpose: rearrange.ppermute_transpose,
    pshuffle: rearrange.pshuffle,
    pshuffle.transpose: rearrange.pshuffle_transpose,
    psum: folds.psum,
    psum_scatter: folds.psum_scatter,
    all_gather.transpose: folds.all_gather_transpose,
    psum_scatter.transpose: rearrange.psum_scatter_transpose,
    pswapaxes: rearrange.pswapaxes,
    ragged_all_to_all: ragged.ragged_all_to_all,
    ragged_all_to_all.transpose: ragged.ragged_all_to_all_transpose,
}


def run(
    definition: Any, spread: Spread, varies: Sequence[bool], *arguments: Any, **options: Any
) -> Any:
    """A collective's results on this instance, from its own members' values.

    Args:
        definition: the collective, as on one instance.
        spread: where the members are.
        varies: for each operand whether instances hold different values of it.
        arguments, options: as the definition takes them, stacked over this instance's members;
            groups count the members of all instances.

    Raises:
        as the definition, on all instances.
    """
    if definition is pgather:
        options["varies"] = varies
    with spread.channel():
        first = arguments[0]
        spread.engine.prepare(first[0] if isinstance(first, list) else first)
        return _WAYS[definition](spread, *arguments, **options)
