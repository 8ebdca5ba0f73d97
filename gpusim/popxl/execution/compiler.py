"""Graphs compiled into programs: each op becomes a step that reads, writes and frees slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpusim.libraries import to_host

from ..context import ExecutionContext
from ..exceptions import popart_exception, poplar_application_runtime_error
from ..tensor import Constant, Variable
from .aliasing import Aliasing, changed_by
from .program import CompiledGraph, Step

if TYPE_CHECKING:
    from .._definition import Definition
    from .._op import Op
    from ..graph import Graph
    from ..tensor import Tensor
    from .machine import Machine

__all__ = ["Compiler", "GraphCompiler"]

Array = Any


class Compiler:
    """Compiles the graphs of an Ir, each once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._programs: dict[tuple[str, ExecutionContext], CompiledGraph] = {}

    def program(
        self, graph: Graph, when: ExecutionContext = ExecutionContext.Normal
    ) -> CompiledGraph:
        """The program of a graph, compiled on first use; for the main graph, its ops of a time."""
        key = graph.id, when
        if key not in self._programs:
            self._programs[key] = GraphCompiler(self, graph, when).program
        return self._programs[key]


class GraphCompiler:
    """Compiles one graph. The definitions' `compile` functions get this object."""

    def __init__(self, compiler: Compiler, graph: Graph, when: ExecutionContext) -> None:
        self.compiler, self.machine, self.graph = compiler, compiler.machine, graph
        self.when = when
        self.aliasing = Aliasing(graph)
        self.aliasing.check_order()
        self.program = CompiledGraph(graph.name, self.machine)
        self._slots = {tensor._id: slot for slot, tensor in enumerate(graph.tensors)}
        self._places = {op.id: place for place, op in enumerate(graph._ops)}
        self._links = [op for op in graph._ops if op.definition.write_back is not None]
        self._compile()

    def slot(self, tensor: Tensor) -> int:
        """The slot of a tensor."""
        return self._slots[tensor._id]

    def slots(self, tensors: Sequence[Tensor]) -> list[int]:
        """The slots of tensors."""
        return [self._slots[tensor._id] for tensor in tensors]

    def changed_by(self, op: Op) -> tuple[int, ...]:
        """The inputs that an op changes in place."""
        return changed_by(op)

    def _compile(self) -> None:
        graph, program = self.graph, self.program
        program.template = [None] * len(self._slots)
        for tensor in graph.tensors:
            self._preset(tensor, program)
        program.inputs, program.outputs = self.slots(graph.inputs), self.slots(graph.outputs)
        program.modified = frozenset(
            index for index, tensor in enumerate(graph.inputs) if self.aliasing.is_changed(tensor)
        )
        ops = live_ops(graph)
        if graph is graph.main_graph:
            ops = [op for op in ops if op.execution_context is self.when]
            check_contexts(ops)
        outputs = {tensor._id for tensor in graph.outputs}
        if self._links:  # a change may pass through tensors without further uses
            outputs |= {t._id for t in graph.tensors if self.aliasing.is_changed(t)}
        last = last_uses(ops, outputs)
        for op in ops:
            self._add(op, self.slots(last[op.id]))

    def _preset(self, tensor: Tensor, program: CompiledGraph) -> None:
        """Set the initial value of a tensor: a constant's value, or a variable's array."""
        slot = self.slot(tensor)
        if isinstance(tensor, Constant):
            program.template[slot] = self.machine.replicate(tensor._data)
            program.constants.append(slot)
            if self.aliasing.is_changed(tensor):
                program.owned.append(slot)
        elif tensor._id in self.machine.variables:
            program.template[slot] = self.machine.variables[tensor._id]

    def _add(self, op: Op, emptied: list[int]) -> None:
        for tensor in op.inputs:
            check_usable(tensor, op)
        compiled = op.definition.compile
        step = self.plain(op) if compiled is None else compiled(self, op)
        steps = [step]
        if must_not_share(op, self.aliasing):
            steps.append(unshare(self.slots(op.outputs), self.slots(op.inputs)))
        steps += self._synchronise(op)
        self.program.steps.append(in_turn(steps, emptied) if emptied or len(steps) > 1 else step)

    def plain(self, op: Op) -> Step:
        """The step of an op that is one call of its `run`."""
        definition, attributes, xp = op.definition, op.attributes, self.machine.xp
        run: Any = definition.run
        options = self.graph.ir.getSessionOptions()
        if "log2_scale" in definition.names and options.throwIfLog2ScaleTensorNotInRange:
            run = in_range(run, op.debugName(), definition.names.index("log2_scale"))
        if self.machine.one_by_one and not definition.collective:
            run = one_by_one(definition)
        if definition.collective:
            run = for_all(run, op.debugName(), self.machine)
        inputs, outputs = self.slots(op.inputs), self.slots(op.outputs)
        if len(outputs) == 1:
            (output,) = outputs

            def step(values: list[Any]) -> None:
                values[output] = run(xp, [values[slot] for slot in inputs], attributes)[0]

            return step

        def several(values: list[Any]) -> None:
            results = run(xp, [values[slot] for slot in inputs], attributes)
            for slot, result in zip(outputs, results, strict=True):
                values[slot] = result

        return several

    def _synchronise(self, op: Op) -> list[Step]:
        """Steps that carry a change into views that do not share its memory."""
        roots = {self.aliasing.root(op.inputs[index]) for index in changed_by(op)}
        if not roots:
            return []
        links = [
            link
            for link in self._links
            if self._places[link.id] < self._places[op.id]
            and any(self.aliasing.root(tensor) in roots for tensor in link.inputs)
        ]
        if not links:
            return []
        changed = [op.inputs[index] for index in changed_by(op)]
        return carrying(self, changed, links)


