"""A compiled graph: a flat list of steps on a list of values, one slot for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["CompiledGraph", "Step"]

Array = Any
#: The compiled form of an op: it reads and writes slots.
Step = Callable[[list[Any]], None]


class CompiledGraph:
    """The compiled form of a graph; it can run any number of times."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self.machine = machine
        self.steps: list[Step] = []
        self.template: list[Any] = []  # a value for each slot: that of a constant, else None
        self.constants: list[int] = []  # the slots of constants
        self.owned: list[int] = []  # constants that are changed in place
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.modified: frozenset[int] = frozenset()  # inputs that are changed in place

    def run(self, arguments: Sequence[Array]) -> list[Array]:
        """The outputs for these inputs, (replicas, *shape) each.

        Inputs in `modified` are changed in place. Outputs may be inputs, or views of them.
        """
        values = self.template.copy()
        if self.machine.rows is not None:
            count = self.machine.count
            for slot in self.constants:
                values[slot] = values[slot][:count]
        for slot in self.owned:
            values[slot] = values[slot].copy()
        for slot, argument in zip(self.inputs, arguments, strict=True):
            values[slot] = argument
        for step in self.steps:
            step(values)
        return [values[slot] for slot in self.outputs]
