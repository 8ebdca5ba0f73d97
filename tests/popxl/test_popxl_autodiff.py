"""popxl.transforms: gradient graphs, sums in steps, and merged exchanges."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import gpusim.popxl as popxl
from gpusim.popxl import ops
from gpusim.popxl.exceptions import popart_exception
from gpusim.popxl.transforms import (
    ExpectedConnection,
    ExpectedConnectionType,
    GradGraphInfo,
    autodiff,
    decompose_sum,
    io_tile_exchange,
    merge_exchange,
)
from tests.popxl import popxl_cases
from tests.popxl.popxl_cases import HALF, SINGLE, Case, Floats, Integers

FWD, GRAD = ExpectedConnectionType.Fwd, ExpectedConnectionType.FwdGrad
VECTOR = popxl.TensorSpec((3,), SINGLE)


def op_types(graph):
    return [op.opType() for op in graph._pb_graph.getOps()]


class Linear(popxl.Module):
    def __init__(self) -> None:
        self.W: popxl.Tensor
        self.b: popxl.Tensor

    def build(self, x: popxl.Tensor, features: int) -> popxl.Tensor:
        self.W = popxl.graph_input((x.shape[-1], features), SINGLE, "W")
        self.b = popxl.graph_input((features,), SINGLE, "b")
        return ops.relu(x @ self.W + self.b)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_connections_are_what_was_asked_for_in_that_order(order):
    ir = popxl.Ir()
    module = Linear()
    graph = ir.create_graph(module, popxl.TensorSpec((4, 3), SINGLE), features=2)
    required = [graph.inputs[index] for index in order]
    info = autodiff(graph, grads_required=required)
    assert info.forward_graph == graph and isinstance(info.graph, popxl.Graph)
    assert info.outputs == tuple(required)
    assert [each.connection_type for each in info.expected_outputs] == [GRAD, GRAD]
    first, *others = info.expected_inputs
    assert (first.connection_type, first.fwd_tensor) == (GRAD, graph.outputs[0])
    assert {each.connection_type for each in others} == {FWD}
    ends = {t.id for t in (*graph.inputs, *graph.outputs)}
    assert {t.id for t in info.inputs} <= ends
    assert len(info.graph.inputs) == len(info.expected_inputs)
    assert [t.name for t in info.graph.outputs] == [f"Gradient___{t.name}" for t in required]


def test_what_gradients_need_becomes_an_output_of_the_forward_graph():
    ir = popxl.Ir()
    graph = ir.create_graph(lambda x: ops.exp(ops.exp(x)), VECTOR)
    inner = graph._pb_graph.getOps()[0].outputs[0]
    autodiff(graph)
    assert len(graph.outputs) == 2 and graph.outputs[1] is inner


def test_maps_between_call_sites():
    ir = popxl.Ir()
    module = Linear()
    with ir.main_graph:
        x = popxl.variable(np.ones((4, 3), np.float32), name="data")
        W = popxl.variable(np.ones((3, 2), np.float32), name="weight")
        b = popxl.variable(np.ones(2, np.float32), name="bias")
        graph = ir.create_graph(module, x, features=2)
        info = autodiff(graph, grads_required=[module.W, module.b])
        call = ops.call_with_info(graph, x, inputs_dict={module.W: W, module.b: b})
        assert all(t in info.graph for t in info.inputs_dict(call))
        seed = popxl.constant(np.ones((4, 2), np.float32))
        back = ops.call_with_info(info.graph, seed, inputs_dict=info.inputs_dict(call))
        inside = info.fwd_graph_ins_to_grad_parent_outs(back)
        outside = info.fwd_parent_ins_to_grad_parent_outs(call, back)
    assert list(inside) == [module.W, module.b] and list(outside) == [W, b]
    assert list(inside.values()) == list(outside.values()) == list(back.outputs)
    assert all(t.shape == g.shape for t, g in inside.items())


def test_a_call_of_another_graph_has_no_activations():
    ir = popxl.Ir()
    graph = ir.create_graph(ops.exp, VECTOR)
    other = ir.create_graph(ops.exp, VECTOR)
    info = autodiff(graph)
    with ir.main_graph:
        call = ops.call_with_info(other, popxl.constant(np.ones(3, np.float32)))
        with pytest.raises(TypeError, match="does not match the graph that was differentiated"):
            info.inputs_dict(call)


def test_results_are_not_made_by_hand():
    with pytest.raises(TypeError, match="ExpectedConnection should not be constructed directly"):
        ExpectedConnection()
    with pytest.raises(TypeError, match="GradGraphInfo should not be constructed directly"):
        GradGraphInfo()


def test_the_text_of_a_result_names_its_graph_and_connections():
    info = autodiff(popxl.Ir().create_graph(ops.exp, VECTOR))
    pattern = r"GradGraphInfo\[.*graph=.*expected_inputs=.*expected_outputs=.*\]"
    assert re.match(pattern, repr(info), re.DOTALL)


def modifies_by_operator(a, b):
    a += b
    return a


def modifies_by_gelu(a, b):
    return ops.gelu_(a) + b


def modifies_by_accumulation(a, b):
    return ops.var_updates.accumulate_(a, b, 0.1)


@pytest.mark.parametrize(
    "function", [modifies_by_operator, modifies_by_gelu, modifies_by_accumulation]
)
def test_graphs_that_change_tensors_in_place_are_refused(function):
    ir = popxl.Ir()
    graph = ir.create_graph(function, VECTOR, VECTOR)
    with pytest.raises(popart_exception) as caught:
        autodiff(graph)
    start = f"The graph {function.__name__}_subgraph(0) contains a modifying op"
    assert caught.value.args[0].startswith(start)


def test_views_are_not_changes():
    graph = popxl.Ir().create_graph(lambda a, b: ops.concat_([a, b]), VECTOR, VECTOR)
    assert len(autodiff(graph).expected_outputs) == 2


def test_tensors_that_are_no_inputs_or_outputs_are_refused():
    ir = popxl.Ir()
    graph = ir.create_graph(lambda x: ops.exp(ops.exp(x)), VECTOR)
    inner = graph._pb_graph.getOps()[0].outputs[0]
    with pytest.raises(ValueError, match=r"grads_required: .* is not an input"):
        autodiff(graph, grads_required=[inner])
    with pytest.raises(ValueError, match=r"grads_provided: .* is not an output"):
        autodiff(graph, grads_provided=[inner])


def test_integers_have_no_gradient():
    ir = popxl.Ir()
    indices = popxl.TensorSpec((2,), popxl.int32)
    graph = ir.create_graph(ops.gather, VECTOR, indices)
    assert [t.name for t in autodiff(graph).outputs] == ["t"]
    with pytest.raises(popart_exception, match="it is int32"):
        autodiff(graph, grads_required=[graph.inputs[1]])


def test_an_op_without_a_gradient_on_the_way_is_an_error_that_names_it():
    graph = popxl.Ir().create_graph(lambda t: ops.increment_mod(t, 1.0, 2.0), VECTOR)
    with pytest.raises(popart_exception, match=r"IncrementMod.* has no gradient"):
        autodiff(graph)


def test_the_gradient_graph_has_the_ops_of_the_chain_rule_and_no_others():
    ir = popxl.Ir()
    graph = ir.create_graph(lambda x, w, b: x * w + b, VECTOR, VECTOR, VECTOR)
    _, w, b = graph.inputs
    assert op_types(autodiff(graph, grads_required=[w, b]).graph) == [
        "AddArg0Grad",
        "AddArg1Grad",
        "MulArg1Grad",
    ]


# Values: cases beside PyTorch, as for the ops


def in_graph(function, *specs, inputs=None):
    """A function that calls a graph of another function."""

    def build(*tensors):
        graph = popxl.gcg().ir.create_graph(lambda *given: function(*given), *tensors)
        made = ops.call(graph, *tensors)
        return made[0] if len(made) == 1 else made

    return build


def loss(x, w):
    return ops.sum(ops.tanh(x @ w) * 2.0)


def twice(x, w):
    graph = popxl.gcg().ir.create_graph(lambda x, w: ops.tanh(x @ w), x, w)
    (first,) = ops.call(graph, x, w)
    (second,) = ops.call(graph, first, w)
    return second


def repeated(count):
    def build(x, w, b):
        graph = popxl.gcg().ir.create_graph(lambda x, w, b: ops.tanh(x @ w) * b, x, w, b)
        return ops.repeat(graph, count, x, w, b)[0]

    def reference(x, w, b):
        for _ in range(count):
            x = torch.tanh(x @ w) * b
        return x + 0 * (w.sum() + b.sum())

    return build, reference


def branches(c, x, w):
    ir = popxl.gcg().ir
    then = ir.create_graph(lambda x, w: ops.exp(ops.sin(x)) * w, x, w)
    other = ir.create_graph(lambda w: w * w * w, w)
    return ops.conditional(c, then, other, [x, w], [w])[0]


def of_branches(c, x, w):
    return torch.where(c, torch.exp(torch.sin(x)) * w, w * w * w)


SQUARE = Floats((3, 3), -1, 1)
CASES = [
    Case("a call", in_graph(loss), [Floats((2, 3)), SQUARE],
         lambda x, w: (torch.tanh(x @ w) * 2).sum()),
    Case("a graph called twice", twice, [SQUARE, SQUARE],
         lambda x, w: torch.tanh(torch.tanh(x @ w) @ w)),
    Case("calls within calls", in_graph(in_graph(twice)), [SQUARE, SQUARE],
         lambda x, w: torch.tanh(torch.tanh(x @ w) @ w)),
    *(Case(f"{count} repeats", repeated(count)[0], [SQUARE, SQUARE, Floats((3,))],
           repeated(count)[1], scale=4) for count in (0, 1, 5)),
    Case("a repeat in a call", in_graph(repeated(3)[0]), [SQUARE, SQUARE, Floats((3,))],
         repeated(3)[1], scale=4),
    Case("a conditional", branches, [Integers((), 0, 2, popxl.bool), SQUARE, SQUARE], of_branches),
    Case("a conditional in a call", in_graph(branches),
         [Integers((), 0, 2, popxl.bool), SQUARE, SQUARE], of_branches),
    Case("an output that is an input", lambda x: (x, x * x), [SQUARE], lambda x: (x + 0, x * x)),
    Case("an input that nothing depends on", lambda x, y: ops.exp(x), [SQUARE, Floats((2,))],
         lambda x, y: torch.exp(x)),
    Case("two outputs of one op", lambda x: ops.split(ops.sin(x), 3), [SQUARE],
         lambda x: torch.sin(x).split(1)),
    Case("a constant that the gradient needs",
         lambda x: x * popxl.constant([1.0, 2.0, 3.0], x.dtype), [SQUARE],
         lambda x: x * torch.tensor([1.0, 2.0, 3.0])),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_pytorchs(case):
    popxl_cases.check(case, SINGLE)


def test_gradients_by_finite_differences_of_a_small_network():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 6)), rng.normal(size=(6, 3))
    labels = rng.integers(0, 3, 4, np.int32)

    def value(weights):
        z = x @ weights
        z = z / (1 + np.exp(-z))
        return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(4), labels]))

    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(w.astype(np.float32))
        data, classes = popxl.constant(x.astype(np.float32)), popxl.constant(labels)
        graph = ir.create_graph(
            lambda x, w, i: ops.nll_loss(ops.softmax(ops.swish(x @ w), 1), i), data, v, classes
        )
        info = autodiff(graph, grads_required=[graph.inputs[1]])
        call = ops.call_with_info(graph, data, v, classes)
        (slope,) = ops.call(info.graph, popxl.constant(1.0), inputs_dict=info.inputs_dict(call))
        stream = popxl_cases.stored(slope)
    with popxl.Session(ir) as session:
        found = session.run()[stream]
    step = 1e-5
    for place in np.ndindex(w.shape):
        moved = np.zeros_like(w)
        moved[place] = step
        wanted = (value(w + moved) - value(w - moved)) / (2 * step)
        assert abs(found[place] - wanted) < 1e-5


def test_gradients_provided_are_those_of_the_named_outputs_only():
    ir = popxl.Ir()
    graph = ir.create_graph(lambda x: (ops.sin(x), x * 3.0), VECTOR)
    info = autodiff(graph, grads_provided=[graph.outputs[1]])
    with ir.main_graph:
        call = ops.call_with_info(graph, popxl.constant([0.1, 0.2, 0.3]))
        ones = popxl.constant([1.0, 1.0, 1.0])
        (slope,) = ops.call(info.graph, ones, inputs_dict=info.inputs_dict(call))
        stream = popxl_cases.stored(slope)
    with popxl.Session(ir) as session:
        assert session.run()[stream].tolist() == [3.0, 3.0, 3.0]


def test_known_gradient_graphs_of_called_graphs_are_used():
    ir = popxl.Ir()
    inner = ir.create_graph(lambda x: ops.exp(x), VECTOR)
    known = autodiff(inner)
    graph = ir.create_graph(lambda x: ops.call(inner, x)[0], VECTOR)
    info = autodiff(graph, called_graphs_grad_info={inner: known})
    assert known.graph in info.graph.called_graphs
    everything = autodiff(graph, return_all_grad_graphs=True)
    assert set(everything) == {inner, graph}
    assert everything[inner].forward_graph == inner


def test_known_gradient_graphs_that_make_too_little_are_refused():
    ir = popxl.Ir()
    inner = ir.create_graph(lambda x, y: x * y, VECTOR, VECTOR)
    known = autodiff(inner, grads_required=inner.inputs[:1])
    graph = ir.create_graph(lambda x, y: ops.call(inner, x, y)[0], VECTOR, VECTOR)
    with pytest.raises(popart_exception, match=r"provides the gradients of \['x'\] from"):
        autodiff(graph, called_graphs_grad_info={inner: known})
    autodiff(graph, grads_required=graph.inputs[:1], called_graphs_grad_info={inner: known})


def test_only_gradients_that_are_needed_are_asked_of_called_graphs():
    ir = popxl.Ir()
    inner = ir.create_graph(lambda x, y: (ops.sin(x), ops.increment_mod(y, 1.0, 2.0)), VECTOR,
                            VECTOR)  # fmt: skip
    graph = ir.create_graph(lambda x, y: ops.call(inner, x, y)[0], VECTOR, VECTOR)
    infos = autodiff(graph, grads_required=graph.inputs[:1], return_all_grad_graphs=True)
    assert [t.name for t in infos[inner].outputs] == ["x"]
    assert op_types(infos[inner].graph) == ["SinGrad"]
    assert op_types(infos[graph].graph) == ["Call"]


def test_a_graph_called_for_different_gradients_gets_all_of_them():
    ir = popxl.Ir()

    def both(x, y):
        inner = popxl.gcg().ir.create_graph(lambda x, y: (x * y, ops.sin(y)), x, y)
        product = ops.call(inner, x, y)[0]
        sine = ops.call(inner, popxl.constant(np.ones(3, np.float32)), product)[1]
        return product + sine

    graph = ir.create_graph(both, VECTOR, VECTOR)
    info = autodiff(graph)
    with ir.main_graph:
        x, y = popxl.constant([0.1, 0.2, 0.3]), popxl.constant([2.0, 3.0, 4.0])
        call = ops.call_with_info(graph, x, y)
        ones = popxl.constant([1.0, 1.0, 1.0])
        back = ops.call(info.graph, ones, inputs_dict=info.inputs_dict(call))
        streams = [popxl_cases.stored(t) for t in back]
    with popxl.Session(ir) as session:
        results = session.run()
    x, y = np.array([0.1, 0.2, 0.3]), np.array([2.0, 3.0, 4.0])
    np.testing.assert_allclose(results[streams[0]], y * (1 + np.cos(x * y)), 1e-5)
    np.testing.assert_allclose(results[streams[1]], x * (1 + np.cos(x * y)), 1e-5)


def test_a_repeat_that_uses_streams_has_no_gradient():
    ir = popxl.Ir()
    with ir.main_graph:
        stream = popxl.h2d_stream((3,), SINGLE)
    inner = ir.create_graph(lambda x: x * ops.host_load(stream), VECTOR)
    graph = ir.create_graph(lambda x: ops.repeat(inner, 3, x)[0], VECTOR)
    with pytest.raises(popart_exception, match="uses streams, remote buffers or prints"):
        autodiff(graph)


def test_gradients_lie_on_the_ipus_of_their_ops():
    def staged(x):
        with popxl.ipu(0):
            y = ops.exp(x)
            moved = y.copy_to_ipu(1)
        with popxl.ipu(1):
            return ops.sin(moved)

    graph = popxl.Ir().create_graph(staged, VECTOR)
    made = autodiff(graph).graph._pb_graph.getOps()
    assert [(op.opType(), op.ipu) for op in made] == [
        ("SinGrad", 1),
        ("IpuCopy", 0),
        ("ExpGrad", 0),
    ]


def test_printed_gradients_are_printed(capfd):
    graph = (ir := popxl.Ir()).create_graph(
        lambda x: ops.print_tensor(x, "x", print_gradient=True), VECTOR
    )
    info = autodiff(graph)
    with ir.main_graph:
        call = ops.call_with_info(graph, popxl.constant([1.0, 2.0, 3.0]))
        seed = popxl.constant([4.0, 5.0, 6.0])
        ops.call(info.graph, seed, inputs_dict=info.inputs_dict(call))
    with popxl.Session(ir) as session:
        session.run()
    printed = capfd.readouterr().err
    assert "x: [1. 2. 3.]" in printed and "x_gradient: [4. 5. 6.]" in printed


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["float32", "float16"])
def test_a_sum_of_gradients_has_gradients_itself(dtype):
    """That of two outputs that are the input, f + g; ops of other gradients have none."""

    def second(x, f, g):
        graph = popxl.gir().create_graph(lambda x: (x, x), x)
        first = autodiff(graph).graph
        assert op_types(first) == ["Sum"]
        assert len(autodiff(first).graph.outputs) == 2
        return ops.call(autodiff(first).graph, x)

    case = Case("second", second, [Floats((3,))] * 3, lambda x, f, g: [x, x], differentiable=False)
    popxl_cases.check(case, dtype)
    graph = popxl.Ir().create_graph(lambda x: x * x, VECTOR)
    with pytest.raises(popart_exception, match=r"MulArg.Grad.* has no gradient"):
        autodiff(autodiff(graph).graph)


def test_an_op_makes_all_its_gradients_and_the_graph_gives_those_required():
    channels = popxl.TensorSpec((16,), SINGLE)
    graph = popxl.Ir().create_graph(
        lambda x, w, b: ops.group_norm(x, w, b, 1), popxl.TensorSpec((4, 16), SINGLE), channels,
        channels,
    )  # fmt: skip
    made = autodiff(graph, grads_required=graph.inputs[:1]).graph._pb_graph
    (op,) = made.getOps()
    assert op.opType() == "GroupNormalizationGrad" and not op.isOptimizerOp()
    assert len(op.getOutputTensors()) == 3 and len(op.getInputTensors()) == 5
    assert made.getOutputIds() == [op.getOutputIds()[0]] and len(made.getInputIds()) == 5


# Sums in steps


def test_a_sum_of_n_becomes_zeros_and_n_additions():
    ir = popxl.Ir(replication=2)
    graph = ir.create_graph(lambda x: x * x + ops.sin(x) * x, VECTOR)
    info = autodiff(graph)
    before = op_types(info.graph)
    count = sum(len(op.inputs) for op in info.graph._pb_graph.getOps() if op.opType() == "Sum")
    assert decompose_sum(info.graph) == info.graph
    after = op_types(info.graph)
    sums = before.count("Sum")
    assert sums and "Sum" not in after
    assert (after.count("AddLhsInplace"), after.count("Init")) == (count, sums)
    with ir.main_graph:
        call = ops.call_with_info(graph, popxl.constant([0.1, 0.2, 0.3]))
        ones = popxl.constant([1.0, 1.0, 1.0])
        (slope,) = ops.call(info.graph, ones, inputs_dict=info.inputs_dict(call))
        stream = popxl_cases.stored(slope)
    with popxl.Session(ir, "ipu_model") as session:
        found = session.run()[stream]
    x = np.array([0.1, 0.2, 0.3])
    np.testing.assert_allclose(found, [2 * x + np.cos(x) * x + np.sin(x)] * 2, 1e-6)


# Exchanges


def exchanged(merge, dtype, replicas, one_by_one):
    """A program that loads two tensors and stores one of them and a constant."""
    ir = popxl.Ir(replication=replicas)
    ir.getSessionOptions().oneByOne = one_by_one
    with ir.main_graph, popxl.in_sequence(), merge():
        streams = [popxl.h2d_stream((2,), dtype, name) for name in ("a", "b")]
        tensors = [ops.host_load(stream) for stream in streams]
        out = popxl.d2h_stream((2,), dtype)
        ops.host_store(out, popxl.constant([5.0, 6.0], dtype))
    with ir.main_graph:
        total = popxl_cases.stored(tensors[0] * tensors[1])
    numbers = [np.array([values] * replicas) for values in ([2.0, 3.0], [4.0, 7.0])]
    given = [np.squeeze(array.astype(dtype.as_numpy())) for array in numbers]
    with popxl.Session(ir, "ipu_model") as session:
        results = session.run(dict(zip(streams, given, strict=True)))
    return ir, *(results[stream].reshape(replicas, 2).tolist() for stream in (out, total))


@pytest.mark.parametrize("merge", [merge_exchange, io_tile_exchange])
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["float32", "float16"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_transfers_are_one_op_with_the_same_effect(merge, dtype, replicas, one_by_one):
    ir, stored, total = exchanged(merge, dtype, replicas, one_by_one)
    assert op_types(ir.main_graph).count("MultiExchange") == 1
    assert not {"HostLoad"} & set(op_types(ir.main_graph))
    assert (stored, total) == ([[5.0, 6.0]] * replicas, [[8.0, 21.0]] * replicas)
    assert len(ir.get_all_h2d_streams()) == 2 and len(ir.get_all_d2h_streams()) == 2


def test_only_transfers_made_inside_are_merged():
    ir = popxl.Ir()
    with ir.main_graph:
        ops.host_store(popxl.d2h_stream((), SINGLE), popxl.constant(1.0))
        with merge_exchange():
            ops.host_load(popxl.h2d_stream((), SINGLE), "x")
            ops.host_store(popxl.d2h_stream((), SINGLE), popxl.constant(1.0))
    assert op_types(ir.main_graph) == ["HostStore", "MultiExchange"]


def test_remote_transfers_are_merged_too():
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((2,), SINGLE, 2)
        loaded = popxl.remote_variable(np.array([1.0, 2.0], np.float32), buffer, 0)
        assert loaded.shape == (2,)
        with io_tile_exchange():
            x = ops.remote_load(buffer, 0, "x")
            ops.remote_store(buffer, 1, popxl.constant([3.0, 4.0]))
        stream = popxl_cases.stored(x)
    assert op_types(ir.main_graph)[-2:] == ["MultiExchange", "HostStore"]
    with popxl.Session(ir) as session:
        assert session.run()[stream].tolist() == [1.0, 2.0]


def test_transfers_that_depend_on_each_other_cannot_be_one():
    with popxl.Ir().main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((), SINGLE, 1)
        with pytest.raises(RuntimeError, match="More than one Op remained"):
            with io_tile_exchange():
                x = ops.remote_load(buffer, 0, "x")
                ops.remote_store(buffer, 0, x)
        with io_tile_exchange(verify_overlap=False):
            x = ops.remote_load(buffer, 0, "x")
            ops.remote_store(buffer, 0, x)


@pytest.mark.parametrize("in_order", [False, True])
def test_what_is_computed_between_transfers_keeps_its_order(in_order):
    ir = popxl.Ir()
    with ir.main_graph:
        loads = [popxl.h2d_stream((2,), SINGLE) for _ in range(2)]
        stores = [popxl.d2h_stream((2,), SINGLE) for _ in range(2)]
        with popxl.in_sequence(in_order), merge_exchange():
            x = ops.host_load(loads[0])
            doubled = x + x
            ops.host_store(stores[0], ops.exp(popxl.constant([0.0, 1.0])))
            y = ops.host_load(loads[1])
        ops.host_store(stores[1], doubled * y)
    exchanges = op_types(ir.main_graph).count("MultiExchange")
    assert exchanges == 1  # without an order all three, with one the last two
    with popxl.Session(ir) as session:
        results = session.run({loads[0]: np.array([1.0, 2.0]), loads[1]: np.array([3.0, 4.0])})
    np.testing.assert_allclose(results[stores[0]], np.exp([0.0, 1.0]), 1e-6)
    assert results[stores[1]].tolist() == [6.0, 16.0]