def check_contexts(ops: Sequence[Op]) -> None:
    """Raise popart_exception if an op uses a result of an op that runs in another context."""
    for op in ops:
        for made_by in (tensor._producer for tensor in op.inputs):
            if made_by is not None and made_by.execution_context is not op.execution_context:
                raise popart_exception(
                    f"{op.debugName()} runs in {op.execution_context}, and uses a result of "
                    f"{made_by.debugName()}, which runs in {made_by.execution_context}"
                )


def check_usable(tensor: Tensor, op: Op) -> None:
    """Raise RuntimeError if an op uses a variable whose values do not lie whole on a replica."""
    if isinstance(tensor, Variable) and (tensor._remote is not None or tensor._shards):
        how = "load it by ops.remote_load" if tensor._remote is not None else "use its shard"
        raise RuntimeError(
            f"{op.debugName()} uses {tensor}, whose values do not lie whole on a replica: {how}"
        )


def live_ops(graph: Graph) -> list[Op]:
    """The ops with an effect or a used result, in order."""
    needed = {tensor._id for tensor in graph.outputs}
    live: list[Op] = []
    for op in reversed(graph._ops):
        if (
            op.definition.effect
            or changed_by(op)
            or any(tensor._id in needed for tensor in op.outputs)
            or any(has_effect(called) for called in op.getCalledGraphs())
        ):
            live.append(op)
            needed.update(tensor._id for tensor in op.inputs)
    return live[::-1]


def has_effect(graph: Graph) -> bool:
    """Whether running a graph does more than compute its outputs; cached until the Ir changes."""
    version, effect = graph._effect
    if version != graph.ir._version:
        effect = any(
            op.definition.effect or any(map(has_effect, op.getCalledGraphs())) for op in graph._ops
        )
        graph._effect = graph.ir._version, effect
    return effect


def last_uses(ops: Sequence[Op], outputs: set[str]) -> dict[int, list[Tensor]]:
    """For each op the tensors, made by ops, that no later op uses."""
    seen = set(outputs)
    last: dict[int, list[Tensor]] = {}
    for op in reversed(ops):
        last[op.id] = []
        for tensor in (*op.outputs, *op.inputs):
            if tensor._id not in seen:
                seen.add(tensor._id)
                if tensor._producer is not None:
                    last[op.id].append(tensor)
    return last


def must_not_share(op: Op, aliasing: Aliasing) -> bool:
    """Whether outputs must not share memory, because they or the inputs change in place."""
    if op.definition.aliases or not op.outputs:
        return False
    return any(map(aliasing.is_changed, (*op.inputs, *op.outputs)))


def unshare(outputs: list[int], inputs: list[int]) -> Step:
    """Copy outputs that share memory with other arrays."""

    def step(values: list[Any]) -> None:
        seen = {id(values[slot]) for slot in inputs}
        for slot in outputs:
            array = values[slot]
            if array.base is not None or id(array) in seen or not is_writable(array):
                array = values[slot] = array.copy()
            seen.add(id(array))

    return step


def is_writable(array: Array) -> bool:
    """Whether NumPy allows writes (CuPy's arrays have no such flag)."""
    return bool(getattr(array.flags, "writeable", True))


