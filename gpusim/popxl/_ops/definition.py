"""An op's definition: all of its rules in one place, and the one way of adding it to a graph.
The functions in `gpusim.popxl.ops` check their arguments, name a definition, and call `add_op`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..context import get_current_context, get_current_graph
from ..exceptions import dtype_exception, popart_exception, shape_exception
from ..tensor import Tensor, TensorSpec
from .op import Op, op_class

if TYPE_CHECKING:
    from ..graph import Graph

__all__ = ["Array", "Definition", "GradientSite", "add_op", "check_inputs"]

#: A stacked array (replicas, *shape) of NumPy or CuPy.
Array = Any
Attributes = Mapping[str, Any]


class GradientSite(Protocol):
    """Where a gradient is built: what the gradient of one op can ask for, in the gradient's graph.

    What is asked for becomes an input of that graph; what is not costs nothing.
    """

    @property
    def op(self) -> Op:
        """The forward op, with its tensors in the forward graph."""

    @property
    def attributes(self) -> Attributes:
        """Those of the forward op."""

    def input(self, index: int) -> Tensor:
        """A forward input, as a tensor of the gradient's graph."""

    def output(self, index: int = 0) -> Tensor:
        """A forward output, as a tensor of the gradient's graph."""

    def gradient(self, index: int = 0) -> Any:
        """The gradient of a forward output, a Tensor; None where it is zero."""

    def needs(self, index: int) -> bool:
        """Whether anybody asks for the gradient of this input."""


@dataclass(frozen=True, eq=False)
class Definition:
    """Everything about a kind of op.

    `run` computes all replicas at once: arrays (replicas, *shape) in, a list of such arrays out.
    Inputs are read-only to it but for those of `modifies`, which it writes into
    (``x[...] = ``, ``out=x``). It may return views, also where `aliases` does not say so: what
    must not share memory is copied by the session. Inputs may be broadcast (stride 0) along axis 0.
    """

    #: PopART's name, such as "Add" or "AddLhsInplace".
    op_type: str
    #: The outputs' specs from the inputs' (and the checks that need them).
    infer: Callable[[list[TensorSpec], Attributes], Sequence[TensorSpec]]
    #: run(xp, inputs, attributes): xp is numpy or cupy.
    run: Callable[[Any, list[Array], Attributes], Sequence[Array]]
    #: The gradient of each input: a tensor, or None where it is zero or undefined.
    gradient: Callable[[GradientSite], Sequence[Tensor | None]] | None = None
    #: Outputs that are their input, or a view of it: {output: input}. `run` must return that array
    #: (or a true view of it), or have a `write_back`.
    aliases: Mapping[int, int] = field(default_factory=dict)
    #: Inputs that are changed in place.
    modifies: tuple[int, ...] = ()
    #: For views that are not always views in memory (a reshape of a transposed array, concat_):
    #: write_back(xp, output, inputs, attributes) writes a changed output into the inputs.
    write_back: Callable[[Any, Array, list[Array], Attributes], None] | None = None
    #: `run` mixes replicas, so that it cannot be called for some of them alone.
    collective: bool = False
    #: It does something besides computing outputs (host_store, print), so it is never left out.
    effect: bool = False
    #: For error messages: the inputs' names in the public function.
    names: tuple[str, ...] = ()
    #: How the session compiles it, where it is more than a call of `run` (call, host_load, ...):
    #: see `execution.compiler`.
    compile: Callable[[Any, Op], Callable[..., None]] | None = None


def add_op(
    definition: Definition,
    inputs: Sequence[Tensor],
    attributes: Attributes | None = None,
    name: str | None = None,
    *,
    output_names: Sequence[str] | None = None,
    ipu: int | None = None,
    tile_set: str | None = None,
) -> tuple[Tensor, ...]:
    """Add an op to the current graph; its outputs.

    `name` is that of the op (and of its outputs, unless `output_names` are given).

    Raises:
        RuntimeError: outside of a graph.
        TypeError: for an input that is no Tensor.
        ValueError: for an input of another graph, or inputs on different IPUs or tile sets.
        popart_exception: also a ValueError or TypeError, where `definition.infer` raises these.
    """
    context = get_current_context()
    graph = get_current_graph()
    inputs = list(inputs)
    check_inputs(graph, definition, inputs)
    if len(inputs) > 1 and definition.names and definition.compile is None:
        check_places(definition, inputs)
    given = dict(attributes or {})
    specs = infer(definition, [tensor.spec for tensor in inputs], given)
    if definition.compile is None:
        specs = [of_shards(spec, inputs) for spec in specs]
    op = op_class(definition.op_type)(
        graph,
        definition,
        inputs,
        given,
        name or "",
        ipu=context.ipu_id if ipu is None else ipu,
        tile_set=tile_set or ("io" if context.io_tile_set else "compute"),
        location=context.location(),
    )
    stem = name or default_name(definition.op_type)
    for number, spec in enumerate(specs):
        said = output_names[number] if output_names is not None else f"{stem}_out"
        op.outputs.append(Tensor._made(graph, graph._new_id(said), spec, op, number))
    graph._append(op)
    context._created(op)
    return tuple(op.outputs)


def infer(
    definition: Definition, inputs: list[TensorSpec], attributes: Attributes
) -> list[TensorSpec]:
    """The outputs' specs; what cannot be is PopART's exception as well as Python's."""
    try:
        return list(definition.infer(inputs, attributes))
    except popart_exception:
        raise
    except ValueError as error:
        raise shape_exception(str(error)) from error
    except TypeError as error:
        raise dtype_exception(str(error)) from error


def check_inputs(graph: Graph, definition: Definition, inputs: Sequence[Tensor]) -> None:
    """Refuse inputs that are no tensors, or tensors of another graph."""
    for number, tensor in enumerate(inputs):
        if isinstance(tensor, Tensor) and tensor._graph is graph:
            continue
        name = name_of(definition, number)
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"The input `{name}` is not a Tensor. Type: {type(tensor)}. Value: {tensor}."
            )
        raise ValueError(f"The input tensor `{name}` is not in the current Graph {graph.name}.")


def check_places(definition: Definition, inputs: Sequence[Tensor]) -> None:
    """Refuse inputs that ops on different IPUs, or on different tile sets, have made."""
    made = [(n, t._producer) for n, t in enumerate(inputs) if t._producer is not None]
    for attribute, what in (("ipu", "IPUs"), ("tile_set", "tile sets")):
        found = [(n, getattr(op, attribute)) for n, op in made]
        placed = [(n, place) for n, place in found if place is not None]
        for number, place in placed[1:]:
            first, expected = placed[0]
            if place != expected:
                raise ValueError(
                    f"The input tensors `{name_of(definition, first)}` and "
                    f"`{name_of(definition, number)}` are located on different {what}: "
                    f"{expected} != {place}."
                )


def name_of(definition: Definition, number: int) -> str:
    """What messages call an input."""
    names = definition.names
    return names[number] if number < len(names) else f"input_{number}"


def of_shards(spec: TensorSpec, inputs: Sequence[Tensor]) -> TensorSpec:
    """An output's spec: what has the shape of a shard among the inputs is one of the same whole."""
    if len(spec.shape) == 1 and not spec.meta_shape:
        for tensor in inputs:
            if tensor.meta_shape and tensor.shape == spec.shape:
                return TensorSpec(spec.shape, spec.dtype, tensor.meta_shape)
    return spec


def default_name(op_type: str) -> str:
    """A name for an op that was given none.

    >>> default_name("AddLhsInplace"), default_name("HostLoad")
    ('addlhsinplace', 'hostload')
    """
    return op_type.lower()
