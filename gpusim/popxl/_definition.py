"""Definition: all rules of a kind of op; and `add_op`, which adds an op to a graph.

The functions in `gpusim.popxl.ops` check their arguments, choose a definition, and call `add_op`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._op import Op, op_class
from .context import get_current_context, get_current_graph
from .exceptions import dtype_exception, popart_exception, shape_exception
from .tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from ._gradients import GradientGraph
    from .graph import Graph

__all__ = [
    "Array",
    "Arrays",
    "Attributes",
    "Definition",
    "GradientRule",
    "GradientSite",
    "Specs",
    "add_op",
    "check_inputs",
    "fixed_spec",
    "gradient_ops",
    "no_gradient",
    "only_compiled",
    "same_spec",
    "shape_spec",
]

#: A stacked array (replicas, *shape) of NumPy or CuPy.
Array = Any
Arrays = list[Array]
Attributes = Mapping[str, Any]
Specs = list[TensorSpec]
#: The gradient of each input: a tensor, or None where it is zero or undefined.
GradientRule = Callable[["GradientSite"], Sequence[Tensor | None]]


class GradientSite:
    """The view of one forward op that its gradient rule gets, in the graph of gradients.

    A tensor that the rule asks for becomes an input of that graph; other tensors cost nothing.
    """

    def __init__(self, making: GradientGraph, op: Op) -> None:
        self.making = making  #: the graph of gradients
        self.op = op  #: the forward op, with its tensors in the forward graph

    @property
    def attributes(self) -> Attributes:
        """The attributes of the forward op."""
        return self.op.attributes

    def input(self, index: int) -> Tensor:
        """A forward input, as a tensor of the gradient's graph."""
        return self.making.forward(self.op.inputs[index])

    def output(self, index: int = 0) -> Tensor:
        """A forward output, as a tensor of the gradient's graph."""
        return self.making.forward(self.op.outputs[index])

    def gradient(self, index: int = 0) -> Any:
        """The gradient of a forward output, a Tensor; None if it is zero."""
        return self.making.gradient(self.op.outputs[index])

    def needs(self, index: int) -> bool:
        """Whether the gradient of this input is needed."""
        return self.making.needs(self.op.inputs[index])


@dataclass(frozen=True, eq=False)
class Definition:
    """Everything about a kind of op.

    `run` computes all replicas at once: arrays (replicas, *shape) in, a list of such arrays out.
    It writes only into the inputs in `modifies` (``x[...] = ``, ``out=x``). It may return views of
    any input: the session copies outputs that must not share memory. Inputs may be broadcast
    (stride 0) along axis 0.
    """

    #: PopART's name, such as "Add" or "AddLhsInplace".
    op_type: str
    #: The outputs' specs from the inputs' specs, with the checks of these.
    infer: Callable[[list[TensorSpec], Attributes], Sequence[TensorSpec]]
    #: run(xp, inputs, attributes): xp is numpy or cupy.
    run: Callable[[Any, list[Array], Attributes], Sequence[Array]]
    #: Adds the ops of the inputs' gradients.
    gradient: GradientRule | None = None
    #: Outputs that are an input or a view of it: {output: input}. `run` must return that array or a
    #: true view of it, unless there is a `write_back`.
    aliases: Mapping[int, int] = field(default_factory=dict)
    #: Inputs that the op changes in place.
    modifies: tuple[int, ...] = ()
    #: For outputs that may be copies although they count as views (a reshape of a transposed array,
    #: concat_): write_back(xp, output, inputs, attributes) writes a changed output to the inputs.
    write_back: Callable[[Any, Array, list[Array], Attributes], None] | None = None
    #: Whether `run` combines replicas, so that it needs all of them.
    collective: bool = False
    #: Whether it does more than compute outputs (host_store, print), so that it always runs.
    effect: bool = False
    #: The inputs' names in the public function, for error messages; several are checked for their
    #: IPUs and tile sets.
    names: tuple[str, ...] = ("t",)
    #: How the session compiles it, if not as a call of `run` (call, host_load, ...); see
    #: `execution.compiler`.
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
    """Add an op to the current graph, and return its outputs.

    `name` names the op, and its outputs unless `output_names` is given. An op outside of
    `popxl.ipu` is on IPU 0.

    **Raises**:

    - RuntimeError: outside of a graph.
    - TypeError: if an input is not a Tensor.
    - ValueError: if an input is in another graph, or inputs are on different IPUs or tile sets.
    - popart_exception: if `definition.infer` raises ValueError or TypeError; it is one of these as
      well.
    """
    context = get_current_context()
    graph = get_current_graph()
    inputs = list(inputs)
    check_inputs(graph, definition, inputs)
    if len(inputs) > 1 and len(definition.names) > 1 and definition.compile is None:
        check_placement(definition, inputs)
    values = dict(attributes or {})
    specs = output_specs(definition, inputs, values)
    op = op_class(definition.op_type)(
        graph,
        definition,
        inputs,
        values,
        name or "",
        ipu=(context.ipu_id or 0) if ipu is None else ipu,
        tile_set=tile_set or ("io" if context.io_tile_set else "compute"),
        location=context.location(),
    )
    op.execution_context = context._execution
    stem = name or default_name(definition.op_type)
    for number, spec in enumerate(specs):
        label = output_names[number] if output_names is not None else f"{stem}_out"
        op.outputs.append(Tensor._create(graph, graph._new_id(label), spec, op, number))
    graph._append(op)
    context._register(op)
    return tuple(op.outputs)


