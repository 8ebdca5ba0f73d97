"""call, repeat and conditional: ops that run other graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..exceptions import popart_exception
from ..tensor import Tensor, TensorSpec
from .definition import Definition
from .hosting import only_compiled
from .op import Op

if TYPE_CHECKING:
    from ..execution.compiler import GraphCompiler
    from ..execution.program import Program, Step
    from ..graph import Graph

__all__ = ["CALL", "CONDITIONAL", "REPEAT"]

Array = Any
Attributes = Mapping[str, Any]


def graph_specs(inputs: list[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    """The outputs that the called graph has now; it may get more, which are not this site's."""
    return [tensor.spec for tensor in attributes["graph"].outputs]


def arguments_of(
    compiler: GraphCompiler, op: Op, graph: Graph, called: Sequence[Tensor | None], first: int = 0
) -> tuple[list[int], list[int]]:
    """The slots of a called graph's arguments, and which of them have to be copied for it.

    `called` says which input of the graph each of the op's inputs is, from input `first` on.
    """
    given = {t._id: first + i for i, t in enumerate(called) if t is not None}
    missing = [tensor.name for tensor in graph.inputs if tensor._id not in given]
    if missing:
        raise popart_exception(
            f"{op.debugName()} calls graph {graph.name} without its inputs {missing}"
        )
    order = [given[tensor._id] for tensor in graph.inputs]
    program = compiler.compiler.program(graph)
    shared = compiler.changed_by(op)
    copied = [i for i, index in enumerate(order) if i in program.modified and index not in shared]
    return compiler.slots([op.inputs[index] for index in order]), copied


def compile_call(compiler: GraphCompiler, op: Op) -> Step:
    graph = op.attributes["graph"]
    program = compiler.compiler.program(graph)
    inputs, copied = arguments_of(compiler, op, graph, op.attributes["called_inputs"])
    outputs = compiler.slots(op.outputs)

    def step(values: list[Any]) -> None:
        arguments = [values[slot] for slot in inputs]
        for index in copied:
            arguments[index] = arguments[index].copy()
        for slot, result in zip(outputs, program.run(arguments), strict=False):
            values[slot] = result

    return step


def compile_repeat(compiler: GraphCompiler, op: Op) -> Step:
    graph, count = op.attributes["graph"], op.attributes["count"]
    program = compiler.compiler.program(graph)
    inputs, copied = arguments_of(compiler, op, graph, op.attributes["called_inputs"])
    outputs = compiler.slots(op.outputs)
    carried = len(op.outputs)  # the graph may have got more outputs since
    changes = bool(program.modified)

    def step(values: list[Any]) -> None:
        arguments = [values[slot] for slot in inputs]
        for index in copied:
            arguments[index] = arguments[index].copy()
        for _ in range(count):
            results = program.run(arguments)[:carried]
            arguments[:carried] = apart(results, arguments) if changes else results
        for slot, result in zip(outputs, arguments, strict=False):
            values[slot] = result

    return step


def apart(results: list[Array], arguments: list[Array]) -> list[Array]:
    """Results as the next arguments of a graph that changes some in place: none shares memory.

    What comes back in its own place, changed or not, may stay there.
    """
    others = {id(array) for array in arguments}
    for index, result in enumerate(results):
        if result is arguments[index]:
            continue
        if result.base is not None or id(result) in others:
            result = results[index] = result.copy()
        others.add(id(result))
    return results


CALL = Definition("Call", graph_specs, only_compiled, compile=compile_call)
REPEAT = Definition("Loop", graph_specs, only_compiled, compile=compile_repeat)


def branch_specs(inputs: list[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    return [tensor.spec for tensor in attributes["then_branch"].outputs]


def compile_conditional(compiler: GraphCompiler, op: Op) -> Step:
    machine, attributes = compiler.machine, op.attributes
    condition, outputs = compiler.slot(op.inputs[0]), compiler.slots(op.outputs)
    branches = []
    first = 1
    for name in ("then", "else"):
        graph, called = attributes[f"{name}_branch"], attributes[f"{name}_inputs"]
        slots, _ = arguments_of(compiler, op, graph, called, first)
        branches.append((compiler.compiler.program(graph), slots))
        first += len(called)

    def step(values: list[Any]) -> None:
        chosen = machine.download(values[condition]).reshape(-1).astype(np.bool_)
        if chosen.all() or not chosen.any():
            program, slots = branches[0 if chosen[0] else 1]
            results = program.run(own(program, [values[slot] for slot in slots]))
        else:
            results = diverged(chosen, values)
        for slot, result in zip(outputs, results, strict=False):
            values[slot] = result

    def diverged(chosen: Any, values: list[Any]) -> list[Array]:
        """Each branch for the replicas that take it, and their results put together."""
        results: list[Array] = []
        for take, (program, slots) in zip((chosen, ~chosen), branches, strict=True):
            rows = np.flatnonzero(take)
            at = machine.upload(rows)
            with machine.narrowed(rows):
                parts = program.run([values[slot][at] for slot in slots])[: len(outputs)]
            if not results:
                results = [machine.xp.empty((len(chosen), *p.shape[1:]), p.dtype) for p in parts]
            for result, part in zip(results, parts, strict=True):
                result[at] = part
        return results

    return step


def own(program: Program, arguments: list[Array]) -> list[Array]:
    """Copies of the arguments that a graph changes in place."""
    for index in program.modified:
        arguments[index] = arguments[index].copy()
    return arguments


CONDITIONAL = Definition("If", branch_specs, only_compiled, compile=compile_conditional)
