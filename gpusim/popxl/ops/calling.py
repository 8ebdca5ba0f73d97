"""call and repeat: ops that run another graph, once or several times, and their call sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index as as_index
from typing import TYPE_CHECKING, Any

from .._definition import Array, Arrays, Attributes, Definition, Specs, add_op, only_compiled
from .._op import Op
from .._sites import site_inputs
from ..context import get_current_graph
from ..exceptions import popart_exception
from ..graph import Graph
from ..tensor import Tensor

if TYPE_CHECKING:
    from ..execution.compiler import GraphCompiler
    from ..execution.program import Step

__all__ = ["CallSiteInfo", "call", "call_with_info", "repeat", "repeat_with_info"]


def graph_specs(inputs: Specs, attributes: Attributes) -> Specs:
    """The specs of the called graph's outputs; outputs that it gets later are not this op's."""
    return [tensor.spec for tensor in attributes["graph"].outputs]


def arguments_of(
    compiler: GraphCompiler, op: Op, graph: Graph, called: Sequence[Tensor | None], first: int = 0
) -> tuple[list[int], list[int]]:
    """The slots of a called graph's arguments, and the arguments that must be copied for it.

    `called` has the graph's input for each of the op's inputs, beginning with input `first`.
    """
    position = {t._id: first + i for i, t in enumerate(called) if t is not None}
    missing = [tensor.name for tensor in graph.inputs if tensor._id not in position]
    if missing:
        raise popart_exception(
            f"{op.debugName()} calls graph {graph.name} without its inputs {missing}"
        )
    order = [position[tensor._id] for tensor in graph.inputs]
    program = compiler.compiler.program(graph)
    shared = compiler.changed_by(op)
    copied = [i for i, index in enumerate(order) if i in program.modified and index not in shared]
    return compiler.slots([op.inputs[index] for index in order]), copied


class CallSiteInfo:
    """A call or repeat of a graph: the pairs of tensors of the caller and of the called graph."""

    def __init__(self, subgraph_op: Op) -> None:
        self._op = subgraph_op

    @property
    def called_graph(self) -> Graph:
        """The graph that is called."""
        graph: Graph = self._op.attributes["graph"]
        return graph

    @property
    def _called_inputs(self) -> list[Tensor]:
        called: list[Tensor] = self._op.attributes["called_inputs"]
        return called

    # Indices

    def graph_to_parent_input_index(self, idx: int) -> int:
        """The number of the op's input for an input of the graph; IndexError if there is none."""
        inputs = self.called_graph.inputs
        index = index_of(self._called_inputs, inputs[idx]) if 0 <= idx < len(inputs) else -1
        if index < 0:
            raise IndexError("Invalid graph input index")
        return index

    def parent_to_graph_input_index(self, idx: int) -> int:
        """The number of the graph's input for an input of the op; IndexError if there is none."""
        called = self._called_inputs
        if not 0 <= idx < len(called):
            raise IndexError("Invalid parent graph input index")
        return index_of(self.called_graph.inputs, called[idx])

    def graph_to_parent_output_index(self, idx: int) -> int:
        """The number of the op's output for an output of the graph; IndexError if there is none."""
        if not 0 <= idx < len(self._op.outputs):
            raise IndexError(f"Invalid graph output index {idx}")
        return idx

    def parent_to_graph_output_index(self, idx: int) -> int:
        """The number of the graph's output for an output of the op; IndexError if there is none."""
        return self.graph_to_parent_output_index(idx)

    # Tensors

    def graph_to_parent(self, graph_tensor: Tensor) -> Tensor:
        """The caller's tensor for an input or output of the graph; ValueError for other tensors."""
        for index, tensor in enumerate(self._called_inputs):
            if tensor is graph_tensor:
                return self._op.inputs[index]
        for tensor, parent in zip(self.called_graph.outputs, self._op.outputs, strict=False):
            if tensor is graph_tensor:
                return parent
        raise ValueError(
            f"Tensor {graph_tensor.name} is not an input or output of the called graph(s)."
        )

    def parent_to_graph(self, parent_tensor: Tensor) -> Tensor:
        """The graph's tensor for an input or output of the op; ValueError for other tensors.

        For a tensor that is given several times this is the first input.
        """
        for index, tensor in enumerate(self._op.inputs):
            if tensor is parent_tensor:
                return self._called_inputs[index]
        for tensor, parent in zip(self.called_graph.outputs, self._op.outputs, strict=False):
            if parent is parent_tensor:
                return tensor
        raise ValueError(
            f"Tensor {parent_tensor.name} is not a parent graph input of the call site."
        )

    def parent_input(self, idx: int) -> Tensor:
        """The caller's tensor that is the op's input `idx`."""
        return self._op.inputs[idx]

    def parent_output(self, idx: int) -> Tensor:
        """The caller's tensor that is the op's output `idx`."""
        return self._op.outputs[idx]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The caller's tensors that are the op's inputs."""
        return tuple(self._op.inputs)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The caller's tensors that are the op's outputs."""
        return tuple(self._op.outputs)

    def set_parent_input_modified(
        self, parent_tensor: Tensor, infer_modified_regions: bool = False
    ) -> None:
        """Let the graph change the caller's tensor in place, as with TensorByRef.

        **Raises**: ValueError: if the tensor is not an input of the op.
        """
        indices = [i for i, tensor in enumerate(self._op.inputs) if tensor is parent_tensor]
        if not indices:
            raise ValueError(
                f"Tensor {parent_tensor.name} is not a parent graph input of the call site."
            )
        modified = dict.fromkeys((*self._op.attributes.get("modified", ()), *indices))
        self._op.attributes["modified"] = tuple(modified)
        self._op.graph.ir._mark_changed()


