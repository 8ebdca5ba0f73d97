"""gpusim::stacked, the operator that computes. Its operands hold all replicas' values; the leading
dimensions are the enclosing axes. (In a replica's thread the operands are its own.)"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import GpusimError
from ..libraries import on_device
from ..maps.arguments import read_only
from ..maps.axis_environment import Axes
from ..maps.bind import bind_leaves
from ..maps.mapped_array.array import unpack, wrap
from ..reduction import State, entered
from .axes import rebound
from .derivatives import cotangents_of_operands, save
from .local import Position
from .plan import CollectivePlan
from .tensors import as_array, as_tensor, dtype_of, on_stream_of, torch_dtype

__all__ = ["UNNAMED", "batched", "compute", "stacked"]

UNNAMED = -1
"""The origin of a leading dimension: an axis, by its place in `CollectivePlan.enclosing`, or a
torch.func.vmap that has no name in gpusim."""


@torch.library.custom_op(
    "gpusim::stacked",
    mutates_args=(),
    schema="(Tensor[] operands, int[] lead, str plan) -> Tensor[]",
)
def stacked(operands: list[Tensor], lead: list[int], plan: str) -> list[Tensor]:
    """The results, with the leading dimensions `lead` of the operands; computed here and now."""
    return compute(operands, lead, CollectivePlan.decode(plan))


def compute(
    operands: Sequence[Tensor], origins: Sequence[int], plan: CollectivePlan
) -> list[Tensor]:
    for axis in plan.enclosing:
        if axis.kind == "traced" and axis.name in plan.names:
            raise GpusimError(
                f"{plan.spec.collective} over axis {axis.name!r} cannot run on values: trace_axes "
                "bound it, which is for tracing; run the graph in vmap or pmap"
            )
    sizes = operands[0].shape[: len(origins)]
    unnamed = [size for size, origin in zip(sizes, origins, strict=True) if origin == UNNAMED]
    with on_stream_of(operands), rebound(plan.enclosing, unnamed) as entries:
        if plan.operation.local is not None:
            return _run_local(operands, origins, plan, entries)
        later = iter(entries[len(plan.enclosing) :])
        axes = tuple([next(later) if o == UNNAMED else entries[o] for o in origins])
        values = _enter(operands, axes, f"{plan.spec.collective}'s operand")
        replicated = plan.replicated
        return [_leave(result, axes, replicated) for result in _bind(plan, values)]


def _run_local(
    operands: Sequence[Tensor], origins: Sequence[int], plan: CollectivePlan, entries: Axes | None
) -> list[Tensor]:
    """Compute each replica's own result; without axes, of fake tensors."""
    (place,) = plan.over
    first = 0 if entries is None else entries[place].offset + (entries[place].index or 0)
    position = Position.of(origins, place, plan.enclosing[place], first)
    local = plan.operation.local
    assert local is not None
    return [local(operand, position) for operand in operands]


def _bind(plan: CollectivePlan, values: list[Any]) -> list[Any]:
    """The same call that `gpusim.lax` makes of a tree with these leaves."""
    given, arity = plan.spec.reduction, plan.operation.operands
    leaves = [tuple(values[first : first + arity]) for first in range(0, len(values), arity)]
    for place in plan.spec.numbers:
        leaves.insert(place, (0,))
    with nullcontext() if given is None else entered(State(given)):
        found = bind_leaves(plan.call(), leaves)
    wanted = (results for place, results in enumerate(found) if place not in plan.spec.numbers)
    return [result for results in wanted for result in results]


def _enter(operands: Sequence[Tensor], axes: Axes, what: str) -> list[Any]:
    """The tensors as values inside gpusim's maps."""
    order = [*range(len(axes))]
    if len(axes) > 1:
        order.sort(key=lambda place: axes[place].depth)
    moved = order != [*range(len(axes))]
    entered, values = tuple([axes[place] for place in order]), []
    for operand in operands:
        if moved:
            operand = operand.permute((*order, *range(len(axes), operand.ndim)))
        data = read_only(as_array(operand, what))
        values.append(wrap(data, entered) if axes else data)
    return values


def _leave(result: Any, axes: Axes, replicated: bool) -> Tensor:
    """A result with all of these leading dimensions; what is the same on all replicas is in memory
    once."""
    data, own = unpack(result)
    leading = [axis for axis in axes if axis in own]
    order = [own.index(axis) for axis in leading]
    if order != [*range(len(own))]:
        data = data.transpose(*order, *range(len(own), data.ndim))
    found = as_tensor(data, copy=on_device(data)).contiguous()  # a GPU's views are writable
    if len(leading) == len(axes):
        return found
    if leading:
        found = found[(*(slice(None) if axis in leading else None for axis in axes), ...)]
    expanded = found.expand((*[axis.size for axis in axes], *data.shape[len(leading) :]))
    return expanded if replicated else expanded.contiguous()


@stacked.register_fake
def _fake(operands: list[Tensor], lead: list[int], plan: str) -> list[Tensor]:
    chosen = CollectivePlan.decode(plan)
    if chosen.operation.local is not None:
        return _run_local(operands, lead, chosen, None)
    sizes = operands[0].shape[: len(lead)]
    name = chosen.spec.collective
    shapes = [(tuple(x.shape[len(lead) :]), dtype_of(x, f"{name}'s operand")) for x in operands]
    stored = [
        1 if chosen.replicated and origin in chosen.over else size
        for size, origin in zip(sizes, lead, strict=True)
    ]
    return [
        operands[0].new_empty((*stored, *shape), dtype=torch_dtype(dtype)).expand((*sizes, *shape))
        for shape, dtype in chosen.results(shapes)
    ]


@stacked.register_vmap
def _vmap_stacked(
    info: Any, in_dims: Any, operands: list[Tensor], lead: list[int], plan: str
) -> tuple[list[Tensor], list[int]]:
    """A torch.func.vmap around what is stacked already: one more leading dimension."""
    dims = in_dims[0] or [None] * len(operands)
    whole = [batched(x, dim, info.batch_size) for x, dim in zip(operands, dims, strict=True)]
    results = stacked(whole, [UNNAMED, *lead], plan)
    return results, [0] * len(results)


def batched(x: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with its batch dimension first. What is not batched is the same for all: it counts
    once for each of them."""
    if dim is None:
        return x.expand(size, *x.shape)
    return x.movedim(dim, 0) if dim else x


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    operands, ctx.lead, ctx.plan = inputs
    save(ctx, CollectivePlan.decode(ctx.plan), operands, ())


def _backward(ctx: Any, cotangents: list[Tensor]) -> tuple[Any, None, None]:
    def run(operands: Sequence[Tensor], plan: CollectivePlan) -> Sequence[Tensor]:
        found: list[Tensor] = stacked([*operands], ctx.lead, plan.encode())
        return found

    plan = CollectivePlan.decode(ctx.plan)
    return cotangents_of_operands(ctx, plan, cotangents, ctx.saved_tensors, run), None, None


stacked.register_autograd(_backward, setup_context=_save)
