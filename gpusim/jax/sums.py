"""The reductions of jax.lax on XLA:CPU, as a Reduction says: psum, pmean, psum_scatter, pmax, pmin.

JAX's pmean is a psum and a division. Here it is a primitive of its own, because the mean of
`gpusim.collectives` divides before the last rounding. With XLA's own Reduction, `xla-cpu`, it is
lowered as JAX's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gpusim.reduction import Reduction

from . import private, promotion
from .lowering import is_partly_manual, lower_call, lower_fully_manual

#: One Reduction for all axes, or by axis name (a tuple of names for sums over several axes).
Reductions = Reduction | Mapping[Any, Reduction | None] | None

SUMS = ("psum", "psum_scatter")
"""Collectives whose bits depend on the order; the largest and the smallest do not."""


class ReductionWarning(UserWarning):
    """A sum that the chosen Reduction does not reach."""


class AxesDiffer(ValueError):
    """A sum over several axes, for which different Reductions are given."""


def reduction_for(reductions: Reductions, axes: Sequence[Any]) -> Reduction | None:
    """The Reduction for a call over these axes; None leaves it to XLA.

    **Raises**: AxesDiffer where the axes of one call have different Reductions.
    """
    if reductions is None or isinstance(reductions, Reduction):
        return reductions
    if tuple(axes) in reductions:
        return reductions[tuple(axes)]
    chosen = [reductions.get(axis) for axis in axes]
    if any(other != chosen[0] for other in chosen[1:]):
        raise AxesDiffer(
            f"gpusim.jax: one sum over the axes {tuple(axes)!r}, which have different reductions: "
            f"give install an entry for the tuple {tuple(axes)!r}"
        )
    return chosen[0]


Rule = Callable[..., Any]


def reducing_rule(primitive: Any, collective: str, positional: Any, reductions: Reductions) -> Rule:
    """The lowering of psum, pmax or pmin, in one of their forms."""
    jax_rule = private.lowerings[primitive].rule

    def rule(ctx: Any, x: Any, **params: Any) -> Any:
        axes, axis_index_groups = params["axes"], params.get("axis_index_groups")
        names = tuple(axis for axis in axes if not isinstance(axis, int))
        reduction = reduction_for(reductions, names) if names else None
        if len(names) < len(axes):
            return _lower_positional(ctx, x, primitive, positional, names, params, jax_rule)
        if reduction is None:
            return jax_rule(ctx, x, **params)
        if is_partly_manual(ctx):
            return _lower_partly_manual(ctx, x, primitive, jax_rule, params)
        groups = private.replica_groups(ctx.module_context.axis_context, names, axis_index_groups)
        if collective in SUMS:
            return _lower_sum(ctx, x, collective, names, groups, reduction)
        return lower_call(ctx, [x], collective, names, groups)

    return rule


def _lower_sum(
    ctx: Any,
    x: Any,
    collective: str,
    names: Any,
    groups: Any,
    reduction: Reduction,
    parameters: Mapping[str, Any] | None = None,
) -> Any:
    """Emit the call; in the dtype in which XLA adds, where the Reduction is XLA's own."""
    options: dict[str, Any] = {"parameters": parameters, "reduction": reduction}
    wider = promotion.promoted(reduction, ctx.avals_in[0].dtype.name)
    if wider is None:
        return lower_call(ctx, [x], collective, names, groups, **options)
    avals = {
        name: [aval.update(dtype=np.dtype(wider)) for aval in getattr(ctx, name)]
        for name in ("avals_in", "avals_out")
    }
    given = [promotion.widen(x, wider)]
    found = lower_call(ctx.replace(**avals), given, collective, names, groups, **options)
    types = [private.type_of_aval(ctx.module_context, aval) for aval in ctx.avals_out]
    return [promotion.narrow(each, kind) for each, kind in zip(found, types, strict=True)]


def _lower_partly_manual(ctx: Any, x: Any, primitive: Any, jax_rule: Rule, params: Any) -> Any:
    """Lower a reduction in a shard_map over some of the mesh's axes: the partitioner inserts it.

    XLA:CPU ends the process for bfloat16 there. So these operands are whole along the other axes.
    """
    if ctx.avals_in[0].dtype == jnp.bfloat16:
        return lower_fully_manual(ctx, primitive, [x], params)
    return jax_rule(ctx, x, **params)


def _lower_positional(
    ctx: Any, x: Any, primitive: Any, positional: Any, names: Any, params: Any, jax_rule: Rule
) -> Any:
    """Axes of the array itself, as those of jax.vmap are: XLA reduces them."""
    warnings.warn(
        f"gpusim.jax: XLA reduces axes {[a for a in params['axes'] if isinstance(a, int)]} of an "
        "array on one device, in its own order (a collective over an axis of jax.vmap)",
        ReductionWarning,
        stacklevel=2,
    )
    if not names:
        return jax_rule(ctx, x, **params)

    def reduce(x: Any) -> Any:
        partial = positional(x, [axis for axis in params["axes"] if isinstance(axis, int)])
        return primitive.bind(partial, **{**params, "axes": names})

    return private.lower_function(reduce, multiple_results=False)(ctx, x)


def scattering_rule(primitive: Any, reductions: Reductions) -> Rule:
    """The lowering of psum_scatter, in one of its forms."""
    jax_rule = private.lowerings[primitive].rule

    def rule(ctx: Any, x: Any, **params: Any) -> Any:
        names = params["axis_name"]
        names = tuple(names) if isinstance(names, (tuple, list)) else (names,)
        reduction = reduction_for(reductions, names)
        if reduction is None:
            return jax_rule(ctx, x, **params)
        if is_partly_manual(ctx):
            return _lower_partly_manual(ctx, x, primitive, jax_rule, params)
        groups = private.replica_groups(
            ctx.module_context.axis_context, names, params.get("axis_index_groups")
        )
        own = {name: params[name] for name in ("scatter_dimension", "tiled")}
        return _lower_sum(ctx, x, "psum_scatter", names, groups, reduction, own)

    return rule


