"""PopART's interface below PopXL: a library above it trains, and each name means what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpusim.popxl as popxl
from gpusim.popart._internal import ir as _ir
from gpusim.popxl import ops
from gpusim.popxl.exceptions import popart_exception
from gpusim.popxl.transforms.autodiff import autodiff
from tests.popxl import layers
from tests.popxl.layers import Named

VECTOR = popxl.TensorSpec((3,), popxl.float32)
FEATURES, HIDDEN, OUT, BATCH = 4, 5, 3, 6


def reference(values: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
    """The loss of the network, and its gradients."""
    a = np.tanh(x @ values["first.weight"] + values["first.bias"])
    difference = a @ values["second.weight"] + values["second.bias"] - y
    d = 2 * difference / difference.size
    da = d @ values["second.weight"].T * (1 - a * a)
    gradients = {
        "first.weight": x.T @ da,
        "first.bias": da.sum(0),
        "second.weight": a.T @ d,
        "second.bias": d.sum(0),
    }
    return (difference**2).mean(), gradients


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_network_trains(replicas: int, recompute: bool, sharded: bool) -> None:
    if sharded and replicas == 1:
        return  # an Ir of one replica has no shards
    rng = np.random.default_rng(0)
    ir = popxl.Ir(replication=replicas)
    assert popxl.Ir._from_pb(ir._pb_ir) is ir
    ir._pb_ir.setPatterns(_ir.patterns.Patterns(_ir.patterns.PatternsLevel.Minimal))
    with ir.main_graph, popxl.in_sequence():
        x_stream = popxl.h2d_stream((BATCH, FEATURES), popxl.float32)
        y_stream = popxl.h2d_stream((BATCH, OUT), popxl.float32)
        x, y = ops.host_load(x_stream), ops.host_load(y_stream)
        network = layers.Network(HIDDEN, rng)
        bound = network.create(ir, x, y)
        factories = network.factories
        weights = layers.Remote(factories, sharded)
        state = layers.Remote(
            {name: lambda v=v: np.zeros_like(v()) for name, v in factories.items()}, sharded
        )
        info = layers.gradients_of(bound)
        if recompute:
            info = layers.recomputed(info)
        info, accumulators = layers.accumulated(info, bound.named)
        held, moments = weights.load(), state.load()
        whole = layers.gathered(held)
        forward = bound.call(x, y, variables=whole)
        zeros = Named({name: ops.init(t.shape, t.dtype) for name, t in whole.items()})
        inputs = {**info.inputs_dict(forward), **accumulators.bind(zeros)}
        ops.call(info.graph, popxl.constant(1.0), inputs_dict=inputs)
        gradients = layers.scattered(zeros, held)
        layers.momentum_step(held, moments, gradients, 0.1)
        weights.store(held)
        state.store(moments)
        loss_stream = popxl.d2h_stream((), popxl.float32)
        ops.host_store(loss_stream, forward.outputs[0])
    for graph in ir._pb_ir.getAllGraphs():
        ir._pb_ir.applyPreAliasPatterns(graph)
        ir._pb_ir.applyInplacePattern(graph)
    if recompute:  # nothing but the loss leaves the forward graph
        assert len(bound.graph.outputs) == 1 == len(forward.outputs)
        assert any("recomputed_" in t.id for t in info.graph.tensors)
    values = {name: v._host.astype(np.float64) for name, v in weights.variables.items()}
    momenta = {name: np.zeros_like(value) for name, value in values.items()}
    losses = []
    with popxl.Session(ir, "ipu_model") as session:
        for _ in range(12):
            given = rng.normal(size=(replicas, BATCH, FEATURES)).astype(np.float32)
            target = np.sin(given[..., :OUT])
            lead = slice(None) if replicas > 1 else 0
            found = session.run({x_stream: given[lead], y_stream: target[lead]})[loss_stream]
            pairs = [reference(values, *pair) for pair in zip(given, target, strict=True)]
            np.testing.assert_allclose(found, np.squeeze([loss for loss, _ in pairs]), 1e-4)
            losses.append(np.mean(found))
            for name in values:
                mean = np.mean([gradient[name] for _, gradient in pairs], axis=0)
                momenta[name] = 0.9 * momenta[name] + mean
                values[name] -= 0.1 * momenta[name]
        for name, variable in weights.variables.items():
            np.testing.assert_allclose(
                session.get_tensor_data(variable), values[name], 1e-4, 1e-5, err_msg=name
            )
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------- tensors


def test_tensors_know_their_ops_and_what_changes_them() -> None:
    ir = popxl.Ir()
    with ir.main_graph as graph, popxl.in_sequence():
        v = popxl.variable([1.0, 2.0, 3.0])
        c = popxl.constant([1.0, 1.0, 1.0])
        view = ops.reshape_(v, (3, 1))
        read = ops.exp(v)
        ops.var_updates.accumulate_(view, ops.reshape(c, (3, 1)))
    *_, first, reshaped, change = graph._pb_graph.getOps()
    assert v._pb_tensor.tensorType() is _ir.TensorType.Variable
    assert c._pb_tensor.tensorType() is _ir.TensorType.Const
    assert read._pb_tensor.tensorType() is _ir.TensorType.ActGrad
    assert read._pb_tensor.getProducer() is first and read._pb_tensor.getGraph() == graph
    assert not v._pb_tensor.hasProducer() and isinstance(v._pb_tensor, _ir.Tensor)
    with pytest.raises(popart_exception, match="No producer for tensor"):
        v._pb_tensor.getProducer()
    full = _ir.view.Region.getFull((3,))
    assert v._pb_tensor.modifiedRegionsByOps([change]) == [full] and not full.isEmpty()
    assert v._pb_tensor.modifiedRegionsByOps([first, reshaped]) == []
    assert read._pb_tensor.modifiedRegionsByOps([change]) == []
    assert _ir.view.Region.getEmpty(1) != full and _ir.view.Region.getEmpty(1).isEmpty()
    assert layers.ipu_of(read) == 0 and layers.ipu_of(popxl_variable(ir)) is None


def popxl_variable(ir: popxl.Ir) -> popxl.Tensor:
    with ir.main_graph:
        return popxl.variable(1.0)


# ---------------------------------------------------------------- ops


def test_ops_know_their_parts() -> None:
    ir = popxl.Ir()
    graph = ir.create_graph(lambda a, b: a * b, VECTOR, VECTOR)
    with ir.main_graph as main:
        x = popxl.constant([1.0, 2.0, 3.0])
        ops.call(graph, x, x)
        ops.repeat(graph, 5, x, x)
        with popxl.ipu(1):
            moved = ops.ipu_copy(ops.exp(x), 2)
        ops.init((2,), popxl.float32)
        ops.host_store(popxl.d2h_stream((3,), popxl.float32), ops.host_load(
            popxl.h2d_stream((3,), popxl.float32)))  # fmt: skip
    call, loop, exp, copy, init, load, store = main._pb_graph.getOpSchedule()
    classes = [_ir.op.CallOp, _ir.op.LoopOp, _ir.Op, _ir.op.IpuCopyOp, _ir.op.InitOp]
    classes += [_ir.op.exchange.HostLoadOp, _ir.op.exchange.HostStoreOp]
    for op, kind in zip((call, loop, exp, copy, init, load, store), classes, strict=True):
        assert isinstance(op, kind)
    assert call.getCalledGraph() == graph == loop.getCalledGraphs()[0]
    assert (loop.getTripCountValue(), loop.getNumExplicitInputs()) == (5, 1)
    assert (copy.getSourceIpu(), copy.getDestIpu(), exp.getVirtualGraphId()) == (1, 2, 1)
    assert copy.outTensor(0) is moved and exp.inTensor(0) is x
    assert exp.hasInput(0) and not exp.hasInput(1) and exp.hasOutput(0) and not store.hasOutput(0)
    assert exp.hasInputTensor(x) and not copy.hasInputTensor(x)
    assert exp.getInputIndexMap() == {0: x} and copy.getOutputIndexMap() == {0: moved}
    for op in main._pb_graph.getOpSchedule():
        assert hasattr(op, "getCalledGraph") == (op in (call, loop)) == bool(op.getCalledGraphs())
    exp.setAvailableMemoryProportion(0.3)
    exp.setUseFullyConnectedPass(False)
    exp.setConvOptions({"partialsType": "half"})
    assert exp.getConvOptions() == {"partialsType": "half"}


def result_of(ir: popxl.Ir, stream: popxl.DeviceToHostStream) -> list[float]:
    with popxl.Session(ir, "ipu_model") as session:
        return session.run()[stream].tolist()


def test_reconnected_ops_compute_something_else() -> None:
    """An op's input gives way to a clone's result, which is made after the op."""
    ir = popxl.Ir()
    with ir.main_graph as main:
        x = popxl.constant([1.0, 2.0, 3.0])
        y = ops.add(ops.exp(x), x)
        stream = popxl.d2h_stream((3,), popxl.float32)
        ops.host_store(stream, y)
        ops.mul(x, x)
    pb = main._pb_graph
    exp, add, _, product = pb.getOps()
    clone = product.cloneIntoGraph(pb)
    for index, tensor in product.getInputIndexMap().items():
        clone.connectInTensor(index, tensor.id)
    clone.setup()
    add.connectInTensor(0, clone.outTensor(0).id)
    order = pb.getOpSchedule()
    assert order.index(clone) < order.index(add)
    pb.eraseOp(exp.id)
    pb.removeIsolatedTensors()
    assert exp.getOutputTensors() == [] and len(pb.getOps()) == 4
    assert result_of(ir, stream) == [2.0, 6.0, 12.0]
    clone.disconnectAllInputs()
    clone.connectInTensor(0, x.id)
    with pytest.raises(popart_exception, match="depends on itself"):
        clone.connectInTensor(1, y.id)
    with pytest.raises(IndexError, match="has 2 inputs, got index 5"):
        clone.connectInTensor(5, x.id)


def test_outputs_move_to_another_op() -> None:
    ir = popxl.Ir()
    with ir.main_graph as main:
        x = popxl.constant([4.0, 9.0])
        y = ops.exp(x)
        stream = popxl.d2h_stream((2,), popxl.float32)
        ops.host_store(stream, y)
        ops.sqrt(x)
    exp, _, sqrt = main._pb_graph.getOps()
    exp.disconnectAllOutputs()
    assert not y._pb_tensor.hasProducer()
    sqrt.disconnectAllOutputs()
    sqrt.connectOutTensor(0, y.id)
    sqrt.setup()
    assert y._pb_tensor.getProducer() is sqrt
    assert result_of(ir, stream) == [2.0, 3.0]
    with pytest.raises(popart_exception, match="cannot be output 1"):
        sqrt.connectOutTensor(1, y.id)
    with pytest.raises(popart_exception, match="the id is taken"):
        sqrt.createAndConnectOutTensor(1, y.id)


# ---------------------------------------------------------------- graphs


def test_graphs_know_their_inputs_and_outputs_by_id_and_index() -> None:
    graph = popxl.Ir().create_graph(lambda a, b: (a * b, a + b), VECTOR, VECTOR)
    pb = graph._pb_graph
    assert isinstance(pb, _ir.Graph) and pb.id.str() == graph.id
    for index, tensor in enumerate(graph.inputs):
        assert (pb.getInputId(index), pb.getInputIndex(tensor.id)) == (tensor.id, index)
        assert pb.getInputTensor(index) is tensor
    assert pb.getOutputIndex(graph.outputs[1].id) == 1
    with pytest.raises(popart_exception, match="There is no input"):
        pb.getInputIndex(graph.outputs[0].id)
    with pytest.raises(popart_exception, match="There is no op -1"):
        pb.eraseOp(-1)
    pb.removeOutput(0)
    assert [t.name for t in graph.outputs] == ["add_out"]


@pytest.mark.parametrize(
    ("indices", "left"),
    [([0, 1, 2, 3], []), ([1, 3], [0, 2]), ([0, 3], [1, 2]), ([2, 3, 7], [0]), ([4], [0, 1, 2])],
)
def test_an_index_past_the_end_removes_the_last_output(indices: list[int], left: list[int]) -> None:
    graph = popxl.Ir().create_graph(lambda a, b: (a * b, a + b, a - b, b), VECTOR, VECTOR)
    outputs = list(graph.outputs)
    for index in indices:
        graph._pb_graph.removeOutput(index)
    assert list(graph.outputs) == [outputs[index] for index in left]


def test_outputs_that_are_not_there_are_not_removed() -> None:
    graph = popxl.Ir().create_graph(lambda a: (a, a * a), VECTOR)
    with pytest.raises(popart_exception, match=r"removeOutput\(-1\): graph .* has 2 outputs"):
        graph._pb_graph.removeOutput(-1)
    for _ in range(2):
        graph._pb_graph.removeOutput(0)
    with pytest.raises(popart_exception, match=r"removeOutput\(0\): graph .* has 0 outputs"):
        graph._pb_graph.removeOutput(0)


def test_orders_are_inserted_and_taken_back() -> None:
    ir = popxl.Ir()
    with ir.main_graph as main:
        v = popxl.variable([1.0])
        y = popxl.d2h_stream((1,), popxl.float32)
        ops.host_store(y, v + 0.0)
        ops.var_updates.accumulate_(v, popxl.constant([1.0]))
    read, store, change = main._pb_graph.getOps()
    with pytest.raises(popart_exception, match="Inplacing ambiguity"):
        popxl.Session(ir)
    order = main._pb_graph.topoCons
    order().insert(change, read)
    assert order.contains(change, read) and order.getBefores(read) == [change]
    assert order.getAfters(change) == [read] and isinstance(order, _ir.TopoCons)
    assert main._pb_graph.getOpSchedule() == [change, read, store]
    assert result_of(ir, y) == [2.0]
    order.remove(change, read)
    order.insert(read, change)
    assert result_of(ir, y) == [2.0]  # the variable's value after the first session
    order.remove(read)
    assert not order.contains(read, change)


def test_a_graph_may_not_be_differentiated_for_its_caller() -> None:
    ir = popxl.Ir()
    inner = ir.create_graph(lambda x: ops.exp(x), VECTOR)
    graph = ir.create_graph(lambda x: ops.call(inner, x)[0], VECTOR)
    inner._pb_graph.setCanBeRecursivelyAutodiffed(False)
    with pytest.raises(popart_exception, match="is not to be differentiated for its caller"):
        autodiff(graph)
    autodiff(graph, called_graphs_grad_info={inner: autodiff(inner)})


# ---------------------------------------------------------------- times of execution


def test_ops_run_when_variables_are_transferred() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        v, seen = popxl.variable([1.0, 2.0]), popxl.variable([0.0, 0.0])
        layers.on_upload(lambda: ops.var_updates.accumulate_(v, popxl.constant([10.0, 10.0])))
        ops.var_updates.accumulate_(v, popxl.constant([1.0, 1.0]))
        layers.on_download(lambda: ops.var_updates.copy_var_update_(seen, v))
        with pytest.raises(NotImplementedError, match="OptimizerFromHostFragment"):
            with layers._execution_context(_ir.ExecutionContext.OptimizerFromHostFragment):
                pass
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
        session.run()
        assert session.get_tensor_data(v).tolist() == [13, 14]
        assert session.get_tensor_data(seen).tolist() == [13, 14]
        session.weights_from_host()
        session.weights_to_host()
        assert session.get_tensor_data(v).tolist() == [23, 24]
    with ir.main_graph, popxl.in_sequence():
        with layers._execution_context(_ir.ExecutionContext.WeightsFromHostFragment):
            early = v + 1.0
        ops.host_store(popxl.d2h_stream((2,), popxl.float32), early)
    with pytest.raises(popart_exception, match=r"uses a result of .* which runs in"):
        popxl.Session(ir, "ipu_model")


def test_all_ops_are_walked() -> None:
    ir = popxl.Ir()
    graph = ir.create_graph(lambda x: ops.exp(x), VECTOR)
    with ir.main_graph as main:
        ops.call(graph, popxl.constant([1.0, 2.0, 3.0]))
    assert [op.opType() for op in layers.walk(main)] == ["Call", "Exp"]
