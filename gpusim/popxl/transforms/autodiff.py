"""autodiff: the graph of a graph's gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from .._gradients import Differentiation, GradientPlan
from ..graph import Graph
from ..ops.calling import CallSiteInfo
from ..tensor import Tensor

if TYPE_CHECKING:
    from ..ir import Ir

__all__ = ["ExpectedConnection", "ExpectedConnectionType", "GradGraphInfo", "autodiff"]


class ExpectedConnectionType(Enum):
    """The kind of an input or output of a gradient graph."""

    Fwd = "Fwd"  #: a tensor of the forward graph
    FwdGrad = "FwdGrad"  #: the gradient of a tensor of the forward graph


@dataclass(frozen=True)
class PbConnection:
    """PopART's ExpectedConnection: the id of a forward tensor, and a kind."""

    fwdId: str
    type: ExpectedConnectionType


@dataclass(frozen=True)
class BwdGraphInfo:
    """PopART's GradGraphInfo: the gradient graph's id, and its connections."""

    bwdGraphId: str
    expectedInputs: Sequence[PbConnection]
    expectedOutputs: Sequence[PbConnection]


class ExpectedConnection:
    """The meaning of an input or output of a gradient graph: a kind, and a forward tensor."""

    _tensor: Tensor
    _type: ExpectedConnectionType

    def __init__(self) -> None:
        raise TypeError(
            "ExpectedConnection should not be constructed directly. Use "
            "ExpectedConnection._from_pb instead."
        )

    @classmethod
    def _create(cls, tensor: Tensor, type: ExpectedConnectionType) -> ExpectedConnection:
        new = object.__new__(cls)
        new._tensor, new._type = tensor, type
        return new

    @classmethod
    def _from_pb(cls, graph: Graph, connection: PbConnection) -> ExpectedConnection:
        """PopXL's connection for PopART's; `graph` is the forward graph."""
        return cls._create(graph.get_tensor(connection.fwdId), connection.type)

    @property
    def _pb_ec(self) -> PbConnection:
        """PopART's connection."""
        return PbConnection(self._tensor.id, self._type)

    @property
    def fwd_tensor(self) -> Tensor:
        """The forward tensor."""
        return self._tensor

    @property
    def connection_type(self) -> ExpectedConnectionType:
        """Whether it is the tensor itself or its gradient."""
        return self._type

    def __repr__(self) -> str:
        return f"({self.connection_type}, {self.fwd_tensor})"


class GradGraphInfo:
    """The result of `autodiff`: the gradient graph, and the meaning of its inputs and outputs."""

    _graph: Graph
    _forward: Graph
    _inputs: tuple[ExpectedConnection, ...]
    _outputs: tuple[ExpectedConnection, ...]

    def __init__(self) -> None:
        raise TypeError(
            "GradGraphInfo should not be constructed directly. Use GradGraphInfo._from_pb instead."
        )

    @classmethod
    def _from_pb(cls, ir: Ir, forward: Graph, info: BwdGraphInfo) -> GradGraphInfo:
        """PopXL's result for PopART's; `forward` is the graph that was differentiated."""
        connections = [
            [ExpectedConnection._from_pb(forward, each) for each in some]
            for some in (info.expectedInputs, info.expectedOutputs)
        ]
        return cls._create(ir.getGraph(info.bwdGraphId), forward, *connections)

    @property
    def _pb_bwd_info(self) -> BwdGraphInfo:
        """PopART's result."""
        inputs, outputs = ([each._pb_ec for each in some] for some in (self._inputs, self._outputs))
        return BwdGraphInfo(self._graph.id, inputs, outputs)

    @classmethod
    def _create(
        cls,
        graph: Graph,
        forward: Graph,
        inputs: Iterable[ExpectedConnection],
        outputs: Iterable[ExpectedConnection],
    ) -> GradGraphInfo:
        new = object.__new__(cls)
        new._graph, new._forward = graph, forward
        new._inputs, new._outputs = tuple(inputs), tuple(outputs)
        return new

    @property
    def graph(self) -> Graph:
        """The gradient graph."""
        return self._graph

    @property
    def forward_graph(self) -> Graph:
        """The graph that was differentiated."""
        return self._forward

    @property
    def expected_inputs(self) -> tuple[ExpectedConnection, ...]:
        """The meaning of each input of the gradient graph; the gradients provided come first."""
        return self._inputs

    @property
    def expected_outputs(self) -> tuple[ExpectedConnection, ...]:
        """The meaning of each output of the gradient graph: the gradients required."""
        return self._outputs

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The forward tensors of `expected_inputs`."""
        return tuple(connection.fwd_tensor for connection in self._inputs)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The forward tensors of `expected_outputs`."""
        return tuple(connection.fwd_tensor for connection in self._outputs)

    def inputs_dict(self, fwd_call_info: CallSiteInfo) -> dict[Tensor, Tensor]:
        """The inputs of a call of the gradient graph that a call of the forward graph provides.

        They do not include the gradients to start from.

        **Arguments**: `fwd_call_info`: a call of the forward graph, made after `autodiff`.

        **Raises**

        - TypeError: for a call of another graph.
        - ValueError: for a call made before `autodiff`, which lacks outputs.
        """
        if fwd_call_info.called_graph != self.forward_graph:
            raise TypeError("The called graph does not match the graph that was differentiated.")
        return {
            self.graph.inputs[index]: fwd_call_info.graph_to_parent(connection.fwd_tensor)
            for index, connection in enumerate(self.expected_inputs)
            if connection.connection_type is ExpectedConnectionType.Fwd
        }

    def fwd_graph_ins_to_grad_parent_outs(
        self, grad_call_info: CallSiteInfo
    ) -> dict[Tensor, Tensor]:
        """From inputs of the forward graph to their gradients, at a call of the gradient graph."""
        return {
            tensor: grad_call_info.graph_to_parent(self.graph.outputs[index])
            for index, tensor in enumerate(self.outputs)
        }

    def fwd_parent_ins_to_grad_parent_outs(
        self, fwd_call_info: CallSiteInfo, grad_call_info: CallSiteInfo
    ) -> dict[Tensor, Tensor]:
        """From the inputs of a call of the forward graph to their gradients, at another call."""
        return {
            fwd_call_info.graph_to_parent(tensor): gradient
            for tensor, gradient in self.fwd_graph_ins_to_grad_parent_outs(grad_call_info).items()
        }

    def __repr__(self) -> str:
        def listed(connections: Sequence[ExpectedConnection]) -> str:
            return "".join(f"    {connection}\n" for connection in connections)

        return (
            f"GradGraphInfo[\n  graph={self.graph.id}\n"
            f"  expected_inputs=[\n{listed(self._inputs)}  ]\n"
            f"  expected_outputs=[\n{listed(self._outputs)}  ]\n]"
        )