def output_specs(
    definition: Definition, inputs: Sequence[Tensor], attributes: Attributes
) -> list[TensorSpec]:
    """The outputs' specs; outputs of the shape of a shard are shards as well."""
    specs = infer(definition, [tensor.spec for tensor in inputs], attributes)
    if definition.compile is not None:
        return specs
    return [with_meta_shape(spec, inputs) for spec in specs]


def infer(
    definition: Definition, inputs: list[TensorSpec], attributes: Attributes
) -> list[TensorSpec]:
    """The outputs' specs. Errors are PopART's exceptions as well as Python's."""
    try:
        return list(definition.infer(inputs, attributes))
    except popart_exception:
        raise
    except ValueError as error:
        raise shape_exception(str(error)) from error
    except TypeError as error:
        raise dtype_exception(str(error)) from error


def check_inputs(graph: Graph, definition: Definition, inputs: Sequence[Tensor]) -> None:
    """Raise TypeError or ValueError if an input is not a tensor of the graph."""
    for number, tensor in enumerate(inputs):
        if isinstance(tensor, Tensor) and tensor._graph is graph:
            continue
        name = name_of(definition, number)
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"The input `{name}` is not a Tensor. Type: {type(tensor)}. Value: {tensor}."
            )
        raise ValueError(f"The input tensor `{name}` is not in the current Graph {graph.name}.")


def check_placement(definition: Definition, inputs: Sequence[Tensor]) -> None:
    """Raise ValueError if ops on different IPUs or tile sets made the inputs."""
    producers = [
        (name_of(definition, number), tensor._producer)
        for number, tensor in enumerate(inputs)
        if tensor._producer is not None
    ]
    check_same("IPUs", [(name, op.ipu) for name, op in producers])
    check_same("tile sets", [(name, op.tile_set) for name, op in producers])


def check_same(what: str, places: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError if the named tensors have different places; None is an unknown place."""
    known = [(name, place) for name, place in places if place is not None]
    for name, place in known[1:]:
        first, expected = known[0]
        if place != expected:
            raise ValueError(
                f"The input tensors `{first}` and `{name}` are located on different {what}: "
                f"{expected} != {place}."
            )


def name_of(definition: Definition, number: int) -> str:
    """The name of an input in messages."""
    names = definition.names
    return names[number] if number < len(names) else f"input_{number}"


def with_meta_shape(spec: TensorSpec, inputs: Sequence[Tensor]) -> TensorSpec:
    """The spec, with the meta_shape of an input of its shape: the output is a shard as well."""
    if len(spec.shape) == 1 and not spec.meta_shape:
        for tensor in inputs:
            if tensor.meta_shape and tensor.shape == spec.shape:
                return TensorSpec(spec.shape, spec.dtype, tensor.meta_shape)
    return spec


def default_name(op_type: str) -> str:
    """The name of an op that has no other.

    >>> default_name("AddLhsInplace"), default_name("HostLoad")
    ('addlhsinplace', 'hostload')
    """
    return op_type.lower()


# Rules that several definitions have


def same_spec(inputs: Specs, attributes: Attributes) -> Specs:
    """Infer the shape and dtype of the first input."""
    return [TensorSpec(inputs[0].shape, inputs[0].dtype)]


def shape_spec(inputs: Specs, attributes: Attributes) -> Specs:
    """Infer the attribute `shape`, and the attribute `dtype` or else the first input's dtype."""
    return [TensorSpec(attributes["shape"], attributes.get("dtype") or inputs[0].dtype)]


def fixed_spec(inputs: Specs, attributes: Attributes) -> Specs:
    """Infer the attribute `spec`."""
    return [attributes["spec"]]


def gradient_ops(*rules: tuple[Definition, str] | None) -> GradientRule:
    """A gradient rule that adds one op for each input whose gradient is needed.

    **Arguments**: `rules`: a rule for each input; the last one is for all further inputs. None
    means no gradient. Else a rule has the op's definition, and the forward tensors that the op
    takes after the output's gradient: "x" is the input itself, a digit any input, "y" output 0,
    "z" output 1.

    The op has the attributes of the forward op, and the `shape` and `dtype` of the input.
    """

    def gradient(site: GradientSite) -> list[Tensor | None]:
        dy = site.gradient(0)
        gradients: list[Tensor | None] = []
        for index, tensor in enumerate(site.op.inputs):
            rule = rules[min(index, len(rules) - 1)]
            if rule is None or dy is None or not site.needs(index):
                gradients.append(None)
                continue
            tensors = [forward_tensor(site, index, letter) for letter in rule[1]]
            attributes = {**site.attributes, "shape": tensor.shape, "dtype": tensor.dtype}
            gradients += add_op(rule[0], [dy, *tensors], attributes)
        return gradients

    return gradient


def forward_tensor(site: GradientSite, index: int, letter: str) -> Tensor:
    """A tensor that a rule of `gradient_ops` names."""
    if letter in "yz":
        return site.output("yz".index(letter))
    return site.input(index if letter == "x" else int(letter))


#: The rule of ops whose derivative is zero wherever it exists.
no_gradient = gradient_ops(None)


def only_compiled(*arguments: Any) -> Any:
    """The `run` of ops that have a `compile` instead."""
    raise AssertionError("this op runs only as its `compile` says")
