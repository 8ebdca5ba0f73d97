"""lax.ragged_all_to_all on XLA:CPU, with right gradients, and with groups under vmap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import private
from .lowering import is_partly_manual, kind_of, lower_call, lower_fully_manual

INDICES = "input_offsets", "send_sizes", "output_offsets", "recv_sizes"
"""The last arguments of ragged_all_to_all, behind operand and output."""

ragged_p = private.ragged_p
jax_transpose = private.transposes[ragged_p]


def ragged_all_to_all(*operands: Any, axis_name: Any, axis_index_groups: Any) -> Any:
    """Implement lax.ragged_all_to_all while gpusim is installed.

    JAX's takes the type of `output` for the result's. Where shard_map checks types, an `output`
    that is the same on all devices, such as zeros, would make the result look the same on all, and
    gradients would be summed over the devices. Here all operands vary.
    """
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    groups = private.canonical_groups(axis_index_groups)
    try:
        private.check_axis_names(names, "ragged_all_to_all")
        over = frozenset(name for name in names if not isinstance(name, int))
        over = over.union(*(jax.typeof(operand).mat.varying for operand in operands))
        operands = tuple(private.collective_pvary(tuple(over), operand) for operand in operands)
    except (NameError, TypeError):
        pass  # JAX's own checks follow: they raise this, or what comes before it
    return ragged_p.bind(*operands, axis_name=names, axis_index_groups=groups)


def lower_ragged(ctx: Any, *operands: Any, axis_name: Any, axis_index_groups: Any) -> Any:
    """Lower ragged_all_to_all for CPUs."""
    params = {"axis_name": axis_name, "axis_index_groups": axis_index_groups}
    if is_partly_manual(ctx):
        return lower_fully_manual(ctx, ragged_p, operands, params)
    groups = even_groups(ctx, axis_name, axis_index_groups)
    return lower_call(ctx, operands, "ragged_all_to_all", axis_name, groups)


def even_groups(ctx: Any, axis_name: Any, axis_index_groups: Any) -> Any:
    """The groups of a call, which must have one size."""
    groups = private.replica_groups(ctx.module_context.axis_context, axis_name, axis_index_groups)
    size = len(groups[0])
    if any(len(group) != size for group in groups):
        raise ValueError("Replica groups must be equally sized")
    return groups


# The transpose: cotangents of operand and output, from that of the result.

transpose_p = private.Primitive("ragged_all_to_all_transpose")
transpose_p.multiple_results = True


@transpose_p.def_effectful_abstract_eval
def _transpose_types(
    ct: Any, *indices: Any, rows: int, axis_name: Any, axis_index_groups: Any
) -> Any:
    result = ct.update(shape=(rows, *ct.shape[1:]), weak_type=False)
    varying = frozenset().union(*(aval.mat.varying for aval in (ct, *indices)))
    results = [
        aval.update(manual_axis_type=aval.mat.update(varying=varying))
        for aval in (result, ct.update(weak_type=False))
    ]
    return results, {private.NamedAxisEffect(name) for name in axis_name}


def _lower_transpose(
    ctx: Any, *operands: Any, rows: int, axis_name: Any, axis_index_groups: Any
) -> Any:
    params = {"rows": rows, "axis_name": axis_name, "axis_index_groups": axis_index_groups}
    if is_partly_manual(ctx):
        return lower_fully_manual(ctx, transpose_p, operands, params)
    groups = even_groups(ctx, axis_name, axis_index_groups)
    operand, output = (kind_of(aval)._replace(absent=True) for aval in ctx.avals_out)
    return lower_call(
        ctx, operands, "ragged_all_to_all.transpose", axis_name, groups,
        absent={1: operand, 2: output},
    )  # fmt: skip


def _jax_transpose(
    ct: Any, *indices: Any, rows: int, axis_name: Any, axis_index_groups: Any
) -> Any:
    """JAX's own rule, for other devices."""
    operand, output = (
        private.UndefinedPrimal(jax.typeof(ct).update(shape=(count, *ct.shape[1:])))
        for count in (rows, ct.shape[0])
    )
    return jax_transpose(
        ct, operand, output, *indices, axis_name=axis_name, axis_index_groups=axis_index_groups
    )[:2]


private.register_lowering(
    transpose_p, private.lower_function(_jax_transpose, multiple_results=True)
)
private.register_lowering(transpose_p, _lower_transpose, platform="cpu")


@transpose_p.def_impl
def _no_axis(*operands: Any, **params: Any) -> Any:
    raise RuntimeError("ragged_all_to_all must be used within a mapped context.")


