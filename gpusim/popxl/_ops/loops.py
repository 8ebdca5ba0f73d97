"""The gradient of a repeat: the repeat again, with every step kept, and then backwards.
Gradients of what is carried go from step to step; those of the other inputs are added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..tensor import Tensor, TensorSpec
from .definition import Definition
from .hosting import only_compiled
from .op import Op

if TYPE_CHECKING:
    from ..execution.compiler import GraphCompiler
    from ..execution.program import Step
    from ..graph import Graph

__all__ = ["LOOP_GRAD"]

Array = Any
Attributes = Mapping[str, Any]


def _specs(inputs: list[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    return [tensor.spec for tensor in attributes["outputs"]]


def _index(tensors: Sequence[Tensor], wanted: Tensor) -> int:
    """Where a tensor is among others; -1 if it is not."""
    return next((i for i, tensor in enumerate(tensors) if tensor is wanted), -1)


class Reversal:
    """A repeat as its gradient runs it: forwards from its inputs, then backwards."""

    def __init__(self, compiler: GraphCompiler, attributes: Attributes) -> None:
        graph: Graph = attributes["graph"]
        self.xp = compiler.machine.xp
        self.count, self.carried = attributes["count"], attributes["carried"]
        self.forward = compiler.compiler.program(graph)
        self.backward = compiler.compiler.program(attributes["gradient_graph"])
        self.sources = [_source(graph, *each) for each in attributes["inputs"]]
        #: which of the graph's inputs each output of the gradient graph is the gradient of
        self.targets = [_index(graph.inputs, tensor) for tensor in attributes["outputs"]]

    def run(self, arguments: list[Array], going: list[Array]) -> list[Array]:
        """The gradients, from the first step's inputs and the last step's gradients."""
        steps = []
        for _ in range(self.count):
            results = self.forward.run(arguments)
            steps.append((arguments, results))
            arguments = [*results[: self.carried], *arguments[self.carried :]]
        added: dict[int, Array] = {}
        while steps:
            before, results = steps.pop()
            made = self.backward.run(self._inputs(before, results, going))
            found = dict(zip(self.targets, made, strict=True))
            for at, part in found.items():
                if at >= self.carried:
                    added[at] = added[at] + part if at in added else part
            going = [
                found[at] if at in found else self.xp.zeros_like(before[at])
                for at in range(self.carried)
            ]
        added.update(enumerate(going))
        return [
            added[at] if at in added else self.xp.zeros_like(arguments[at]) for at in self.targets
        ]

    def _inputs(self, before: list[Array], results: list[Array], going: list[Array]) -> list[Array]:
        """What the gradient graph is given of one step."""
        places = {"gradient": going, "input": before, "output": results}
        return [
            # What the graph makes beyond what is carried is only kept: its gradient is zero.
            self.xp.zeros_like(results[at])
            if kind == "gradient" and at >= self.carried
            else places[kind][at]
            for kind, at in self.sources
        ]


def _compile(compiler: GraphCompiler, op: Op) -> Step:
    reversal = Reversal(compiler, op.attributes)
    called: list[Tensor] = op.attributes["called_inputs"]
    order = [_index(called, tensor) for tensor in op.attributes["graph"].inputs]
    given = compiler.slots([op.inputs[i] for i in order])
    gradients = compiler.slots(op.inputs[len(called) :])
    outputs = compiler.slots(op.outputs)

    def step(values: list[Any]) -> None:
        made = reversal.run([values[slot] for slot in given], [values[slot] for slot in gradients])
        for slot, gradient in zip(outputs, made, strict=True):
            values[slot] = gradient

    return step


def _source(graph: Graph, is_gradient: bool, tensor: Tensor) -> tuple[str, int]:
    """Where an input of the gradient graph comes from, in each step."""
    if is_gradient:
        return "gradient", _index(graph.outputs, tensor)
    own = _index(graph.inputs, tensor)
    return ("output", _index(graph.outputs, tensor)) if own < 0 else ("input", own)


LOOP_GRAD = Definition("LoopGrad", infer=_specs, run=only_compiled, compile=_compile)
