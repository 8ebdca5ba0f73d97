"""The ops of a graph: the parts of PopART's Op objects that PopXL programs use.

Each type of op has its own class, `AddOp`, `MatMulOp`, ..., created on first use.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .context import ExecutionContext
from .graph import Graph

if TYPE_CHECKING:
    from ._definition import Definition
    from .tensor import Tensor

__all__ = ["Op", "op_class"]

_numbers = itertools.count()

OPTIMIZER_TYPES = frozenset(
    (
        "Accumulate",
        "AccumulatorScale",
        "AccumulatorZero",
        "AdamUpdater",
        "AdamVarUpdate",
        "CopyVarUpdate",
        "SparseAccumulate",
    )
)


class Op:
    """An op of a graph: its definition, inputs, outputs, attributes and place."""

    def __init__(
        self,
        graph: Graph,
        definition: Definition,
        inputs: Sequence[Tensor],
        attributes: Mapping[str, Any],
        name: str = "",
        *,
        ipu: int = 0,
        tile_set: str = "compute",
        location: tuple[str, int] | None = None,
    ) -> None:
        self.id = next(_numbers)  #: in the order of creation
        self.graph = graph
        self.definition = definition
        self.inputs: list[Tensor] = list(inputs)
        self.outputs: list[Tensor] = []
        self.attributes: dict[str, Any] = dict(attributes)
        self._name = name
        self.ipu = ipu
        self.tile_set = tile_set
        self.location = location  #: file and line of the program that added it
        self.after: list[Op] = []  #: ops that run before it by the program's request
        self.execution_context = ExecutionContext.Normal  #: when it runs
        self.hints: dict[str, Any] = {}  #: for a compiler

    def opType(self) -> str:
        """PopART's name of its type, such as "Add"."""
        return self.definition.op_type

    def name(self) -> str:
        """Its name; "" if it has none."""
        return self._name

    def debugName(self) -> str:
        """Number, type and name, for messages."""
        named = f"/{self._name}" if self._name else ""
        return f"Op({self.id}, {self.opType()}{named})"

    def getGraph(self) -> Graph:
        """The graph it is in."""
        return self.graph

    def inTensors(self) -> list[Tensor]:
        """Its inputs, in order."""
        return list(self.inputs)

    def outTensors(self) -> list[Tensor]:
        """Its outputs, in order."""
        return list(self.outputs)

    getInputTensors, getOutputTensors = inTensors, outTensors

    def isOptimizerOp(self) -> bool:
        """Whether it is one of `ops.var_updates`."""
        return self.opType() in OPTIMIZER_TYPES

    def getInputIds(self) -> list[str]:
        """The ids of its inputs."""
        return [tensor.id for tensor in self.inputs]

    def getOutputIds(self) -> list[str]:
        """The ids of its outputs."""
        return [tensor.id for tensor in self.outputs]

    def getCalledGraphs(self) -> list[Graph]:
        """The graphs among its attributes, which it calls."""
        return [value for value in self.attributes.values() if isinstance(value, Graph)]

    def modifies(self) -> tuple[int, ...]:
        """The inputs that it changes in place (for a call they depend on its graph)."""
        return (*self.definition.modifies, *self.attributes.get("modified", ()))

    def __repr__(self) -> str:
        return self.debugName()


class CallingOp(Op):
    """An op that calls one graph: programs tell it by its method."""

    def getCalledGraph(self) -> Graph:
        """The graph that the call or the loop runs."""
        graph: Graph = self.attributes["graph"]
        return graph


CALLING = ("Call", "Loop", "LoopGrad")
_CLASSES: dict[str, type[Op]] = {}


def op_class(op_type: str) -> type[Op]:
    """The class of a type of op, such as AddOp. A type has one class.

    >>> op_class("Add").__name__, op_class("Add") is op_class("Add")
    ('AddOp', True)
    """
    if op_type not in _CLASSES:
        base = CallingOp if op_type in CALLING else Op
        about = {"__doc__": f"An op of type {op_type}."}
        _CLASSES[op_type] = type(f"{op_type}Op", (base,), about)
    return _CLASSES[op_type]