def transpose_ragged(
    ct: Any, operand: Any, output: Any, *indices: Any, axis_name: Any, axis_index_groups: Any
) -> list[Any]:
    """The rule for ragged_all_to_all that replaces JAX's."""
    params = {"axis_name": axis_name, "axis_index_groups": axis_index_groups}
    if type(ct) is private.Zero:
        return jax_transpose(ct, operand, output, *indices, **params)
    found = transpose_p.bind(ct, *indices, rows=operand.aval.shape[0], **params)
    asked = [
        value if private.is_undefined_primal(given) else None
        for given, value in zip((operand, output), found, strict=True)
    ]
    return asked + [None] * len(INDICES)


def _transpose_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    ct, *indices = primals
    results = transpose_p.bind(ct, *indices, **params)
    if type(tangents[0]) is private.Zero:
        return results, [private.p2tz(result) for result in results]
    return results, transpose_p.bind(tangents[0], *indices, **params)


def _transpose_transpose(
    cts: Any, ct: Any, *indices: Any, rows: int, axis_name: Any, axis_index_groups: Any
) -> list[Any]:
    operand, output = map(private.instantiate_zeros, cts)
    found = ragged_p.bind(
        operand, output, *indices, axis_name=axis_name, axis_index_groups=axis_index_groups
    )
    return [found] + [None] * len(INDICES)


private.jvps[transpose_p] = _transpose_jvp
private.transposes[transpose_p] = _transpose_transpose


# vmap outside: the entries of the batch become rows behind each other, and slices of one call.


def batch_ragged(
    axis_data: Any, values: Sequence[Any], axes: Sequence[Any], *,
    axis_name: Any, axis_index_groups: Any,
) -> Any:  # fmt: skip
    """The rule for ragged_all_to_all that replaces JAX's, which refuses groups."""
    params = {"axis_name": axis_name, "axis_index_groups": axis_index_groups}
    if all(axis is None for axis in axes) and axis_data.name not in axis_name:
        return ragged_p.bind(*values, **params), None
    size = _batch_size(axis_data, axis_name)
    _check_indices(values[2:], axes[2:])
    operand, output = (_front(x, axis, size) for x, axis in zip(values[:2], axes[:2], strict=True))
    indices = _merged_indices(values[2:], axes[2:], size, operand.shape[1], output.shape[1])
    result = ragged_p.bind(_merge(operand), _merge(output), *indices, **params)
    return result.reshape(output.shape), 0


def _batch_transpose(
    axis_data: Any, values: Sequence[Any], axes: Sequence[Any], *,
    rows: int, axis_name: Any, axis_index_groups: Any,
) -> Any:  # fmt: skip
    params = {"axis_name": axis_name, "axis_index_groups": axis_index_groups}
    if all(axis is None for axis in axes) and axis_data.name not in axis_name:
        return transpose_p.bind(*values, rows=rows, **params), [None, None]
    size = _batch_size(axis_data, axis_name)
    ct = _front(values[0], axes[0], size)
    indices = _merged_indices(values[1:], axes[1:], size, rows, ct.shape[1])
    found = transpose_p.bind(_merge(ct), *indices, rows=rows * size, **params)
    return [each.reshape(size, each.shape[0] // size, *each.shape[1:]) for each in found], [0, 0]


def _batch_size(axis_data: Any, axis_name: Any) -> int:
    if axis_data.name in axis_name:
        raise NotImplementedError(
            f"ragged_all_to_all over {axis_data.name!r}, an axis of jax.vmap: use jax.shard_map, "
            "or gpusim.vmap with gpusim.lax"
        )
    size: int = axis_data.size
    return size


def _check_indices(indices: Sequence[Any], axes: Sequence[int | None]) -> None:
    """Refuse one entry's offsets and sizes as JAX does without vmap: here they are promoted."""
    types = [jax.typeof(x) for x in indices]
    for name, kind in zip(INDICES, types, strict=True):
        if not jnp.issubdtype(kind.dtype, jnp.integer):
            raise ValueError(f"ragged_all_to_all {name} must be integer type.")
    for name, kind, axis in zip(INDICES, types, axes, strict=True):
        shape = tuple(size for k, size in enumerate(kind.shape) if k != axis)
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(
                f"ragged_all_to_all {name} must be rank 1 with positive dimension size, "
                f"but got shape {shape}"
            )


def _front(x: Any, axis: int | None, size: int) -> Any:
    return private.bdim_at_front(x, axis, size)


def _merge(x: Any) -> Any:
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])


def _merged_indices(
    indices: Sequence[Any], axes: Sequence[Any], size: int, sent_rows: int, received_rows: int
) -> list[Any]:
    """Offsets and sizes (slices x batch entries), with each entry's first row added to offsets."""
    merged = []
    for x, axis, rows in zip(indices, axes, (sent_rows, 0, received_rows, 0), strict=True):
        wide = jnp.promote_types(x.dtype, jnp.int32)
        each = _front(x, axis, size).astype(wide)
        each += (lax.iota(wide, size) * rows)[:, None]
        merged.append(each.T.reshape(-1))
    return merged


private.batchers[transpose_p] = _batch_transpose