def subgraph_op(
    definition: Any,
    graph: Graph,
    inputs: Iterable[Any],
    inputs_dict: Mapping[Tensor, Any] | None,
    check_inputs: bool,
    attributes: Mapping[str, Any],
) -> Op:
    """Add an op that runs a graph."""
    arguments, called = site_inputs(graph, inputs, inputs_dict, check_inputs)
    here = get_current_graph()
    names = [tensor.name for tensor in graph.outputs]
    add_op(
        definition,
        arguments,
        {"graph": graph, "called_inputs": called, **attributes},
        output_names=names,
    )
    return here._ops[-1]


def index_of(tensors: Iterable[Tensor], target: Tensor) -> int:
    """The index of a tensor among others; -1 if it is not among them."""
    return next((index for index, tensor in enumerate(tensors) if tensor is target), -1)


# Call


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


CALL = Definition("Call", graph_specs, only_compiled, compile=compile_call)


def call(
    graph: Graph, *inputs: Any, inputs_dict: Mapping[Tensor, Any] | None = None
) -> tuple[Tensor, ...]:
    """Run a graph on inputs, and return its outputs.

    **Arguments**

    - `graph`: the graph to run.
    - `inputs`: tensors of the current graph, lists of them, or numbers, for the graph's first
      inputs.
    - `inputs_dict`: the same for inputs of the graph by name.

    The graph works on copies, except for its inputs by reference (`popxl.TensorByRef`).

    **Raises**

    - ValueError: if inputs are missing, too many or given twice, or in another graph.
    - popart_exception, which is a ValueError too: if their shape or dtype is not that of the
      graph's inputs.
    - TypeError: if an input is neither a tensor nor numbers.
    """
    return call_with_info(graph, *inputs, inputs_dict=inputs_dict).outputs


def call_with_info(
    graph: Graph,
    *inputs: Any,
    inputs_dict: Mapping[Tensor, Any] | None = None,
    check_inputs: bool = True,
) -> CallSiteInfo:
    """As `call`, but return the call site. Without `check_inputs`, inputs may be missing."""
    return CallSiteInfo(subgraph_op(CALL, graph, inputs, inputs_dict, check_inputs, {}))


# Repeat


def compile_repeat(compiler: GraphCompiler, op: Op) -> Step:
    graph, count = op.attributes["graph"], op.attributes["count"]
    program = compiler.compiler.program(graph)
    inputs, copied = arguments_of(compiler, op, graph, op.attributes["called_inputs"])
    outputs = compiler.slots(op.outputs)
    carried = len(op.outputs)  # the graph may get more outputs later
    changes = bool(program.modified)

    def step(values: list[Any]) -> None:
        arguments = [values[slot] for slot in inputs]
        for index in copied:
            arguments[index] = arguments[index].copy()
        for _ in range(count):
            results = program.run(arguments)[:carried]
            arguments[:carried] = without_sharing(results, arguments) if changes else results
        for slot, result in zip(outputs, arguments, strict=False):
            values[slot] = result

    return step


def without_sharing(results: Arrays, arguments: Arrays) -> Arrays:
    """Results as the next arguments of a graph that changes some in place: none shares memory.

    A result that is the argument at its own place may stay there.
    """
    others = {id(array) for array in arguments}
    for index, result in enumerate(results):
        if result is arguments[index]:
            continue
        if result.base is not None or id(result) in others:
            result = results[index] = result.copy()
        others.add(id(result))
    return results


REPEAT = Definition("Loop", graph_specs, only_compiled, compile=compile_repeat)


def repeat(
    graph: Graph, repeat_count: int, *inputs: Any, inputs_dict: Mapping[Tensor, Any] | None = None
) -> tuple[Tensor, ...]:
    """Run a graph `repeat_count` times, and return the outputs of the last run.

    The N outputs of each run are the first N inputs of the next one; other inputs stay the same.
    With `repeat_count` 0 the first inputs themselves are returned.

    **Raises**: as `call`; also ValueError: if the count is negative, or if the graph has more
    outputs than inputs, or outputs whose shapes or dtypes are not those of the inputs.
    """
    return repeat_with_info(graph, repeat_count, *inputs, inputs_dict=inputs_dict).outputs