def autodiff(
    graph: Graph,
    grads_provided: Iterable[Tensor] | None = None,
    grads_required: Iterable[Tensor] | None = None,
    called_graphs_grad_info: Mapping[Graph, GradGraphInfo] | None = None,
    return_all_grad_graphs: bool = False,
) -> Any:
    """Make a graph that computes the gradients of a graph's inputs from those of its outputs.

    Tensors of `graph` that gradients need become outputs of it, if they are neither inputs nor
    outputs; so call the graph after this. Graphs that it calls are differentiated as well, and
    calls in it get the new outputs. The gradient of a repeat, and of the taken branch of a
    conditional, runs it again before it runs backwards.

    **Arguments**

    - `grads_provided`: the outputs whose gradients there will be, by default all.
    - `grads_required`: the inputs whose gradients to compute, by default all of floating-point
      dtype. If no output depends on one, its gradient is zero.
    - `called_graphs_grad_info`: existing gradient graphs of called graphs.
    - `return_all_grad_graphs`: whether to return a dict with the result for each graph.

    **Returns** a GradGraphInfo. Its `expected_inputs` begin with the gradients provided, and its
    `expected_outputs` are the gradients required, in their order.

    **Raises**

    - popart_exception: if the graph changes a tensor in place, if an op on the way has no gradient,
      or if a required gradient is that of integers.
    - ValueError: for tensors that are not outputs and inputs of `graph`.

    >>> import gpusim.popxl as popxl
    >>> ir = popxl.Ir()
    >>> graph = ir.create_graph(lambda x, w: x @ w, popxl.TensorSpec((2, 3), popxl.float32),
    ...                         popxl.TensorSpec((3, 4), popxl.float32))
    >>> info = popxl.transforms.autodiff(graph, grads_required=[graph.inputs[1]])
    >>> [(each.connection_type.name, each.fwd_tensor.name) for each in info.expected_inputs]
    [('FwdGrad', 'matmul_out'), ('Fwd', 'x')]
    >>> [tensor.shape for tensor in info.graph.outputs]
    [(3, 4)]
    """
    existing = {g: _plain(info) for g, info in (called_graphs_grad_info or {}).items()}
    differentiation = Differentiation(existing)
    differentiation.differentiate(graph, grads_provided, grads_required)
    infos = {g: _info(g, plan) for g, plan in differentiation.plans.items()}
    return infos if return_all_grad_graphs else infos[graph]


def _info(forward: Graph, plan: GradientPlan) -> GradGraphInfo:
    """A plan of `_gradients` as the public object."""
    fwd, grad = ExpectedConnectionType.Fwd, ExpectedConnectionType.FwdGrad
    inputs = [ExpectedConnection._create(t, grad if g else fwd) for g, t in plan.inputs]
    outputs = [ExpectedConnection._create(t, grad) for t in plan.outputs]
    return GradGraphInfo._create(plan.graph, forward, inputs, outputs)


def _plain(info: GradGraphInfo) -> GradientPlan:
    """The public object as a plan of `_gradients`."""
    inputs = [
        (each.connection_type is ExpectedConnectionType.FwdGrad, each.fwd_tensor)
        for each in info.expected_inputs
    ]
    return GradientPlan(info.graph, inputs, list(info.outputs))
