"""gpusim through its public interface: vmap, the collectives on stacked arrays, and pmap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import gpusim
from bench.cases import SHORT, SOURCE, SUMS, Case
from bench.programs import program
from gpusim import collectives, fallback, lax

from .base import LocalPeer, Unserved
from .inputs import stacked

MAX_PMAP_REPLICAS = 64


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


class Segments(LocalPeer):
    """The copies of a ragged_all_to_all alone, by `fallback.ragged_copy`, with a list of segments
    that is made before."""

    name = "gpusim, segments"

    def operation(self, case: Case) -> Callable[[], Any]:
        if case.collective != SHORT:
            raise Unserved("measured for short rows")
        source, output, *_ = stacked(case)
        result = output.copy()
        sender, receiver = np.indices(case.plan.sizes.shape)
        columns = (sender, case.plan.input_offsets, receiver, case.plan.output_offsets)
        segments = np.stack([*columns, case.plan.sizes], axis=-1).reshape(-1, 5)

        def copy() -> Any:
            fallback.ragged_copy(source, result, segments)
            return result

        return copy


class Memcpy(LocalPeer):
    """A copy of the result, which is made before: as many bytes, without a gap."""

    name = "memcpy"

    def operation(self, case: Case) -> Callable[[], Any]:
        if case.collective != SHORT:
            raise Unserved("measured for short rows")
        result = collectives.ragged_all_to_all(*stacked(case)).value
        copied = np.empty_like(result)

        def copy() -> Any:
            np.copyto(copied, result)
            return copied

        return copy


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
