"""Tensors of a graph that share memory, those that are changed in place, and the order of changes.

Changes and uses of one memory without an order are refused, as in PopART.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..exceptions import popart_exception

if TYPE_CHECKING:
    from .._op import Op
    from ..graph import Graph
    from ..tensor import Tensor

__all__ = ["Aliasing", "modified_inputs"]


class Aliasing:
    """The classes of tensors of a graph that share memory, and the changed ones among them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # By tensor id, the id of another member of its class. Members of one class are one array
        # when a program runs, or count as one memory.
        self._arrays: dict[str, str] = {}
        self._classes: dict[str, str] = {}
        for op in graph._ops:
            for out, into in op.definition.aliases.items():
                join(self._classes, op.outputs[out]._id, op.inputs[into]._id)
                if op.definition.write_back is None:
                    join(self._arrays, op.outputs[out]._id, op.inputs[into]._id)
            if op.definition.write_back is not None:  # a view of all of its inputs
                for tensor in op.inputs:
                    join(self._classes, op.outputs[0]._id, tensor._id)
        self.changed: set[str] = set()  # roots
        self._changes: list[tuple[Op, str]] = []
        for op in graph._ops:
            for index in changed_by(op):
                root = self.root(op.inputs[index])
                self.changed.add(root)
                self._changes.append((op, root))

    def root(self, tensor: Tensor) -> str:
        """The class of a tensor, by the id of a member."""
        return root_of(self._classes, tensor._id)

    def array(self, tensor: Tensor) -> str:
        """The class of tensors that share an array with a tensor, by the id of a member."""
        return root_of(self._arrays, tensor._id)

    def is_changed(self, tensor: Tensor) -> bool:
        """Whether its memory is changed in place somewhere in the graph."""
        return self.root(tensor) in self.changed

    def check_order(self) -> None:
        """Raise popart_exception if an op changes a tensor that another uses, without an order."""
        if not self._changes:
            return
        order, users = Order(self.graph._ops), self._users()
        for change, root in self._changes:
            strangers = users[root] & ~order.related(change)
            if strangers:
                op = self.graph._ops[strangers.bit_length() - 1]
                raise popart_exception(
                    "Inplacing ambiguity detected. "
                    f"{change.debugName()} changes a tensor in place that {op.debugName()} uses, "
                    f"in graph {self.graph.name}, and nothing says which of them comes first. Make "
                    "both in a `popxl.in_sequence()` context, or let one use the other's output."
                )

    def _users(self) -> dict[str, int]:
        """The ops that read or change memory of each changed class, as bits by their places.

        Ops that only make views do not count.
        """
        users = dict.fromkeys(self.changed, 0)
        for place, op in enumerate(self.graph._ops):
            if (op.definition.aliases or op.definition.write_back) and not changed_by(op):
                continue
            for tensor in op.inputs:
                if (root := self.root(tensor)) in users:
                    users[root] |= 1 << place
        return users


class Order:
    """The ops that certainly come before or after others; sets of them are bits by their places."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self._place = {op.id: place for place, op in enumerate(ops)}
        self._earlier = [self._producers(op) for op in ops]
        self._before = [0] * len(ops)
        self._after = [0] * len(ops)
        for place, earlier in enumerate(self._earlier):
            for producer in earlier:
                self._before[place] |= self._before[producer] | 1 << producer
        for place in reversed(range(len(ops))):
            for producer in self._earlier[place]:
                self._after[producer] |= self._after[place] | 1 << place

    def _producers(self, op: Op) -> set[int]:
        """The places of the ops directly before an op."""
        made_by = (tensor._producer for tensor in op.inputs)
        return {
            self._place[earlier.id]
            for earlier in (*made_by, *op.after)
            if earlier is not None and earlier.id in self._place
        }

    def related(self, op: Op) -> int:
        """An op, and all ops that certainly come before or after it."""
        place = self._place[op.id]
        return self._before[place] | self._after[place] | 1 << place


def join(parents: dict[str, str], one: str, other: str) -> None:
    """Merge the classes of two members."""
    roots = root_of(parents, one), root_of(parents, other)
    if roots[0] != roots[1]:
        parents[roots[0]] = roots[1]


def root_of(parents: dict[str, str], member: str) -> str:
    """The member that stands for a class."""
    while member in parents:
        member = parents[member]
    return member


def changed_by(op: Op) -> tuple[int, ...]:
    """The inputs that an op changes in place, in the memory of its graph."""
    by_site: Sequence[int] = op.attributes.get("modified", ())
    references = (
        index
        for index, tensor in enumerate(op.attributes.get("called_inputs", ()))
        if tensor._by_ref and tensor._id in modified_inputs(tensor._graph)
    )
    return tuple(dict.fromkeys((*op.definition.modifies, *by_site, *references)))


def modified_inputs(graph: Graph) -> frozenset[str]:
    """The ids of the inputs that a graph changes in place; cached until the Ir changes."""
    version, ids = graph._modified
    if version != graph.ir._version:
        aliasing = Aliasing(graph)
        ids = frozenset(t._id for t in graph.inputs if aliasing.is_changed(t))
        graph._modified = graph.ir._version, ids
    return ids
