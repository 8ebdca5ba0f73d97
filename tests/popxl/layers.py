"""A small library above PopXL, in the manner of those that programs are written with.

Modules with named variables, gradients with accumulation, recomputation by cloning ops, and an
optimizer on shards in remote memory. It works on PopART's graphs, tensors and ops below PopXL's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import gpusim.popart._internal.ir as _ir
import gpusim.popxl as popxl
from gpusim.popxl import ops
from gpusim.popxl.context import (
    _execution_context,
    debug_context_frame_offset,
    get_current_context,
    op_debug_context,
)
from gpusim.popxl.errors import UndefinedValue
from gpusim.popxl.ops.collectives.collectives import CollectiveOps, to_collective_op
from gpusim.popxl.ops.utils import check_in_graph, check_tensor_ipu_and_tile_set
from gpusim.popxl.tensor import HostTensor, host_tensor_types
from gpusim.popxl.transforms.autodiff import (
    ExpectedConnection,
    ExpectedConnectionType,
    GradGraphInfo,
    autodiff,
)

Factory = Callable[[], HostTensor]


class Named(dict[str, popxl.Tensor]):
    """Tensors by name, in the order of their creation."""

    def prefixed(self, prefix: str) -> Named:
        return Named({f"{prefix}.{name}": tensor for name, tensor in self.items()})

    def bind(self, others: Mapping[str, popxl.Tensor]) -> dict[popxl.Tensor, popxl.Tensor]:
        """From these tensors to others of the same names."""
        return {tensor: others[name] for name, tensor in self.items()}


class Module(popxl.Module):
    """A module whose `build` adds variables by name; their values come from factories."""

    def __init__(self) -> None:
        self.inputs, self.factories = Named(), dict[str, Factory]()

    @op_debug_context
    def add(self, name: str, value: Factory, shape: Any, by_ref: bool = False) -> popxl.Tensor:
        with debug_context_frame_offset(1):
            tensor = popxl.graph_input(shape, popxl.float32, name, by_ref=by_ref)
        self.inputs[name], self.factories[name] = tensor, value
        return tensor

    def child(self, name: str, module: Module, *args: Any) -> Any:
        with popxl.name_scope(name):
            result = module.build(*args)
        self.inputs.update(module.inputs.prefixed(name))
        self.factories |= {f"{name}.{key}": value for key, value in module.factories.items()}
        return result

    def create(self, ir: popxl.Ir, *args: Any) -> BoundGraph:
        graph = ir.create_graph(self, *args)
        return BoundGraph(graph, Named(self.inputs))


class Linear(Module):
    """x @ weight + bias."""

    def __init__(self, features: int, rng: np.random.Generator) -> None:
        super().__init__()
        self.features, self.rng = features, rng

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        shape = (x.shape[-1], self.features)
        w = self.add("weight", lambda: self.rng.normal(0, 0.5, shape).astype(np.float32), shape)
        b = self.add("bias", lambda: np.zeros(self.features, np.float32), (self.features,))
        return x @ w + b


class Network(Module):
    """Two layers, and the mean of the squared differences from the targets."""

    def __init__(self, hidden: int, rng: np.random.Generator) -> None:
        super().__init__()
        self.hidden, self.rng = hidden, rng

    def build(self, x: popxl.Tensor, y: popxl.Tensor) -> popxl.Tensor:
        x = ops.tanh(self.child("first", Linear(self.hidden, self.rng), x))
        difference = self.child("second", Linear(y.shape[-1], self.rng), x) - y
        return ops.mean(difference * difference)


class BoundGraph:
    """A graph, and its named inputs."""

    def __init__(self, graph: popxl.Graph, named: Named) -> None:
        self.graph, self.named = popxl.Graph._from_pb(graph._pb_graph), named

    def call(self, *inputs: Any, variables: Mapping[str, popxl.Tensor], **more: Any) -> Any:
        bound = {**self.named.bind(variables), **more.get("inputs_dict", {})}
        check_in_graph(popxl.gcg(), **{k.replace(".", "_"): t for k, t in variables.items()})
        return ops.call_with_info(self.graph, *inputs, inputs_dict=bound)


def initial(value: Factory) -> np.ndarray:
    """The value that a factory makes, an array."""
    made = value()
    assert isinstance(made, host_tensor_types)
    return np.asarray(made, np.float32)


# ---------------------------------------------------------------- gradients


def gradients_of(bound: BoundGraph) -> GradGraphInfo:
    """The gradient graph for all variables."""
    return autodiff(bound.graph, grads_required=list(bound.named.values()))


def accumulated(info: GradGraphInfo, named: Named) -> tuple[GradGraphInfo, Named]:
    """A gradient graph that adds each variable's gradient to an accumulator, an input by reference.

    Its outputs are taken away, and its description is made anew.
    """
    graph, pb, ir = info.forward_graph, info.graph._pb_graph, info.graph.ir
    assert pb.id.str() == info.graph.id == _ir.GraphId(info.graph.id)
    accumulators = Named()
    with info.graph, popxl.in_sequence(False):
        for name, tensor in named.items():
            out = pb.getOutputTensor(0)  # the outputs are in the order of the required gradients
            assert pb.getOutputIndex(out.id) == 0 and pb.getOutputId(0) == out.id
            accumulators[name] = popxl.graph_input(tensor.shape, tensor.dtype, name, by_ref=True)
            ops.var_updates.accumulate_(accumulators[name], out)
            pb.removeOutput(0)
    connections = [
        _ir.ExpectedConnection(each.fwd_tensor.id, each.connection_type)
        for each in info.expected_inputs
    ]
    kinds = [each.type for each in connections]
    assert kinds[0] is _ir.ExpectedConnectionType.FwdGrad is ExpectedConnectionType.FwdGrad
    assert _ir.ExpectedConnectionType.Fwd in kinds[1:]
    again = ExpectedConnection._from_pb(graph, connections[0])
    assert again.fwd_tensor == graph.outputs[0]
    plain = _ir.BwdGraphInfo(_ir.GraphId(info.graph.id), connections, [])
    return GradGraphInfo._from_pb(ir, graph, plain), accumulators


def recomputed(info: GradGraphInfo) -> GradGraphInfo:
    """A gradient graph that takes the forward graph's inputs, and computes the rest again.

    The forward ops are cloned into it, and its inputs for their results give way to the clones'.
    """
    forward, grad = info.forward_graph._pb_graph, info.graph._pb_graph
    own = set(forward.getInputIds())
    ids: dict[str, str] = {}  # of forward tensors, to those of the gradient graph
    for position, each in enumerate(info.expected_inputs):
        if each.connection_type is ExpectedConnectionType.Fwd and each.fwd_tensor.id in own:
            ids[each.fwd_tensor.id] = grad.getInputId(position)
    kept = [
        each
        for each in info.expected_inputs
        if each.connection_type is ExpectedConnectionType.FwdGrad or each.fwd_tensor.id in own
    ]
    users = list(grad.getOpSchedule(True))
    with info.graph, get_context_free():
        for tensor in info.forward_graph.inputs:
            if tensor.id not in ids:
                made = popxl.graph_input(tensor.shape, tensor.dtype, tensor.name)
                ids[tensor.id] = made.id
                kept.append(
                    ExpectedConnection._from_pb(
                        info.forward_graph,
                        _ir.ExpectedConnection(tensor.id, ExpectedConnectionType.Fwd),
                    )
                )
        for constant in info.forward_graph.constants:
            ids[constant.id] = popxl.constant(constant._data, constant.dtype).id
    results = [op for op in forward.getOpSchedule() if op.getOutputTensors()]
    for op in results:
        clone = op.cloneIntoGraph(grad)
        for index, tensor in op.getInputIndexMap().items():
            assert op.hasInput(index) and op.hasInputTensor(tensor)
            clone.connectInTensor(index, ids[tensor.id])
        for index, tensor in op.getOutputIndexMap().items():
            ids[tensor.id] = f"{info.graph.id}/recomputed_{tensor.name}"
            clone.createAndConnectOutTensor(index, ids[tensor.id])
        clone.setup()
        assert [t.spec for t in clone.getOutputTensors()] == [t.spec for t in op.getOutputTensors()]
    replaced = {
        grad.getInputId(position): ids[each.fwd_tensor.id]
        for position, each in enumerate(info.expected_inputs)
        if each not in kept
    }
    for op in users:
        for index, tensor in op.getInputIndexMap().items():
            if tensor.id in replaced:
                op.connectInTensor(index, replaced[tensor.id])
    while len(forward.getOutputIds()) > 1:  # those that autodiff added
        forward.removeOutput(forward.getOutputId(1))
    # the inputs that nothing takes any more
    info.graph._inputs = [t for t in info.graph._inputs if t.id not in replaced]
    grad.removeIsolatedTensors()
    assert not {t.id for t in info.graph.tensors} & set(replaced)
    plain = _ir.BwdGraphInfo(
        _ir.GraphId(info.graph.id),
        [_ir.ExpectedConnection(e.fwd_tensor.id, e.connection_type) for e in kept],
        [_ir.ExpectedConnection(e.fwd_tensor.id, e.connection_type) for e in info.expected_outputs],
    )
    return GradGraphInfo._from_pb(info.graph.ir, info.forward_graph, plain)


def get_context_free() -> Any:
    """Ops in any order that their tensors allow."""
    assert get_current_context().graph is popxl.gcg()
    return popxl.in_sequence(False)


# ---------------------------------------------------------------- variables and the optimizer


class Remote:
    """Variables in remote buffers, whole or in shards over the replicas."""

    def __init__(self, factories: Mapping[str, Factory], sharded: bool) -> None:
        self.variables: dict[str, popxl.Variable] = {}
        self.buffers: dict[str, popxl.RemoteBuffer] = {}
        for name, value in factories.items():
            data = initial(value)
            if sharded:
                buffer = popxl.replica_sharded_buffer(data.shape, popxl.float32)
                new = popxl.remote_replica_sharded_variable
            else:
                buffer = popxl.remote_buffer(data.shape, popxl.float32)
                new = popxl.remote_variable
            self.buffers[name], self.variables[name] = buffer, new(data, buffer, name=name)

    def load(self) -> Named:
        """Each variable's value, or its shard."""
        return Named({name: ops.remote_load(b, 0) for name, b in self.buffers.items()})

    def store(self, values: Mapping[str, popxl.Tensor]) -> None:
        for name, tensor in values.items():
            ops.remote_store(self.buffers[name], 0, tensor)


