"""gpusim::collective and gpusim::axis_index, the operators of graphs: they name their axes, and
look them up when they run. What they find goes through vmap's and autograd's levels to
gpusim::stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..maps.axis_environment import AxisEntry, axis_environment
from ..maps.names import resolve_names
from .axes import TensorAxis, enclosing_axes, traced_sizes
from .derivatives import Run, cotangents_of_operands, save, tangents_of_results
from .graph_operators import graph_operator
from .plan import CollectivePlan, CollectiveSpec
from .private import innermost_vmap, is_plain, operators_are_seen, outside_transform
from .stacked import UNNAMED, batched, compute, stacked
from .tensors import dtype_of

__all__ = ["axis_index", "collective"]


class VmapLevel(torch.autograd.Function):
    """A collective on its way down through the levels of torch.func, to where all is stacked.

    Each named axis that it needs comes with a marker, a tensor that is batched at the level of that
    axis alone: so every such level is seen, whether or not the operands are batched there.
    """

    @staticmethod
    def forward(
        plan: str, lead: Sequence[int], places: Sequence[int], count: int, *tensors: Tensor
    ) -> Any:
        """`tensors` are `count` operands, and the markers of the axes at `places`."""
        return tuple(stacked([*tensors[:count]], [*lead], plan))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.plan, ctx.lead, ctx.marked, ctx.operands, *tensors = inputs
        save(ctx, CollectivePlan.decode(ctx.plan), tensors[: ctx.operands], tensors[ctx.operands :])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        indices, run = _again(ctx)
        found = cotangents_of_operands(
            ctx, CollectivePlan.decode(ctx.plan), cotangents, indices, run
        )
        return None, None, None, None, *found, *[None] * len(ctx.marked)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        indices, run = _again(ctx)
        own = tangents[4 : 4 + ctx.operands]
        return tuple(tangents_of_results(ctx, CollectivePlan.decode(ctx.plan), own, indices, run))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        plan: str,
        lead: Sequence[int],
        places: Sequence[int],
        count: int,
        *tensors: Tensor,
    ) -> Any:
        chosen = CollectivePlan.decode(plan)
        below = [*zip(tensors, in_dims[4:], strict=True)]
        results = _below_vmap(chosen, lead, places, count, below, info.batch_size)
        return tuple(results), (0,) * len(results)


def _descend(
    plan: CollectivePlan,
    lead: Sequence[int],
    places: Sequence[int],
    count: int,
    tensors: Sequence[Tensor],
) -> Sequence[Tensor]:
    """As `VmapLevel.forward`, from the innermost level of torch.func down.

    VmapLevel is for the levels and the tracers that derive or record. A level of vmap alone takes
    a small part of its time here.
    """
    vmap = innermost_vmap()
    if vmap is None:
        if is_plain(tensors):
            return compute(tensors[:count], lead, plan)
        found: Sequence[Tensor] = VmapLevel.apply(plan.encode(), lead, places, count, *tensors)
        return found
    below = [vmap.unwrap(x) for x in tensors]
    with outside_transform():
        if all(dim is None for _, dim in below):
            return _descend(plan, lead, places, count, [x for x, _ in below])
        results = _below_vmap(plan, lead, places, count, below, vmap.size)
    return [vmap.wrap(x) for x in results]


def _below_vmap(
    plan: CollectivePlan,
    lead: Sequence[int],
    places: Sequence[int],
    count: int,
    tensors: Sequence[tuple[Tensor, int | None]],
    size: int,
) -> Sequence[Tensor]:
    """One level of vmap: its axis, if it is one of ours, becomes the first dimension.

    `tensors` come with their batch dimensions.
    """
    whole = [batched(x, dim, size) for x, dim in tensors[:count]]
    marked = [*zip(places, tensors[count:], strict=True)]
    here = [place for place, (_, dim) in marked if dim is not None]
    left = [(place, marker) for place, (marker, dim) in marked if dim is None]
    lead, places = (*(here or [UNNAMED]), *lead), tuple(place for place, _ in left)
    return _descend(plan, lead, places, count, [*whole, *(marker for _, marker in left)])


def _again(ctx: Any) -> tuple[Sequence[Tensor], Run]:
    """The saved indices, and what runs another plan at the same level."""
    saved = ctx.saved_tensors
    split = len(saved) - len(ctx.marked)
    markers = saved[split:]

    def run(operands: Sequence[Tensor], plan: CollectivePlan) -> Any:
        return VmapLevel.apply(
            plan.encode(), ctx.lead, ctx.marked, len(operands), *operands, *markers
        )

    return saved[:split], run


def _run(
    operands: list[Tensor], collective: str, axis_names: list[str], arguments: str
) -> list[Tensor]:
    return _run_here(operands, CollectiveSpec.decode(collective, arguments), tuple(axis_names))


def _run_here(
    operands: Sequence[Tensor], spec: CollectiveSpec, names: tuple[str, ...]
) -> list[Tensor]:
    """Look the axes up, and run the collective over them."""
    collective = spec.collective
    what = f"{collective}'s operand"
    for operand in operands:
        dtype_of(operand, what)
    entries = resolve_names(names)
    for entry in entries:
        if entry.index is None and not isinstance(entry, TensorAxis):
            raise TypeError(
                f"{collective} of tensors over axis {entry.name!r}, which a map of arrays has "
                "bound; use gpusim.torch.vmap or gpusim.torch.pmap"
            )
    if spec.sizes:
        here = tuple(entry.total for entry in entries)
        if spec.sizes != here:
            raise ValueError(
                f"{collective} over {names}: the graph was traced for axes of sizes {spec.sizes}, "
                f"but runs with {here}"
            )
        spec = replace(spec, sizes=())
    plan = CollectivePlan(spec, names, enclosing_axes())
    marked = {entry.depth: entry.marker for entry in _needed(plan, entries)}
    markers = {depth: marker for depth, marker in marked.items() if marker is not None}
    tensors = [*operands, *markers.values()]
    return [*_descend(plan, (), tuple(markers), len(operands), tensors)]


def _needed(plan: CollectivePlan, entries: Sequence[AxisEntry]) -> list[TensorAxis]:
    """The axes that operands must be batched over: the collective's own, and where random bits
    are drawn for each place, all."""
    stochastic = plan.draws  # the backward pass may sum where this does not
    chosen = axis_environment() if stochastic else entries
    return [entry for entry in chosen if isinstance(entry, TensorAxis)]


def _run_axis_index(axis_names: list[str]) -> Tensor:
    index: Any = None
    for entry in resolve_names(tuple(axis_names)):
        own = _index(entry)
        index = own if index is None else index * entry.total + own
    return torch.zeros((), dtype=torch.int32) if index is None else index


def _index(entry: AxisEntry) -> Tensor:
    marker = entry.marker if isinstance(entry, TensorAxis) else None
    if marker is not None:
        return marker + entry.offset
    return torch.tensor(entry.offset + (entry.index or 0), dtype=torch.int32)


_collective = graph_operator(
    "collective(Tensor[] operands, str collective, str[] axis_names, str arguments) -> Tensor[]",
    _run,
)
_axis_index = graph_operator("axis_index(str[] axis_names) -> Tensor", _run_axis_index)


def collective(
    operands: Sequence[Tensor], spec: CollectiveSpec, names: Sequence[str]
) -> list[Tensor]:
    """Run a collective over the named axes, which are looked up now or where the graph runs.

    **Raises**:

    - NameError: for an axis that is not bound.
    - TypeError: for an axis whose values are not tensors.
    """
    if not torch.compiler.is_dynamo_compiling():  # which cannot look up axes
        if not operators_are_seen():
            return _run_here(operands, spec, tuple(names))
        spec = replace(spec, sizes=traced_sizes(names))
    found: list[Tensor] = _collective([*operands], spec.collective, [*names], spec.encode())
    return found


def axis_index(names: Sequence[str]) -> Tensor:
    """int32 index of each replica along the axes, row-major."""
    found: Tensor = _axis_index([*names])
    return found
