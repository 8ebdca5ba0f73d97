"""Gradient graphs: ops are visited from the last to the first, and each rule adds gradient ops.

Called graphs are differentiated too. Repeats and conditionals run again before they run backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ._definition import GradientSite, add_op
from ._op import Op
from .context import get_current_context, in_sequence, ipu
from .exceptions import popart_exception
from .execution.aliasing import changed_by
from .execution.compiler import has_effect
from .graph import Graph
from .ops.arithmetic import SUM
from .ops.branching import CONDITIONAL
from .ops.calling import CALL, LOOP_GRAD, REPEAT
from .ops.transfers import init
from .tensor import Constant, Tensor, constant, graph_input, graph_output

__all__ = ["Differentiation", "GradientPlan"]

PREFIX = "Gradient___"


@dataclass
class GradientPlan:
    """A gradient graph, and the forward tensors of its inputs and outputs."""

    graph: Graph
    inputs: list[tuple[bool, Tensor]]  #: whether it is a gradient, and of which forward tensor
    outputs: list[Tensor]  #: the forward tensors whose gradients they are


class Differentiation:
    """One call of autodiff: its gradient graphs, and those it was given."""

    def __init__(self, existing: Mapping[Graph, GradientPlan]) -> None:
        self.existing = dict(existing)
        self.plans: dict[Graph, GradientPlan] = {}

    def differentiate(
        self,
        graph: Graph,
        provided: Iterable[Tensor] | None = None,
        required: Iterable[Tensor] | None = None,
    ) -> GradientPlan:
        """Make the gradient graph of a graph."""
        outputs = [t for t in graph.outputs if t.dtype.is_floating_point]
        inputs = [t for t in graph.inputs if t.dtype.is_floating_point]
        sources = outputs if provided is None else list(provided)
        targets = inputs if required is None else list(required)
        check_members(graph, sources, graph.outputs, "grads_provided", "an output")
        check_members(graph, targets, graph.inputs, "grads_required", "an input")
        plan = GradientGraph(self, graph, sources, targets).plan
        self.plans[graph] = plan
        return plan

    def of_called(
        self, graph: Graph, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> GradientPlan:
        """A gradient graph of a called graph, from some outputs' gradients to some inputs'.

        It may take and make more. A given one that takes or makes less is refused.
        """
        existing = self.existing.get(graph)
        if existing is None and not graph._differentiable:
            raise popart_exception(
                f"The graph {graph.name} is not to be differentiated for its caller: give its "
                "gradient graph in called_graphs_grad_info"
            )
        plan = existing or self.plans.get(graph)
        if plan is None:
            return self.differentiate(graph, outputs, inputs)
        sources = [tensor for is_gradient, tensor in plan.inputs if is_gradient]
        if all(map(among(sources), outputs)) and all(map(among(plan.outputs), inputs)):
            return plan
        if existing is not None:
            raise popart_exception(
                f"called_graphs_grad_info of the graph {graph.name} provides the gradients of "
                f"{names_of(plan.outputs)} from those of {names_of(sources)}, but those of "
                f"{names_of(inputs)} are needed from those of {names_of(outputs)}"
            )
        return self.differentiate(
            graph,
            [*sources, *(each for each in outputs if not among(sources)(each))],
            [*plan.outputs, *(each for each in inputs if not among(plan.outputs)(each))],
        )


def among(tensors: Sequence[Tensor]) -> Callable[[Tensor], bool]:
    """A test whether a tensor is one of these."""
    ids = {tensor._id for tensor in tensors}
    return lambda tensor: tensor._id in ids


def names_of(tensors: Sequence[Tensor]) -> list[str]:
    return [tensor.name for tensor in tensors]


def check_members(
    graph: Graph, tensors: Sequence[Tensor], among: Sequence[Tensor], name: str, what: str
) -> None:
    """Raise an error for tensors that are not a graph's inputs or outputs, or not floats."""
    for tensor in tensors:
        if not any(tensor is each for each in among):
            raise ValueError(f"{name}: {tensor} is not {what} of the graph {graph.name}")
        if not tensor.dtype.is_floating_point:
            raise popart_exception(
                f"{name}: {tensor} has no gradient, as it is {tensor.dtype.name}"
            )