def gathered(shards: Named) -> Named:
    """The whole tensors of shards."""
    whole = ops.collectives.replicated_all_gather
    return Named({name: whole(t) if t.meta_shape else t for name, t in shards.items()})


def scattered(gradients: Named, like: Named, op: CollectiveOps = "mean") -> Named:
    """The replicas' mean of each gradient, or a shard of it where the weight is one."""
    reduced = Named()
    for name, gradient in gradients.items():
        shard = bool(like[name].meta_shape)
        check_tensor_ipu_and_tile_set(gradient=gradient, like=like[name])
        reduce = (
            ops.collectives.replicated_reduce_scatter
            if shard
            else (ops.collectives.replicated_all_reduce)
        )
        options = {"configure_output_for_replicated_tensor_sharding": True} if shard else {}
        reduced[name] = reduce(gradient, to_collective_op(op), **options)
    return reduced


def momentum_step(weights: Named, state: Named, gradients: Named, rate: float) -> None:
    """SGD with a momentum of 0.9, in place."""
    for name, weight in weights.items():
        ops.var_updates.accumulator_scale_(state[name], 0.9)
        ops.var_updates.accumulate_(state[name], gradients[name])
        ops.scaled_add_(weight, state[name], 1.0, -rate)


def ipu_of(tensor: popxl.Tensor) -> int | None:
    """The IPU of a tensor, None if it is on none."""
    try:
        return popxl.Tensor._from_pb_tensor(tensor._pb_tensor).ipu
    except UndefinedValue:
        return None


def on_upload(build: Callable[[], None]) -> None:
    """Add ops that run when variables have come from the host."""
    with _execution_context(_ir.ExecutionContext.WeightsFromHostFragment), popxl.in_sequence():
        build()


def on_download(build: Callable[[], None]) -> None:
    """Add ops that run before variables go to the host."""
    with _execution_context(_ir.ExecutionContext.WeightsToHostFragment), popxl.in_sequence():
        build()


def walk(graph: popxl.Graph) -> Iterator[_ir.Op]:
    """The ops of a graph and of the graphs that they call."""
    for op in graph._pb_graph.getOps():
        yield op
        for called in op.getCalledGraphs():
            yield from walk(called)
