"""ops.call: run another graph on tensors of this one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._ops.calling import CALL
from .._ops.definition import add_op
from .._ops.op import Op
from .._sites import site_inputs
from ..graph import Graph
from ..tensor import Tensor

__all__ = ["CallSiteInfo", "call", "call_with_info"]


class CallSiteInfo:
    """A call or repeat of a graph: which tensors of caller and called graph belong together."""

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
        """The op's input for an input of the graph, by their numbers; IndexError for none."""
        inputs = self.called_graph.inputs
        if not 0 <= idx < len(inputs):
            raise IndexError("Invalid graph input index")
        for index, tensor in enumerate(self._called_inputs):
            if tensor is inputs[idx]:
                return index
        raise IndexError("Invalid graph input index")

    def parent_to_graph_input_index(self, idx: int) -> int:
        """The graph's input for an input of the op; IndexError for no such one."""
        called = self._called_inputs
        if not 0 <= idx < len(called):
            raise IndexError("Invalid parent graph input index")
        return index_of(self.called_graph.inputs, called[idx])

    def graph_to_parent_output_index(self, idx: int) -> int:
        """The op's output for an output of the graph; IndexError for no such one."""
        if not 0 <= idx < len(self._op.outputs):
            raise IndexError(f"Invalid graph output index {idx}")
        return idx

    def parent_to_graph_output_index(self, idx: int) -> int:
        """The graph's output for an output of the op; IndexError for no such one."""
        return self.graph_to_parent_output_index(idx)

    # Tensors

    def graph_to_parent(self, graph_tensor: Tensor) -> Tensor:
        """The caller's tensor for an input or output of the graph; ValueError for another one."""
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
        """The graph's tensor for one that the caller gives or gets; ValueError for another one.

        Of a tensor that is given several times, the first input.
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
        """The caller's tensors that are given."""
        return tuple(self._op.inputs)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The caller's tensors that come back."""
        return tuple(self._op.outputs)

    def set_parent_input_modified(
        self, parent_tensor: Tensor, infer_modified_regions: bool = False
    ) -> None:
        """Let the graph's changes of an input reach the caller's tensor, as TensorByRef does.

        ValueError for a tensor that is not given to the graph.
        """
        found = [i for i, tensor in enumerate(self._op.inputs) if tensor is parent_tensor]
        if not found:
            raise ValueError(
                f"Tensor {parent_tensor.name} is not a parent graph input of the call site."
            )
        modified = dict.fromkeys((*self._op.attributes.get("modified", ()), *found))
        self._op.attributes["modified"] = tuple(modified)
        self._op.graph.ir._changed()


def call(
    graph: Graph,
    *inputs: Any,
    inputs_dict: Mapping[Tensor, Any] | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of a graph for these inputs.

    **Arguments**

    - `graph`: what to run.
    - `inputs`: tensors of the current graph, lists of them, or numbers, for its first inputs.
    - `inputs_dict`: the same for inputs of the graph that are named.

    The graph works on copies, except for its inputs by reference (`popxl.TensorByRef`).

    Raises:
        ValueError: for inputs that are missing, too many, given twice, or of another shape, dtype
            or graph.
        TypeError: for what is neither a tensor nor numbers.
    """
    return call_with_info(graph, *inputs, inputs_dict=inputs_dict).outputs


def call_with_info(
    graph: Graph,
    *inputs: Any,
    inputs_dict: Mapping[Tensor, Any] | None = None,
    check_inputs: bool = True,
) -> CallSiteInfo:
    """As `call`; returns the call site. Inputs may be missing if not `check_inputs`."""
    return CallSiteInfo(subgraph_op(CALL, graph, inputs, inputs_dict, check_inputs, {}))


def subgraph_op(
    definition: Any,
    graph: Graph,
    inputs: Iterable[Any],
    inputs_dict: Mapping[Tensor, Any] | None,
    check_inputs: bool,
    attributes: Mapping[str, Any],
) -> Op:
    """A new op that runs a graph."""
    from ..context import get_current_graph

    given, called = site_inputs(graph, inputs, inputs_dict, check_inputs)
    here = get_current_graph()
    names = [tensor.name for tensor in graph.outputs]
    add_op(
        definition,
        given,
        {"graph": graph, "called_inputs": called, **attributes},
        output_names=names,
    )
    return here._ops[-1]


def index_of(tensors: Iterable[Tensor], wanted: Tensor) -> int:
    return next(index for index, tensor in enumerate(tensors) if tensor is wanted)
