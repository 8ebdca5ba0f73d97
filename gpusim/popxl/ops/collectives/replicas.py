"""Reductions, gathers and slices over replicas, by gpusim.collectives on stacked arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpusim import collectives
from gpusim.reduction import Reduction

from ..._definition import (
    Array,
    Attributes,
    Definition,
    GradientRule,
    GradientSite,
    Specs,
    add_op,
    fixed_spec,
    only_compiled,
)
from ..._op import Op
from ...replica_grouping import ReplicaGrouping
from ...tensor import Tensor, TensorSpec
from .collectives import CollectiveOps, group_of, to_collective_op

if TYPE_CHECKING:
    from gpusim.groups import Groups

    from ...execution import Machine
    from ...execution.compiler import GraphCompiler
    from ...execution.program import Step

__all__ = [
    "replicated_all_reduce",
    "replicated_all_reduce_",
    "replicated_all_gather",
    "replicated_reduce_scatter",
    "replica_sharded_slice",
    "replicated_slice",
]

#: A collective on stacked arrays: (machine, value, groups or None, attributes) -> value.
Rule = Callable[["Machine", Array, "Groups | None", Attributes], Array]


def local_part(machine: Machine, parts: Array, groups: Groups | None, axis: int) -> Array:
    """From (replicas, ..., members, ...) each replica's entry along the members' axis."""
    replicas = range(machine.offset, machine.offset + machine.replicas)
    members = groups.members if groups else [range(machine.total)]
    position = {replica: at for group in members for at, replica in enumerate(group)}
    xp = machine.xp
    positions = xp.asarray([position[replica] for replica in replicas])
    return xp.moveaxis(parts, axis, 1)[xp.arange(len(parts)), positions]


def compile_rule(rule: Rule, in_place: bool = False) -> Callable[[GraphCompiler, Op], Step]:
    """The compile function of a collective."""

    def compile(compiler: GraphCompiler, op: Op) -> Step:
        machine, attributes, name = compiler.machine, op.attributes, op.debugName()
        partition: Groups = attributes["group"]._groups
        groups = None if partition.group_count == 1 else partition
        if partition.size != machine.total and not (groups is None and rule is all_reduce):
            raise RuntimeError(
                f"{name} was made for {partition.size} replicas, but there are {machine.total} now"
            )
        source, output = compiler.slot(op.inputs[0]), compiler.slot(op.outputs[0])

        def step(values: list[Any]) -> None:
            machine.need_all(name)
            result = rule(machine, values[source], groups, attributes)
            if in_place:
                values[source][...] = result
                result = values[source]
            values[output] = result

        return step

    return compile


def collective_op(
    op_type: str, infer: Any, rule: Rule, gradient: GradientRule | None, in_place: bool = False
) -> Definition:
    """The definition of a collective."""
    return Definition(
        op_type,
        infer,
        only_compiled,
        gradient,
        aliases={0: 0} if in_place else {},
        modifies=(0,) if in_place else (),
        collective=True,
        compile=compile_rule(rule, in_place),
    )


# All-reduce


def reduction(collective: Any, **options: Any) -> Callable[[Machine, Array, Any], Array]:
    """A reduction over each group, with the result on all of its replicas."""

    def rule(machine: Machine, value: Array, groups: Any) -> Array:
        result = machine.instances.run(collective, value, groups=groups, **options)
        if result.mapped:
            return result.value
        return machine.xp.broadcast_to(result.value, value.shape)

    return rule


def square_sum(machine: Machine, value: Array, groups: Any) -> Array:
    return reduction(collectives.psum)(machine, value * value, groups)


def operator(op: str) -> Callable[[Machine, Array, Any], Array]:
    return reduction(collectives.all_reduce, reduction=Reduction(op=op))


#: PopXL's operators. "local" does not reduce.
OPERATORS: dict[str, Callable[[Machine, Array, Any], Array]] = {
    "add": reduction(collectives.psum),
    "mean": reduction(collectives.pmean),
    "mul": operator("prod"),
    "min": reduction(collectives.pmin),
    "max": reduction(collectives.pmax),
    "and": operator("logical_and"),
    "or": operator("logical_or"),
    "square_add": square_sum,
    "local": lambda machine, value, groups: value,
}


def all_reduce(machine: Machine, value: Array, groups: Any, attributes: Attributes) -> Array:
    name = attributes["op"]
    if value.dtype == np.bool_ and name in ("add", "mul", "min", "max"):  # logical operators
        name = {"add": "or", "max": "or", "mul": "and", "min": "and"}[name]
    return OPERATORS[name](machine, value, groups)


def input_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return inputs


def all_reduce_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    name, gradient = site.attributes["op"], site.gradient()
    if name not in ("add", "mean", "local"):
        raise NotImplementedError(f"{site.op.debugName()}: no gradient for op={name!r}")
    if gradient is None or name == "local":
        return [gradient]
    return add_op(ALL_REDUCE, [gradient], site.attributes)


ALL_REDUCE = collective_op("ReplicatedAllReduce", input_spec, all_reduce, all_reduce_gradient)
ALL_REDUCE_INPLACE = collective_op(
    "ReplicatedAllReduceInplace", input_spec, all_reduce, None, in_place=True
)


def replicated_all_reduce(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """Reduce a tensor over the replicas of each group; the result is on all of them.

    **Arguments**

    - `op`: "add", "mean", "mul", "min", "max", "and", "or", "square_add" (the sum of the squares)
      or "local" (no reduction).
    - `group`: by default one group of all replicas.

    Sums and means are those of `gpusim.collectives.psum` and `pmean`. The `gpusim.reduction`
    context of the session's run decides on their order and rounding.

    **Raises**

    - ValueError: for another operator.
    - NotImplementedError: if the groups have no constant stride.
    """
    attributes = {"op": to_collective_op(op), "group": group_of(group)}
    return add_op(ALL_REDUCE, [t], attributes)[0]


def replicated_all_reduce_(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """As `replicated_all_reduce`, in place."""
    attributes = {"op": to_collective_op(op), "group": group_of(group)}
    return add_op(ALL_REDUCE_INPLACE, [t], attributes)[0]


# All-gather


def all_gather(machine: Machine, value: Array, groups: Any, attributes: Attributes) -> Array:
    """Gather along a new first axis, and bring the result into the shape of the attributes."""
    result = machine.instances.run(collectives.all_gather, value, groups=groups, axis=0)
    rows = result.value if result.mapped else result.value[None]  # (replicas or 1, members, *s)
    spec, mode, axis = attributes["spec"], attributes["output_shape"], attributes["axis"]
    if mode == "concat":
        rows = machine.xp.moveaxis(rows, 1, axis + 1).reshape(-1, *spec.shape)
    elif mode == "meta_shape":
        flat = rows.reshape(len(rows), -1)[:, : math.prod(spec.shape)]
        rows = flat.reshape(-1, *spec.shape)
    return machine.xp.broadcast_to(rows, (len(value), *spec.shape))


def all_gather_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    """Each replica's part of its own gradient: all replicas of a group hold the same one."""
    gradient, attributes, spec = site.gradient(), site.attributes, site.op.inputs[0].spec
    if gradient is None:
        return [None]
    kept = {"group": attributes["group"], "spec": spec}
    if attributes["output_shape"] == "meta_shape":
        return add_op(REDUCE_SCATTER, [gradient], {"op": "local", **kept})
    return add_op(SLICE, [gradient], {"axis": attributes["axis"], **kept})


