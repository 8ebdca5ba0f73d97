"""Changes of a graph, so that it can run for all replicas at once, and changes in place in it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

__all__ = ["add_taps", "own_what_changes", "statistics"]

aten = torch.ops.aten

RUNNING = {
    aten.batch_norm.default: ((3, 4), 5),
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.instance_norm.default: ((3, 4), 5),
}
"""Operators that change running statistics, which their schemas do not say: which operands these
are, and which one says so."""


def statistics(graph: Graph) -> set[Node]:
    """The running statistics that operators of the graph change in place."""
    changed = set()
    for node in graph.nodes:
        operands, switch = RUNNING.get(node.target, ((), 0))
        changed |= {node.args[place] for place in operands if node.args[switch]}
    return changed


def own_what_changes(graph: Graph, varied: Iterable[Node], stream: Node) -> None:
    """Let each replica have its own of what changes in place.

    A tensor that is the same on all replicas, as torch.zeros(n), may be filled with what differs,
    which a vmap cannot write into it.

    Args:
        graph: of one replica; it is changed.
        varied: those of its inputs that are stacked.
        stream: one of them.
    """
    different = {*varied}
    bases: dict[Node, None] = {}
    for node in graph.nodes:
        if any(operand in different for operand in node.all_input_nodes):
            different.add(node)
        for operand in _written(node):
            base = _base(operand)
            if base not in different and base.op != "placeholder":
                bases[base] = None
                different.add(base)
    for base in bases:
        with graph.inserting_after(base):
            own = graph.call_function(_own, (base, stream))
        base.replace_all_uses_with(own, partial(operator.is_not, own))


def _own(x: Tensor, stream: Tensor) -> Tensor:
    """The tensor, batched as the stream is."""
    one = stream.select(-1, 0)
    return torch.where(one == one, x, x)


def add_taps(graph: Graph, count: int, last: Node) -> list[Tensor]:
    """Let the last results of a graph, which so many are, be no results but what further arguments
    are added to: with zeros for these, the gradients of both are the same.

    Args:
        graph: it is changed.
        count: how many results.
        last: the graph's last argument so far.

    Returns:
        What is like the further arguments.
    """
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    results: Any = output.args[0]
    kept, tapped = results[: len(results) - count], results[len(results) - count :]
    output.args = (kept,)
    for number, node in enumerate(tapped):
        with graph.inserting_after(last):
            last = graph.placeholder(f"tap{number}")
        with graph.inserting_after(node):
            both = graph.call_function(aten.add.Tensor, (node, last))
        node.replace_all_uses_with(both, partial(operator.is_not, both))
    return [node.meta["val"] for node in tapped]


def _written(node: Node) -> list[Node]:
    """The operands that a node changes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or node.target is aten.detach_.default:
        return []  # detach_, which torch.tensor(...) is made with, changes no value
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
    """What a view is a view of, or may be."""
    while True:
        schema = getattr(node.target, "_schema", None)
        aliases = node.target is operator.getitem or (
            schema is not None
            and any(argument.alias_info is not None for argument in schema.arguments[:1])
        )
        first = node.args[0] if node.args else None
        if not aliases or not isinstance(first, Node):
            return node
        node = first