class GradientGraph:
    """The construction of one gradient graph."""

    def __init__(
        self,
        differentiation: Differentiation,
        forward: Graph,
        provided: Sequence[Tensor],
        required: Sequence[Tensor],
    ) -> None:
        refuse_changes(forward)
        self.differentiation, self.forward_graph = differentiation, forward
        stem = forward.id.partition("_subgraph")[0] or forward.name
        graph = forward.ir.create_empty_graph(f"{stem}_bwd")
        self.plan = GradientPlan(graph, [], [])
        self._forward: dict[str, Tensor] = {}
        self._found: dict[str, list[Tensor]] = {}
        self._relevant = dependents(forward, required)
        with empty_context(), graph:
            for tensor in provided:
                dy = graph_input(tensor.shape, tensor.dtype, PREFIX + tensor.name)
                self.plan.inputs.append((True, tensor))
                self._found.setdefault(tensor._id, []).append(dy)
            for op in reversed(list(forward._ops)):
                self._visit(op)
            for tensor in required:
                graph_output(self._result(tensor))
                self.plan.outputs.append(tensor)

    # For the rules

    def forward(self, tensor: Tensor) -> Tensor:
        """A forward tensor in the gradient graph: an input of it, or a copy of a constant."""
        copy = self._forward.get(tensor._id)
        if copy is None:
            if isinstance(tensor, Constant):
                copy = constant(tensor._data, tensor.dtype, tensor.name, downcast=False)
            else:
                copy = graph_input(
                    tensor.shape, tensor.dtype, tensor.name, meta_shape=tensor.meta_shape
                )
                self.plan.inputs.append((False, tensor))
                self._keep(tensor)
            self._forward[tensor._id] = copy
        return copy

    def gradient(self, tensor: Tensor) -> Tensor | None:
        """The gradient of a forward tensor; None if there is none yet."""
        parts = self._found.get(tensor._id)
        if not parts:
            return None
        if len(parts) > 1:
            self._found[tensor._id] = list(add_op(SUM, parts, output_names=[PREFIX + tensor.name]))
        return self._found[tensor._id][0]

    def needs(self, tensor: Tensor) -> bool:
        """Whether a required gradient depends on that of this tensor."""
        return tensor._id in self._relevant

    def add(self, tensor: Tensor, gradient: Tensor) -> None:
        """Add a part of a forward tensor's gradient."""
        self._found.setdefault(tensor._id, []).append(gradient)

    def gradient_or_zeros(self, tensor: Tensor) -> Tensor:
        """The gradient of a forward tensor; zeros if there is none."""
        gradient = self.gradient(tensor)
        return self.zeros(tensor) if gradient is None else gradient

    def zeros(self, tensor: Tensor) -> Tensor:
        """A gradient of zeros."""
        return init(tensor.shape, tensor.dtype, PREFIX + tensor.name)

    # The visit

    def _visit(self, op: Op) -> None:
        needed = any(self.needs(tensor) for tensor in op.inputs)
        if not needed or all(self.gradient(tensor) is None for tensor in op.outputs):
            return
        special = {CALL: call_gradient, REPEAT: repeat_gradient, CONDITIONAL: if_gradient}
        site = GradientSite(self, op)
        with ipu(op.ipu):
            rule = special.get(op.definition, op.definition.gradient)
            if rule is None:
                raise popart_exception(
                    f"{op.debugName()} in the graph {op.graph.name} has no gradient; detach its "
                    "inputs or its outputs where none is wanted"
                )
            gradients = rule(site)
        for tensor, gradient in zip(op.inputs, gradients, strict=True):
            if gradient is not None and self.needs(tensor):
                self.add(tensor, gradient)

    def _keep(self, tensor: Tensor) -> None:
        """Make a tensor an output of the forward graph, unless it is an input or output."""
        graph = self.forward_graph
        if not any(tensor is each for each in (*graph._inputs, *graph._outputs)):
            graph._outputs.append(tensor)
            graph.ir._mark_changed()

    def _result(self, tensor: Tensor) -> Tensor:
        """A required gradient with its name."""
        gradient = self.gradient(tensor)
        if gradient is None:
            return self.zeros(tensor)
        graph = self.plan.graph
        used = any(gradient is each for each in (*graph._inputs, *graph._outputs))
        if used:
            (gradient,) = add_op(SUM, [gradient], output_names=[PREFIX + tensor.name])
        elif gradient.name != PREFIX + tensor.name:
            rename(gradient, PREFIX + tensor.name)
        return gradient


