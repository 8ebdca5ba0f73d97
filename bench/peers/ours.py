"""gpusim through its public interface: vmap, the collectives on stacked arrays, and pmap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import gpusim
from bench.cases import SOURCE, SUMS, Case
from bench.programs import program
from gpusim import collectives, lax

from .base import LocalPeer, Unserved
from .inputs import stacked

MAX_PMAP_REPLICAS = 64
VIEWS = ("all_gather", "pbroadcast", "all_to_all")


def reduction(case: Case) -> dict[str, Any]:
    """The keyword arguments that make a sum the case's variant."""
    variant = case.arithmetic
    if case.collective not in SUMS or variant.plain:
        return {}
    how = gpusim.Reduction(accumulate=variant.accumulate, rounding=variant.rounding, seed=1)
    return {"reduction": how}


class Vmap(LocalPeer):
    """All replicas in lockstep: what the table calls gpusim."""

    name = "gpusim"

    def operation(self, case: Case) -> Callable[[], Any]:
        arguments = stacked(case)
        f = program(case, lax, **reduction(case))
        mapped = gpusim.vmap(f, axis_name="i", out_axes=0 if case.mapped else None)
        return lambda: mapped(*arguments)


class Copied(Vmap):
    """The same, and a view that it returns is copied to memory of its own."""

    name = "gpusim, copied"

    def operation(self, case: Case) -> Callable[[], Any]:
        if case.collective not in VIEWS:
            raise Unserved("its result is no view")
        call = super().operation(case)
        return lambda: np.array(call(), order="C", copy=True)


class Nearest(Vmap):
    """The same sum without stochastic rounding."""

    name = "gpusim, nearest"

    def operation(self, case: Case) -> Callable[[], Any]:
        if case.arithmetic.rounding == "nearest":
            raise Unserved("it is rounded to nearest already")
        arguments = stacked(case)
        how = replace(reduction(case)["reduction"], rounding="nearest")
        f = program(case, lax, reduction=how)
        mapped = gpusim.vmap(f, axis_name="i", out_axes=0 if case.mapped else None)
        return lambda: mapped(*arguments)


class Pmap(LocalPeer):
    """A thread for each replica."""

    name = "gpusim pmap"

    def operation(self, case: Case) -> Callable[[], Any]:
        if case.replicas > MAX_PMAP_REPLICAS:
            raise Unserved(f"a thread for each replica: measured up to {MAX_PMAP_REPLICAS}")
        arguments = stacked(case)
        f = program(case, lax, **reduction(case))
        mapped = gpusim.pmap(f, "i", out_axes=0 if case.mapped else None)
        return lambda: mapped(*arguments)


class Collectives(LocalPeer):
    """`gpusim.collectives`, without a mapped function."""

    name = "gpusim.collectives"

    def operation(self, case: Case) -> Callable[[], Any]:
        arguments = stacked(case)
        how = reduction(case)
        x = arguments[0]
        made: dict[str, Callable[[], Any]] = {
            "psum": lambda: collectives.psum(x, **how),
            "pmean": lambda: collectives.pmean(x, **how),
            "pmax": lambda: collectives.pmax(x),
            "psum_scatter": lambda: collectives.psum_scatter(x, **how),
            "all_gather": lambda: collectives.all_gather(x),
            "pbroadcast": lambda: collectives.pbroadcast(x, SOURCE),
            "all_to_all": lambda: collectives.all_to_all(x, 0, 0),
            "ppermute": lambda: collectives.ppermute(x, case.permutation()),
        }
        if case.ragged:
            return lambda: collectives.ragged_all_to_all(*arguments).value
        call = made[case.collective]
        return lambda: call().value