ALL_GATHER = collective_op("ReplicatedAllGather", fixed_spec, all_gather, all_gather_gradient)


def replicated_all_gather(
    t: Tensor,
    axis: int = 0,
    group: ReplicaGrouping | None = None,
    output_shape: Literal["new_axis", "concat", "meta_shape", "auto"] = "auto",
) -> Tensor:
    """Gather the values of all replicas of each group; the result is on all of them.

    **Arguments**

    - `axis`: the axis of "concat".
    - `group`: by default one group of all replicas.
    - `output_shape`: "new_axis" gives (group size, *shape). "concat" joins the values along `axis`.
      "meta_shape" joins shards to their whole tensor, of the shape meta_shape, without padding.
      "auto" is "meta_shape" for tensors that have one, else "concat".

    **Raises**

    - ValueError: for another `output_shape`, if `axis` is not an integer or out of range, or if the
      shards do not make up their meta_shape.
    - NotImplementedError: if the groups have no constant stride.
    """
    if not isinstance(axis, int):
        raise ValueError(f"Axis should be an int. Type: {type(axis)}. Value: {axis}")
    if output_shape not in ("new_axis", "concat", "meta_shape", "auto"):
        raise ValueError(
            "output_shape must equal one of 'new_axis', 'concat', 'meta_shape', 'auto'. "
            f"Value: {output_shape}"
        )
    groups = group_of(group)
    mode = output_shape
    if mode == "auto":
        mode = "meta_shape" if t.meta_shape else "concat"
    if mode == "concat" and not t.shape:
        mode = "new_axis"  # scalars make a vector
    shape, axis = gathered_shape(t, axis, groups.group_size, mode)
    attributes = {
        "axis": axis,
        "group": groups,
        "output_shape": mode,
        "spec": TensorSpec(shape, t.dtype),
    }
    return add_op(ALL_GATHER, [t], attributes)[0]