def repeat_with_info(
    graph: Graph,
    repeat_count: int,
    *inputs: Any,
    inputs_dict: Mapping[Tensor, Any] | None = None,
    check_inputs: bool = True,
) -> CallSiteInfo:
    """As `repeat`, but return the call site. Without `check_inputs`, inputs may be missing."""
    if as_index(repeat_count) < 0:
        raise ValueError(f"Repeat count must be >= 0. Repeat count: {repeat_count}. Graph: {graph}")
    if len(graph.inputs) < len(graph.outputs):
        raise ValueError(
            f"To repeat the subgraph ({graph.id}) the number of inputs must be greater than or "
            f"equal to the number of outputs. {len(graph.inputs)} < {len(graph.outputs)}"
        )
    for into, out in zip(graph.inputs, graph.outputs, strict=False):
        if (into.shape, into.dtype) != (out.shape, out.dtype):
            raise ValueError(
                f"To repeat the subgraph ({graph.id}) its output {out} must have the shape and "
                f"dtype of the input that it becomes, {into}"
            )
    attributes = {"count": as_index(repeat_count)}
    return CallSiteInfo(subgraph_op(REPEAT, graph, inputs, inputs_dict, check_inputs, attributes))


# The gradient of a repeat runs it again, keeps every step, and then runs backwards. Gradients of
# carried values go from step to step; those of the other inputs are added.


def _gradient_specs(inputs: Specs, attributes: Attributes) -> Specs:
    return [tensor.spec for tensor in attributes["outputs"]]


class Reversal:
    """A repeat as its gradient runs it: forwards from its inputs, then backwards."""

    def __init__(self, compiler: GraphCompiler, attributes: Attributes) -> None:
        graph: Graph = attributes["graph"]
        self.xp = compiler.machine.xp
        self.count, self.carried = attributes["count"], attributes["carried"]
        self.forward = compiler.compiler.program(graph)
        self.backward = compiler.compiler.program(attributes["gradient_graph"])
        self.sources = [_source(graph, *each) for each in attributes["inputs"]]
        #: for each output of the gradient graph, the graph's input whose gradient it is
        self.targets = [index_of(graph.inputs, tensor) for tensor in attributes["outputs"]]

    def run(self, arguments: Arrays, gradients: Arrays) -> Arrays:
        """The gradients, from the first step's inputs and the last step's gradients."""
        steps = []
        for _ in range(self.count):
            results = self.forward.run(arguments)
            steps.append((arguments, results))
            arguments = [*results[: self.carried], *arguments[self.carried :]]
        added: dict[int, Array] = {}
        while steps:
            before, results = steps.pop()
            outputs = self.backward.run(self._inputs(before, results, gradients))
            parts = dict(zip(self.targets, outputs, strict=True))
            for at, part in parts.items():
                if at >= self.carried:
                    added[at] = added[at] + part if at in added else part
            gradients = [
                parts[at] if at in parts else self.xp.zeros_like(before[at])
                for at in range(self.carried)
            ]
        added.update(enumerate(gradients))
        return [
            added[at] if at in added else self.xp.zeros_like(arguments[at]) for at in self.targets
        ]

    def _inputs(self, before: Arrays, results: Arrays, gradients: Arrays) -> Arrays:
        """The inputs of the gradient graph for one step."""
        places = {"gradient": gradients, "input": before, "output": results}
        return [
            # Outputs that are not carried have a gradient of zero.
            self.xp.zeros_like(results[at])
            if kind == "gradient" and at >= self.carried
            else places[kind][at]
            for kind, at in self.sources
        ]


def compile_loop_gradient(compiler: GraphCompiler, op: Op) -> Step:
    reversal = Reversal(compiler, op.attributes)
    called: list[Tensor] = op.attributes["called_inputs"]
    order = [index_of(called, tensor) for tensor in op.attributes["graph"].inputs]
    sources = compiler.slots([op.inputs[i] for i in order])
    gradients = compiler.slots(op.inputs[len(called) :])
    outputs = compiler.slots(op.outputs)

    def step(values: list[Any]) -> None:
        results = reversal.run(
            [values[slot] for slot in sources], [values[slot] for slot in gradients]
        )
        for slot, gradient in zip(outputs, results, strict=True):
            values[slot] = gradient

    return step


def _source(graph: Graph, is_gradient: bool, tensor: Tensor) -> tuple[str, int]:
    """Where an input of the gradient graph comes from in each step."""
    if is_gradient:
        return "gradient", index_of(graph.outputs, tensor)
    own = index_of(graph.inputs, tensor)
    return ("output", index_of(graph.outputs, tensor)) if own < 0 else ("input", own)


LOOP_GRAD = Definition("LoopGrad", _gradient_specs, only_compiled, compile=compile_loop_gradient)
