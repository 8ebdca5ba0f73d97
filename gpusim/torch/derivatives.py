"""Derivatives of collectives: cotangents go back through the transposed collective, in the
reduction of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..reduction import current, entered
from .plan import CollectivePlan

__all__ = ["cotangents_of_operands", "save", "tangents_of_results"]

Run = Callable[[Sequence[Tensor], CollectivePlan], Sequence[Tensor]]
"""Runs a plan on operands, where the forward pass ran."""


def save(
    ctx: Any, plan: CollectivePlan, operands: Sequence[Tensor], more: Sequence[Tensor]
) -> None:
    """Keep what both passes need: index operands, and of others only shapes; and `more`."""
    ctx.linear = [x.is_floating_point() or x.is_complex() for x in operands]
    ctx.shapes = [x.shape for x in operands]
    ctx.state = current()
    integers = [x for x, linear in zip(operands, ctx.linear, strict=True) if not linear]
    indices = integers if plan.operation.operands > 1 else []
    ctx.save_for_backward(*indices, *more)
    ctx.save_for_forward(*indices, *more)


def cotangents_of_operands(
    ctx: Any,
    plan: CollectivePlan,
    cotangents: Sequence[Tensor],
    indices: Sequence[Tensor],
    run: Run,
) -> list[Tensor | None]:
    """The operands' cotangents, None for those of integers.

    **Raises**:

    - NotImplementedError: for a collective without a derivative.
    """
    back = _transposed(plan)
    with entered(ctx.state):
        if plan.operation.operands == 1:
            leaves = zip(cotangents, ctx.linear, strict=True)
            return _spread(run([ct for ct, linear in leaves if linear], back), ctx.linear)
        operands = [*cotangents]
        if plan.spec.collective == "ragged_all_to_all":  # of its arrays only the shapes matter
            operands += [cotangents[0].new_zeros(()).expand(shape) for shape in ctx.shapes[:2]]
        found = run([*operands, *indices], back)
    return [*found, *[None] * (len(ctx.shapes) - len(found))]


def tangents_of_results(
    ctx: Any,
    plan: CollectivePlan,
    tangents: Sequence[Tensor | None],
    indices: Sequence[Tensor],
    run: Run,
) -> list[Tensor | None]:
    """The results' tangents: those of the operands through the collective itself, as it is linear.

    **Raises**:

    - NotImplementedError: for a collective without a derivative.
    """
    _transposed(plan)
    given = next(tangent for tangent in tangents if tangent is not None)
    linear = [
        given.new_zeros(shape) if tangent is None else tangent
        for tangent, shape, linear in zip(tangents, ctx.shapes, ctx.linear, strict=True)
        if linear
    ]
    with entered(ctx.state):
        found = run([*linear, *indices], plan)
    return _spread(found, ctx.linear) if plan.operation.operands == 1 else [*found]


def _spread(found: Sequence[Tensor], linear: Sequence[bool]) -> list[Tensor | None]:
    """The values in the places of linear leaves, None in the others."""
    values = iter(found)
    return [next(values) if is_linear else None for is_linear in linear]


def _transposed(plan: CollectivePlan) -> CollectivePlan:
    back = plan.transposed()
    if back is None:
        raise NotImplementedError(
            f"{plan.spec.collective} has no derivative in gpusim: detach its operand, or what "
            "depends on its result"
        )
    return back