@contextmanager
def empty_context() -> Iterator[None]:
    """A context without the IPUs, tiles, names and order of the code around autodiff."""
    context = get_current_context()
    around = context._graphs, context._ipus, context._io_tiles, context._scopes
    context._graphs, context._ipus, context._io_tiles, context._scopes = [], [], 0, []
    try:
        with in_sequence(False):
            yield
    finally:
        context._graphs, context._ipus, context._io_tiles, context._scopes = around


def refuse_changes(graph: Graph) -> None:
    """Raise popart_exception if an op of a graph changes a tensor in place."""
    for op in graph._ops:
        if changed_by(op):
            raise popart_exception(
                f"The graph {graph.name} contains a modifying op {op.debugName()}: what it changes "
                "cannot be differentiated. Use the op that makes a new tensor."
            )


def dependents(graph: Graph, tensors: Sequence[Tensor]) -> set[str]:
    """The floating-point tensors of a graph that depend on some of its inputs, and these."""
    ids = {tensor._id for tensor in tensors}
    for op in graph._ops:
        if any(tensor._id in ids for tensor in op.inputs):
            ids |= {t._id for t in op.outputs if t.dtype.is_floating_point}
    return ids


def rename(tensor: Tensor, name: str) -> None:
    """Give a tensor of a new graph another name."""
    graph = tensor._graph
    del graph._tensors[tensor._id]
    tensor._id = graph._new_id(name)
    graph._add_tensor(tensor)


# Ops that run other graphs


def call_gradient(site: GradientSite) -> list[Tensor | None]:
    """A call of the called graph's gradient graph."""
    op = site.op
    graph: Graph = op.attributes["graph"]
    called: list[Tensor] = op.attributes["called_inputs"]
    pairs = zip(graph.outputs, op.outputs, strict=False)
    provided = [inner for inner, outer in pairs if site.making.gradient(outer) is not None]
    required = [inner for index, inner in enumerate(called) if site.needs(index)]
    plan = site.making.differentiation.of_called(graph, provided, required)
    complete(op, graph)
    forward = places(called, op.inputs) | places(graph.outputs, op.outputs)
    inputs = [
        site.making.gradient_or_zeros(forward[tensor._id])
        if is_gradient
        else site.making.forward(forward[tensor._id])
        for is_gradient, tensor in plan.inputs
    ]
    attributes = {"graph": plan.graph, "called_inputs": list(plan.graph.inputs)}
    names = [PREFIX + tensor.name for tensor in plan.outputs]
    gradients = add_op(CALL, inputs, attributes, output_names=names)
    return in_order(called, plan.outputs, gradients)


def complete(op: Op, graph: Graph) -> None:
    """Add the outputs to a call that its graph has got later."""
    for number in range(len(op.outputs), len(graph.outputs)):
        tensor = graph.outputs[number]
        id = op.graph._new_id(tensor.name)
        op.outputs.append(Tensor._create(op.graph, id, tensor.spec, op, number))


