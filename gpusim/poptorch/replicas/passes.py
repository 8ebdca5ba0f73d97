"""Passes over the graph of one replica, so that it can run for all replicas under vmap."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...torch.private import OpOverload, schema_of
from .random_operators import is_random

__all__ = ["add_taps", "batch_mutated", "call_directly", "running_statistics", "simplify"]

aten = torch.ops.aten

RUNNING = {
    aten.batch_norm.default: ((3, 4), 5),
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.instance_norm.default: ((3, 4), 5),
}
"""Operators that update running statistics, which their schemas do not say: the positions of the
statistics, and that of the operand that turns the update on."""

IN_C = (type(torch.relu), type(Tensor.relu))
"""The types of functions and methods that are written in C."""

RESHAPES = (aten.view.default, aten._unsafe_view.default)
"""Views in another shape. The method takes two thirds of the operators' time: it reads no list."""

VIEWS = {
    *(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.detach.default),
    *(aten.t.default, aten.transpose.int, aten.permute.default),
}


def running_statistics(graph: Graph) -> set[Node]:
    """The running statistics that operators of the graph update in place."""
    updated = set()
    for node in graph.nodes:
        operands, switch = RUNNING.get(node.target, ((), 0))
        updated |= {node.args[place] for place in operands if node.args[switch]}
    return updated


def batch_mutated(graph: Graph, stacked: Iterable[Node], stream: Node) -> None:
    """Give each replica its own copy of every tensor that the graph changes in place.

    A tensor that the graph creates, torch.zeros(n) for example, is the same on all replicas, and
    vmap cannot write values that differ into it.

    **Arguments**:

    - `graph`: the graph of one replica; it is changed.
    - `stacked`: its inputs that are stacked.
    - `stream`: one of them.
    """
    differs = {*stacked}
    bases: dict[Node, None] = {}
    for node in graph.nodes:
        if any(operand in differs for operand in node.all_input_nodes):
            differs.add(node)
        for operand in _mutated(node):
            base = _base(operand)
            if base not in differs and base.op != "placeholder":
                bases[base] = None
                differs.add(base)
    for base in bases:
        with graph.inserting_before(base.next):  # a vmapped condition makes the result vmapped
            seed = graph.call_function(aten.select.int, (stream, -1, 0))
            always = graph.call_function(aten.eq.Tensor, (seed, seed))
            own = graph.call_function(aten.where.self, (always, base, base))
        base.replace_all_uses_with(own, partial(operator.is_not, own))


def add_taps(graph: Graph, count: int, last: Node) -> list[Tensor]:
    """Make a graph differentiable with respect to its last `count` results.

    Each becomes the sum of itself and a new argument, and is no longer returned. With zeros as
    arguments, the gradients of the arguments are those of the results.

    **Arguments**:

    - `graph`: it is changed.
    - `count`: the number of results.
    - `last`: the graph's last argument so far.

    **Returns**: Tensors of the shapes and dtypes of the new arguments.
    """
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    results: Any = output.args[0]
    returned, tapped = results[: len(results) - count], results[len(results) - count :]
    output.args = (returned,)
    for number, node in enumerate(tapped):
        with graph.inserting_after(last):
            last = graph.placeholder(f"tap{number}")
        with graph.inserting_after(node):
            both = graph.call_function(aten.add.Tensor, (node, last))
        node.replace_all_uses_with(both, partial(operator.is_not, both))
    return [node.meta["val"] for node in tapped]


def simplify(graph: Graph) -> None:
    """Remove views that see what an earlier node has, and operations that are repeated.

    vmap and autograd leave many of both. Repetitions stay in a graph that changes tensors in place.
    """
    functional = not running_statistics(graph) and not any(map(_mutated, graph.nodes))
    known: dict[Any, Node] = {}
    for node in graph.nodes:
        found = _unviewed(node)
        if found is node and functional and _computes(node):
            # text, as 1 == 1.0; the nodes in it are names
            found = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _unviewed(node: Node) -> Node:
    """The earliest node of which this is a view with all elements in their places, or itself."""
    found = base = node
    while base.target in VIEWS:
        (base,) = base.all_input_nodes
        if _geometry(base) == _geometry(node):
            found = base
    return found


def _geometry(node: Node) -> tuple[Any, ...]:
    x = node.meta["val"]
    return x.shape, x.stride(), x.storage_offset()


def _computes(node: Node) -> bool:
    """Whether a node's result depends on its operands alone."""
    target = node.target
    return isinstance(target, OpOverload) and target.namespace == "aten" and not is_random(target)


def call_directly(module: GraphModule) -> None:
    """Let a graph call torch's functions in place of operators, without a Python frame for each."""
    for node in module.graph.nodes:
        if node.target in RESHAPES and node.args[1]:  # the method needs a size
            x, shape = node.args
            node.op, node.target, node.args = "call_method", "view", (x, *shape)
        elif isinstance(node.target, OpOverload):
            node.target = _direct(node.target)
    module.recompile()


@cache
def _direct(operator: OpOverload[..., Any]) -> Callable[..., Any]:
    """The operator, or torch's function of this name, which parses arguments in half the time."""
    schema = str(schema_of(operator))
    namespace, name = schema.partition(".")[0].partition("(")[0].split("::")
    found: Any = operator._op
    if namespace == "aten" and "Tensor?[]" not in schema:  # torch's functions take no None there
        own = (getattr(torch, name, None), getattr(Tensor, name, None))
        found = next((function for function in own if isinstance(function, IN_C)), found)
    direct: Any = partial(found)
    direct.__module__, direct.__name__ = __name__, str(operator).replace(".", "_")
    return direct


def _mutated(node: Node) -> list[Node]:
    """The operands that a node changes in place."""
    schema = schema_of(node.target)
    if schema is None or not schema.is_mutable or node.target is aten.detach_.default:
        return []  # torch.tensor(...) is traced as detach_, which changes no value
    return [
        operand
        for place, argument in enumerate(schema.arguments)
        if argument.is_write
        for operand in [_argument(node, place, argument.name)]
        if isinstance(operand, Node)
    ]


def _argument(node: Node, place: int, name: str) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _base(node: Node) -> Node:
    """The tensor that a node is, or may be, a view of."""

    while True:
        schema = schema_of(node.target)
        aliases = node.target is operator.getitem or (
            schema is not None
            and any(argument.alias_info is not None for argument in schema.arguments[:1])
        )
        first = node.args[0] if node.args else None
        if not aliases or not isinstance(first, Node):
            return node
        node = first