def in_turn(steps: Sequence[Step], emptied: list[int]) -> Step:
    """Several steps as one, which then empties some slots."""
    if len(steps) == 1:
        (only,) = steps

        def step(values: list[Any]) -> None:
            only(values)
            for slot in emptied:
                values[slot] = None

        return step

    def several(values: list[Any]) -> None:
        for each in steps:
            each(values)
        for slot in emptied:
            values[slot] = None

    return several


def one_by_one(definition: Definition) -> Any:
    """A `run` that is called once for each replica, with its results stacked."""
    run, aliases, modifies = definition.run, definition.aliases, definition.modifies

    def each(xp: Any, inputs: list[Array], attributes: Any) -> list[Array]:
        if (aliases and not modifies) or not inputs:
            return list(run(xp, inputs, attributes))  # views: nothing is computed
        parts = [
            run(xp, [array[row : row + 1] for array in inputs], attributes)
            for row in range(len(inputs[0]))
        ]
        return [
            inputs[aliases[number]] if number in aliases else xp.concatenate(outputs)
            for number, outputs in enumerate(zip(*parts, strict=True))
        ]

    return each


def in_range(run: Any, name: str, scale: int) -> Any:
    """A `run` with a check of the scales of 8-bit floats, an input."""

    def checked(xp: Any, inputs: list[Array], attributes: Any) -> Any:
        scales = inputs[scale]
        if bool(((scales < -32) | (scales > 31)).any()):
            raise poplar_application_runtime_error(
                f"{name}: log2_scale must be -32 to 31, got {to_host(scales).tolist()}"
            )
        return run(xp, inputs, attributes)

    return checked


def for_all(run: Any, name: str, machine: Machine) -> Any:
    """The `run` of a collective, with a check that all replicas run."""

    def checked(xp: Any, inputs: list[Array], attributes: Any) -> Any:
        machine.need_all(name)
        return run(xp, inputs, attributes)

    return checked


class Carrier:
    """Steps that carry a change of one array to all others with the same memory, along links.

    A link is an op whose output counts as a view of its inputs but may be an array of its own. A
    change is written up into the view's inputs, one at a time, and from there down into all other
    views, before the next input is: arrays further up may overlap.
    """

    def __init__(self, compiler: GraphCompiler, links: Sequence[Op]) -> None:
        self._compiler, self._links = compiler, links
        self._array = compiler.aliasing.array
        self._made_by = {self._array(link.outputs[0]): link for link in links}

    def steps(self, changed: str, waiting: tuple[str, ...] = ()) -> list[Step]:
        """The steps for a change of an array. `waiting` are arrays whose change is on its way."""
        steps: list[Step] = []
        link = self._made_by.get(changed)
        for index, tensor in enumerate(link.inputs if link is not None else ()):
            assert link is not None
            steps.append(write_back(self._compiler, link, index))
            steps += self.steps(self._array(tensor), (*waiting, changed))
        reached = {changed}
        for below in self._links:
            output = self._array(below.outputs[0])
            if output not in waiting and reached.intersection(map(self._array, below.inputs)):
                steps.append(refresh(self._compiler, below))
                reached.add(output)
        return steps


def carrying(compiler: GraphCompiler, changed: Sequence[Tensor], links: Sequence[Op]) -> list[Step]:
    """Steps that carry changes of tensors along links."""
    carrier = Carrier(compiler, links)
    arrays = dict.fromkeys(map(compiler.aliasing.array, changed))
    return [step for array in arrays for step in carrier.steps(array)]


def write_back(compiler: GraphCompiler, link: Op, index: int) -> Step:
    """Write a view's values into one of the arrays that it views."""
    write, attributes, xp = link.definition.write_back, link.attributes, compiler.machine.xp
    inputs, output = compiler.slots(link.inputs), compiler.slot(link.outputs[0])
    assert write is not None

    def step(values: list[Any]) -> None:
        arrays = [values[slot] for slot in inputs]
        if values[output] is None or any(array is None for array in arrays):
            return  # the view is not used, and so does not exist
        others = [array if at == index else array.copy() for at, array in enumerate(arrays)]
        write(xp, values[output], others, attributes)

    return step


def refresh(compiler: GraphCompiler, link: Op) -> Step:
    """Write the viewed arrays into the view."""
    run, attributes, xp = link.definition.run, link.attributes, compiler.machine.xp
    inputs, output = compiler.slots(link.inputs), compiler.slot(link.outputs[0])

    def step(values: list[Any]) -> None:
        if values[output] is not None and all(values[slot] is not None for slot in inputs):
            values[output][...] = run(xp, [values[slot] for slot in inputs], attributes)[0]

    return step