def places(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> dict[str, Tensor]:
    """From tensors of a called graph, by id, to the caller's."""
    return {tensor._id: other for tensor, other in zip(tensors, others, strict=True)}


def in_order(
    called: Sequence[Tensor], tensors: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of a call's inputs, from the outputs of a gradient graph."""
    by_id = places(tensors, gradients)
    return [by_id.get(tensor._id) for tensor in called]


def repeat_gradient(site: GradientSite) -> list[Tensor | None]:
    """An op that runs the repeat again, keeps every step, and runs backwards."""
    op = site.op
    graph: Graph = op.attributes["graph"]
    if has_effect(graph):
        raise popart_exception(
            f"{op.debugName()} repeats the graph {graph.name}, which uses streams, remote buffers "
            "or prints; its gradient would run that again"
        )
    carried = len(op.outputs)
    called: list[Tensor] = op.attributes["called_inputs"]
    states = [tensor for tensor in graph.inputs[:carried] if tensor.dtype.is_floating_point]
    others = [
        inner
        for index, inner in enumerate(called)
        if site.needs(index) and not among(states)(inner)
    ]
    provided = [tensor for tensor in graph.outputs[:carried] if tensor.dtype.is_floating_point]
    plan = site.making.differentiation.of_called(graph, provided, [*states, *others])
    inputs = [site.making.forward(tensor) for tensor in op.inputs]
    inputs += [site.making.gradient_or_zeros(tensor) for tensor in op.outputs]
    attributes = {
        "graph": graph,
        "count": op.attributes["count"],
        "called_inputs": called,
        "carried": carried,
        "gradient_graph": plan.graph,
        "inputs": list(plan.inputs),
        "outputs": list(plan.outputs),
    }
    gradients = add_op(LOOP_GRAD, inputs, attributes)
    return in_order(called, plan.outputs, gradients)


def if_gradient(site: GradientSite) -> list[Tensor | None]:
    """A conditional of graphs that run the branch again and then its gradient graph."""
    op = site.op
    branches: list[tuple[Graph, list[Tensor], list[Tensor]]] = []
    first = 1
    for name in ("then", "else"):
        called: list[Tensor] = op.attributes[f"{name}_inputs"]
        tensors = op.inputs[first : first + len(called)]
        branches.append((op.attributes[f"{name}_branch"], called, tensors))
        first += len(called)
    indices = [index for index, t in enumerate(op.outputs) if t.dtype.is_floating_point]
    targets = [tensor for tensor in op.inputs[1:] if tensor.dtype.is_floating_point]
    graphs = [
        branch_gradient(site, graph, called, tensors, indices, number, op.inputs[1:])
        for number, (graph, called, tensors) in enumerate(branches)
    ]
    gradients = [site.making.gradient_or_zeros(op.outputs[index]) for index in indices]
    inputs = [site.making.forward(op.inputs[0])]
    for _, _, tensors in branches:
        inputs += [*(site.making.forward(tensor) for tensor in tensors), *gradients]
    attributes = {
        "then_branch": graphs[0],
        "else_branch": graphs[1],
        "then_inputs": list(graphs[0].inputs),
        "else_inputs": list(graphs[1].inputs),
    }
    results = iter(add_op(CONDITIONAL, inputs, attributes))
    out: list[Tensor | None] = [None]
    out += [next(results) if t.dtype.is_floating_point else None for t in op.inputs[1:]]
    assert len(targets) == sum(tensor is not None for tensor in out)
    return out


def branch_gradient(
    site: GradientSite,
    graph: Graph,
    called: Sequence[Tensor],
    tensors: Sequence[Tensor],
    indices: Sequence[int],
    number: int,
    all_inputs: Sequence[Tensor],
) -> Graph:
    """A graph from a branch's inputs and its outputs' gradients to the gradients of all inputs.

    The gradients of the other branch's inputs are zeros.
    """
    if has_effect(graph):
        raise popart_exception(
            f"{site.op.debugName()} has a branch, the graph {graph.name}, that uses streams, "
            "remote buffers or prints; its gradient would run that again"
        )
    outputs = [graph.outputs[index] for index in indices]
    floats = [tensor for tensor in called if tensor.dtype.is_floating_point]
    plan = site.making.differentiation.of_called(graph, outputs, floats)
    wrapper = graph.ir.create_empty_graph(f"{plan.graph.id.partition('_subgraph')[0]}_branch")
    with empty_context(), wrapper:
        values = [graph_input(t.shape, t.dtype, t.name) for t in tensors]
        gradients = {t._id: graph_input(t.shape, t.dtype, PREFIX + t.name) for t in outputs}
        again = add_op(CALL, values, {"graph": graph, "called_inputs": list(called)})
        forward = places(called, values) | places(graph.outputs, again)
        inputs = [
            gradients[t._id] if is_gradient else forward[t._id] for is_gradient, t in plan.inputs
        ]
        attributes = {"graph": plan.graph, "called_inputs": list(plan.graph.inputs)}
        results = in_order(called, plan.outputs, add_op(CALL, inputs, attributes))
        start = 0 if number == 0 else len(all_inputs) - len(called)
        local = dict(zip(range(start, start + len(called)), results, strict=True))
        for index, tensor in enumerate(all_inputs):
            if tensor.dtype.is_floating_point:
                gradient = local.get(index)
                graph_output(site.making.zeros(tensor) if gradient is None else gradient)
    return wrapper
