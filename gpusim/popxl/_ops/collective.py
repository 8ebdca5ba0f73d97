"""Collectives over replicas, by gpusim.collectives on stacked arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpusim import collectives
from gpusim.reduction import Reduction

from ..tensor import Tensor, TensorSpec
from .definition import Definition, GradientSite, add_op
from .hosting import only_compiled
from .op import Op

if TYPE_CHECKING:
    from gpusim.groups import Groups

    from ..execution import Machine
    from ..execution.compiler import GraphCompiler
    from ..execution.program import Step

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_REDUCE_INPLACE",
    "OPERATORS",
    "REDUCE_SCATTER",
    "SLICE",
]

Array = Any
Attributes = Mapping[str, Any]
#: A collective on stacked arrays: (machine, value, groups or None, attributes) -> value.
Rule = Callable[["Machine", Array, "Groups | None", Attributes], Array]


def reduced(collective: Any, **options: Any) -> Callable[[Machine, Array, Any], Array]:
    """A reduction over each group, on all of its replicas."""

    def rule(machine: Machine, value: Array, groups: Any) -> Array:
        result = machine.collective(collective, value, groups=groups, **options)
        if result.mapped:
            return result.value
        return machine.xp.broadcast_to(result.value, value.shape)

    return rule


def square_sum(machine: Machine, value: Array, groups: Any) -> Array:
    return reduced(collectives.psum)(machine, value * value, groups)


def operator(op: str) -> Callable[[Machine, Array, Any], Array]:
    return reduced(collectives.all_reduce, reduction=Reduction(op=op))


#: PopXL's names, and what they are here. "local" reduces nothing.
OPERATORS: dict[str, Callable[[Machine, Array, Any], Array]] = {
    "add": reduced(collectives.psum),
    "mean": reduced(collectives.pmean),
    "mul": operator("prod"),
    "min": reduced(collectives.pmin),
    "max": reduced(collectives.pmax),
    "and": operator("logical_and"),
    "or": operator("logical_or"),
    "square_add": square_sum,
    "local": lambda machine, value, groups: value,
}


def all_reduce(machine: Machine, value: Array, groups: Any, attributes: Attributes) -> Array:
    name = attributes["op"]
    if value.dtype == np.bool_ and name in ("add", "mul", "min", "max"):  # of truth values
        name = {"add": "or", "max": "or", "mul": "and", "min": "and"}[name]
    return OPERATORS[name](machine, value, groups)


def all_gather(machine: Machine, value: Array, groups: Any, attributes: Attributes) -> Array:
    """Gathered along a new first axis, and from there brought into the shape that is asked for."""
    result = machine.collective(collectives.all_gather, value, groups=groups, axis=0)
    rows = result.value if result.mapped else result.value[None]  # (replicas or 1, members, *s)
    spec, mode, axis = attributes["spec"], attributes["output_shape"], attributes["axis"]
    if mode == "concat":
        rows = machine.xp.moveaxis(rows, 1, axis + 1).reshape(-1, *spec.shape)
    elif mode == "meta_shape":
        flat = rows.reshape(len(rows), -1)[:, : math.prod(spec.shape)]
        rows = flat.reshape(-1, *spec.shape)
    return machine.xp.broadcast_to(rows, (len(value), *spec.shape))


def reduce_scatter(machine: Machine, value: Array, groups: Any, attributes: Attributes) -> Array:
    """Flat and padded; each member has its slice, in the order of the group."""
    xp, size, name = machine.xp, attributes["group_size"], attributes["op"]
    flat = value.reshape(len(value), -1)
    part = attributes["spec"].shape[0]
    if part * size != flat.shape[1]:
        flat = xp.pad(flat, ((0, 0), (0, part * size - flat.shape[1])))
    if name in ("add", "mean"):
        result = machine.collective(collectives.psum_scatter, flat, groups=groups, tiled=True)
        value = result.value
        if name == "mean":
            value = value // size if value.dtype.kind in "iu" else value / value.dtype.type(size)
        return value
    whole = all_reduce(machine, flat, groups, attributes)
    return own_part(machine, whole.reshape(len(flat), size, part), groups, 1)


def sliced(machine: Machine, value: Array, groups: Any, attributes: Attributes) -> Array:
    """Each member's part of its own value along an axis."""
    axis, size = attributes["axis"] + 1, attributes["group_size"]
    cut = (*value.shape[:axis], size, value.shape[axis] // size, *value.shape[axis + 1 :])
    return own_part(machine, value.reshape(cut), groups, axis)


def own_part(machine: Machine, parts: Array, groups: Groups | None, axis: int) -> Array:
    """From (replicas, ..., members, ...) each replica's entry along the members' axis."""
    replicas = range(machine.offset, machine.offset + machine.replicas)
    place = {r: p for members in groups.members for p, r in enumerate(members)} if groups else None
    positions = [replica if place is None else place[replica] for replica in replicas]
    xp = machine.xp
    rows, chosen = xp.arange(len(parts)), xp.asarray(positions)
    return xp.moveaxis(parts, axis, 1)[rows, chosen]


def compiled(rule: Rule, in_place: bool = False) -> Callable[[GraphCompiler, Op], Step]:
    """How a collective's rule becomes a step."""

    def compile(compiler: GraphCompiler, op: Op) -> Step:
        machine, attributes, name = compiler.machine, op.attributes, op.debugName()
        given: Groups = attributes["group"]._groups
        groups = None if given.group_count == 1 else given
        if given.size != machine.total and not (groups is None and rule is all_reduce):
            raise RuntimeError(
                f"{name} was made for {given.size} replicas, but there are {machine.total} now"
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


def same_spec(inputs: list[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    return inputs


def given_spec(inputs: list[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    return [attributes["spec"]]


# Gradients, of what all replicas' losses add up to


def all_reduce_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    name, gradient = site.attributes["op"], site.gradient()
    if name not in ("add", "mean", "local"):
        raise NotImplementedError(f"{site.op.debugName()}: no gradient for op={name!r}")
    if gradient is None or name == "local":
        return [gradient]
    return add_op(ALL_REDUCE, [gradient], site.attributes)


def all_gather_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    """The sum of what the replicas make of this one's part."""
    from ..ops import reshape, transpose

    gradient, given = site.gradient(), site.attributes
    if gradient is None:
        return [None]
    spec, axis = site.op.inputs[0].spec, given["axis"]
    size = given["group"].group_size
    if given["output_shape"] == "concat" and axis:
        cut = (*spec.shape[:axis], size, *spec.shape[axis:])
        order = (axis, *(k for k in range(len(cut)) if k != axis))
        gradient = transpose(reshape(gradient, cut), order)
    parts = {
        "op": "add",
        "group": given["group"],
        "group_size": size,
        "spec": TensorSpec((math.prod(spec.shape),), spec.dtype),
    }
    return [reshape(add_op(REDUCE_SCATTER, [gradient], parts)[0], spec.shape)]


def reduce_scatter_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    """The slices' gradients together; those of "local" too, as its replicas hold one value."""
    gradient, given = site.gradient(), site.attributes
    if gradient is None:
        return [None]
    name = given["op"]
    if name not in ("add", "mean", "local"):
        raise NotImplementedError(f"{site.op.debugName()}: no gradient for op={name!r}")
    whole = site.op.inputs[0]
    how = {
        "group": given["group"],
        "axis": 0,
        "output_shape": "meta_shape",
        "spec": TensorSpec(whole.shape, whole.dtype),
    }
    (gathered,) = add_op(ALL_GATHER, [gradient], how)
    return [gathered / float(given["group_size"]) if name == "mean" else gathered]


def slice_gradient(site: GradientSite) -> Sequence[Tensor | None]:
    """The slices' gradients together, as the replicas hold one value."""
    gradient, given = site.gradient(), site.attributes
    if gradient is None:
        return [None]
    whole = site.op.inputs[0]
    how = {
        "group": given["group"],
        "axis": given["axis"],
        "output_shape": "concat",
        "spec": TensorSpec(whole.shape, whole.dtype),
    }
    return add_op(ALL_GATHER, [gradient], how)


ALL_REDUCE = Definition(
    "ReplicatedAllReduce",
    same_spec,
    only_compiled,
    all_reduce_gradient,
    collective=True,
    names=("t",),
    compile=compiled(all_reduce),
)
ALL_REDUCE_INPLACE = Definition(
    "ReplicatedAllReduceInplace",
    same_spec,
    only_compiled,
    all_reduce_gradient,
    aliases={0: 0},
    modifies=(0,),
    collective=True,
    names=("t",),
    compile=compiled(all_reduce, in_place=True),
)
ALL_GATHER = Definition(
    "ReplicatedAllGather",
    given_spec,
    only_compiled,
    all_gather_gradient,
    collective=True,
    names=("t",),
    compile=compiled(all_gather),
)
REDUCE_SCATTER = Definition(
    "ReplicatedReduceScatter",
    given_spec,
    only_compiled,
    reduce_scatter_gradient,
    collective=True,
    names=("t",),
    compile=compiled(reduce_scatter),
)
SLICE = Definition(
    "ReplicatedSlice",
    given_spec,
    only_compiled,
    slice_gradient,
    collective=True,
    names=("t",),
    compile=compiled(sliced),
)