# pmean

mean_p = private.Primitive("pmean")
mean_invariant_p = private.Primitive("pmean_invariant")


@mean_p.def_effectful_abstract_eval
def _mean_type(x: Any, *, axes: Any, axis_index_groups: Any, size: int, before: bool) -> Any:
    return private.reduction_type(x, axes=axes, axis_index_groups=axis_index_groups)


@mean_invariant_p.def_effectful_abstract_eval
def _mean_invariant_type(x: Any, *, axes: Any, size: int) -> Any:
    return private.invariant_reduction_type("pmean", x, axes=axes)


for _primitive in (mean_p, mean_invariant_p):
    _primitive.def_impl(
        lambda x, _primitive=_primitive, **params: private.apply_primitive(_primitive, x, **params)
    )


def _transpose_mean(ct: Any, x: Any, *, before: bool, **params: Any) -> Any:
    # JAX's is the transpose of a sum and a division: it divides before it sums.
    return (mean_p.bind(ct, before=not before, **params),)


def _transpose_mean_invariant(ct: Any, x: Any, *, axes: Any, size: int) -> Any:
    return (private.pvary(ct / size, axis_name=axes),)


private.set_linear(mean_p, _transpose_mean)
private.set_linear(mean_invariant_p, _transpose_mean_invariant)


def _batching(primitive: Any, sum_primitive: Any) -> Any:
    def batch(axis_data: Any, values: Any, dims: Any, *, size: int, **params: Any) -> Any:
        if axis_data.name not in params["axes"]:
            return primitive.bind(values[0], size=size, **params), dims[0]
        params.pop("before", None)
        summed = private.batchers[sum_primitive]
        total, dim = summed(axis_data, values, dims, **params)
        return total / size, dim

    return batch


private.batchers[mean_p] = _batching(mean_p, private.psum_p)
private.batchers[mean_invariant_p] = _batching(mean_invariant_p, private.psum_invariant_p)


def _lower_as_sum(sum_primitive: Any) -> Rule:
    """The mean as JAX defines it: a sum and a division."""

    def mean(x: Any, *, size: int, before: bool = False, **params: Any) -> Any:
        if before:
            return sum_primitive.bind(x / size, **params)
        return sum_primitive.bind(x, **params) / size

    return private.lower_function(mean, multiple_results=False)


for _primitive, _sum in (
    (mean_p, private.psum_p),
    (mean_invariant_p, private.psum_invariant_p),
):
    private.register_lowering(_primitive, _lower_as_sum(_sum))


def mean_rule(primitive: Any, reductions: Reductions) -> Rule:
    """The lowering of pmean, in one of its two forms."""
    as_sum = private.lowerings[primitive].rule

    def rule(ctx: Any, x: Any, **params: Any) -> Any:
        axes = params["axes"]
        reduction = reduction_for(reductions, axes)
        # gpusim's divides before the last rounding, and by a division; XLA does neither.
        if reduction is None or promotion.is_xlas(reduction):
            return as_sum(ctx, x, **params)
        if is_partly_manual(ctx):
            return _lower_partly_manual(ctx, x, primitive, as_sum, params)
        groups = private.replica_groups(
            ctx.module_context.axis_context, axes, params.get("axis_index_groups")
        )
        return lower_call(ctx, [x], "pmean", axes, groups, reduction=reduction)

    return rule


def mean(x: Any, axis_name: Any, axis_index_groups: Any) -> Any:
    """Implement lax.pmean while a reduction is installed."""
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    names = private.skip_one_sized_axes(axes)
    if not names:
        return x
    groups = private.canonical_groups(axis_index_groups)
    even = groups is None or len({len(group) for group in groups}) == 1
    named = even and not any(isinstance(name, int) for name in names)

    def of(leaf: Any) -> Any:
        traced = isinstance(leaf, private.Tracer) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        reduced = traced and private.state_over(jax.typeof(leaf), names, "jax.lax.pmean")
        size = private.axis_size(axis_name, axis_index_groups)
        if not (traced and named) or reduced == "unreduced":
            return lax.psum(leaf, axis_name, axis_index_groups=axis_index_groups) / size
        if not private.checks_types():
            return mean_p.bind(leaf, axes=names, axis_index_groups=groups, size=size, before=False)
        if groups is not None:
            raise NotImplementedError("axis_index_groups need shard_map with check_vma=False")
        missing = frozenset(names) - jax.typeof(leaf).mat.varying
        if missing and private.casts_types():
            leaf = private.pvary(leaf, tuple(missing))
        return mean_invariant_p.bind(leaf, axes=names, size=size)

    return jax.tree.map(of, x)


def rules(reductions: Reductions) -> dict[Any, Rule]:
    """The lowerings, by primitive. For other platforms than CPUs they refuse."""
    found = {}
    for primitive, collective, positional in (
        (private.psum_p, "psum", private.reduce_sum),
        (private.psum_invariant_p, "psum", private.reduce_sum),
        (private.unreduced_psum_p, "psum", private.reduce_sum),
        (private.pmax_p, "pmax", private.reduce_max),
        (private.pmin_p, "pmin", private.reduce_min),
    ):
        found[primitive] = reducing_rule(primitive, collective, positional, reductions)
    for primitive in (private.reduce_scatter_p, private.unreduced_reduce_scatter_p):
        found[primitive] = scattering_rule(primitive, reductions)
    for primitive in (mean_p, mean_invariant_p):
        found[primitive] = mean_rule(primitive, reductions)
    return found