def gathered_shape(t: Tensor, axis: int, size: int, mode: str) -> tuple[tuple[int, ...], int]:
    """The shape of the result, and the axis counted from the front."""
    if mode == "new_axis":
        return (size, *t.shape), 0
    if mode == "meta_shape":
        count = math.prod(t.meta_shape)
        if not t.meta_shape or t.nelms * size < count or t.nelms != -(-count // size):
            raise ValueError(
                f"{size} shards of shape {t.shape} do not make up the meta_shape {t.meta_shape}"
            )
        return t.meta_shape, 0
    if not -t.rank <= axis < t.rank:
        raise ValueError(f"axis={axis}: out of range for {t}")
    axis %= t.rank
    return (*t.shape[:axis], size * t.shape[axis], *t.shape[axis + 1 :]), axis


# Reduce-scatter


def reduce_scatter(machine: Machine, value: Array, groups: Any, attributes: Attributes) -> Array:
    """Reduce flat, padded values; each member gets its slice, in the order of the group."""
    xp, size, name = machine.xp, attributes["group"].group_size, attributes["op"]
    flat, shape = value.reshape(len(value), -1), (len(value), *attributes["spec"].shape)
    part = math.prod(shape[1:])
    if part * size != flat.shape[1]:
        flat = xp.pad(flat, ((0, 0), (0, part * size - flat.shape[1])))
    if name in ("add", "mean"):
        result = machine.instances.run(collectives.psum_scatter, flat, groups=groups, tiled=True)
        value = result.value
        if name == "mean":
            value = value // size if value.dtype.kind in "iu" else value / value.dtype.type(size)
        return value.reshape(shape)
    whole = all_reduce(machine, flat, groups, attributes)
    return local_part(machine, whole.reshape(len(flat), size, part), groups, 1).reshape(shape)


def reduce_scatter_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    """The slices' gradients joined; for "local" too, as its replicas hold one value."""
    gradient, attributes = site.gradient(), site.attributes
    if gradient is None:
        return [None]
    name = attributes["op"]
    if name not in ("add", "mean", "local"):
        raise NotImplementedError(f"{site.op.debugName()}: no gradient for op={name!r}")
    whole = site.op.inputs[0]
    how = {
        "group": attributes["group"],
        "axis": 0,
        "output_shape": "meta_shape",
        "spec": TensorSpec(whole.shape, whole.dtype),
    }
    (gathered,) = add_op(ALL_GATHER, [gradient], how)
    return [gathered / float(attributes["group"].group_size) if name == "mean" else gathered]


REDUCE_SCATTER = collective_op(
    "ReplicatedReduceScatter", fixed_spec, reduce_scatter, reduce_scatter_gradient
)


def replicated_reduce_scatter(
    t: Tensor,
    op: CollectiveOps = "add",
    group: ReplicaGrouping | None = None,
    configure_output_for_replicated_tensor_sharding: bool = False,
) -> Tensor:
    """Reduce a tensor over each group; each replica gets one slice of the result.

    **Arguments**

    - `op`, `group`: as for `replicated_all_reduce`; "local" slices the replica's own value.
    - `configure_output_for_replicated_tensor_sharding`: whether the slice is a shard with the
      tensor's shape as its meta_shape.

    **Returns** the slice: 1-D, of ceil(elements / group size) elements; the last one is filled up
    with zeros.
    """
    groups = group_of(group)
    whole = t.meta_shape or t.shape
    meta = whole if configure_output_for_replicated_tensor_sharding else ()
    spec = TensorSpec((-(-t.nelms // groups.group_size),), t.dtype, meta)
    attributes = {"op": to_collective_op(op), "group": groups, "spec": spec}
    return add_op(REDUCE_SCATTER, [t], attributes)[0]


def replica_sharded_slice(t: Tensor, group: ReplicaGrouping | None = None) -> Tensor:
    """Each replica's shard of its own value: 1-D, padded, with the tensor's shape as meta_shape."""
    return replicated_reduce_scatter(t, "local", group, True)


# Slices of a value that all replicas hold


def slice_value(machine: Machine, value: Array, groups: Any, attributes: Attributes) -> Array:
    """Each member's part of its own value along an axis."""
    axis, size = attributes["axis"] + 1, attributes["group"].group_size
    cut = (*value.shape[:axis], size, value.shape[axis] // size, *value.shape[axis + 1 :])
    parts = local_part(machine, value.reshape(cut), groups, axis)
    return parts.reshape(len(value), *attributes["spec"].shape)


def slice_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    """The slices' gradients joined, as the replicas hold one value."""
    gradient, attributes = site.gradient(), site.attributes
    if gradient is None:
        return [None]
    whole = site.op.inputs[0]
    how = {
        "group": attributes["group"],
        "axis": attributes["axis"],
        "output_shape": "concat",
        "spec": TensorSpec(whole.shape, whole.dtype),
    }
    return add_op(ALL_GATHER, [gradient], how)


SLICE = collective_op("ReplicatedSlice", fixed_spec, slice_value, slice_gradient)


def replicated_slice(t: Tensor, axis: int = 0, group: ReplicaGrouping | None = None) -> Tensor:
    """Each replica's part of its own value along an axis, by its place in the group.

    An axis as long as the group is dropped: the inverse of a gather along a new axis.

    **Raises**: ValueError: if the group size does not divide the axis, or there is no such axis.
    """
    groups = group_of(group)
    size = groups.group_size
    if not -t.rank <= axis < t.rank:
        raise ValueError(f"axis={axis}: out of range for {t}")
    axis %= t.rank
    length, rest = divmod(t.shape[axis], size)
    if rest:
        raise ValueError(
            f"Replicated slice must equally divide axis. Axis size: {t.shape[axis]}. Replica group "
            f"size: {size}"
        )
    shape = (*t.shape[:axis], *((length,) if length != 1 else ()), *t.shape[axis + 1 :])
    attributes = {"axis": axis, "group": groups, "spec": TensorSpec(shape, t.dtype)}
    return add_op(SLICE, [t], attributes)[0]
