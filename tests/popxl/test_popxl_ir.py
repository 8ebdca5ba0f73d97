"""popxl's Ir, graphs, tensors and contexts: what they are, and what they refuse."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

import gpusim.popxl as popxl
from gpusim.popxl import dtypes, ops
from gpusim.popxl.context import get_source_location
from gpusim.popxl.utils import to_numpy

VECTOR = popxl.TensorSpec((3,), popxl.float32)


def names(tensors: object) -> list[str]:
    return [tensor.name for tensor in tensors]


# ---------------------------------------------------------------- Ir


def test_an_ir_has_a_main_graph_and_an_id_of_its_own() -> None:
    first, second = popxl.Ir(), popxl.Ir()
    assert first.main_graph.ir == first and first.main_graph.main_graph == first.main_graph
    assert first.main_graph.id == "" and first.id != second.id and first != second
    with pytest.raises(TypeError, match=r"Value must be of type popxl\.Ir\. Type: .*int"):
        first == 3  # noqa: B015 the comparison is what raises


def test_replication_can_be_set_until_there_is_a_session() -> None:
    ir = popxl.Ir(replication=2)
    ir.replication_factor = 4
    assert ir.replication_factor == ir.instance_replication_factor == 4
    with ir.main_graph:
        ops.host_store(popxl.d2h_stream((), popxl.float32), popxl.constant(1.0))
    popxl.Session(ir, "ipu_model")
    with pytest.raises(RuntimeError, match=f"The `Ir` {ir.id} is already prepared"):
        ir.replication_factor = 2


def test_a_session_that_could_not_be_made_leaves_the_replication_open() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        each = popxl.variable([1.0, 2.0], replica_grouping=ir.replica_grouping(1, 1))
        ops.add_(each, popxl.constant(1.0))
    ir.replication_factor = 4
    with pytest.raises(RuntimeError, match="groups of 2 replicas, but there are 4 now"):
        popxl.Session(ir, "ipu_model")
    ir.replication_factor = 2
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
    assert session.get_tensor_data(each).tolist() == [2.0, 3.0]


def test_what_was_made_for_all_replicas_is_for_as_many_as_there_are_in_the_end() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        y = popxl.d2h_stream((), popxl.float32)
        v = popxl.variable(1.0)
        ops.host_store(y, ops.collectives.replicated_all_reduce(v))
        ir.replication_factor = 4
        with popxl.Session(ir, "ipu_model") as session:
            assert session.run()[y].tolist() == [4] * 4
    assert v.replica_grouping.group_size == 4


@pytest.mark.parametrize("of", ["a variable", "a collective"])
def test_what_was_made_for_groups_cannot_serve_other_numbers_of_replicas(of: str) -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        single = ir.replica_grouping(1, 1)
        if of == "a variable":
            v = popxl.variable([1.0, 2.0], replica_grouping=single)
        else:
            v = ops.collectives.replicated_all_reduce(popxl.constant(1.0), group=single)
        ops.host_store(popxl.d2h_stream((), popxl.float32), v)
    ir.replication_factor = 4
    with pytest.raises(RuntimeError, match=r"2 replicas, but there are 4 now"):
        popxl.Session(ir, "ipu_model")


@pytest.mark.parametrize("given", [0, -1, "popdust", 1.5])
def test_replication_is_a_positive_number_or_popdist(given: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        popxl.Ir(replication=given)


def test_popdist_says_how_many_replicas_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TOTAL": 4, "LOCAL": 2}.items():
        monkeypatch.setenv(f"POPDIST_NUM_{name}_REPLICAS", str(value))
    monkeypatch.setenv("POPDIST_REPLICA_INDEX_OFFSET", "2")
    ir = popxl.Ir(replication="popdist")
    assert (ir.replication_factor, ir.instance_replication_factor) == (4, 2)
    assert ir.getSessionOptions().globalReplicaOffset == 2


def test_num_host_transfers_is_1_unless_set() -> None:
    ir = popxl.Ir()
    assert ir.num_host_transfers == 1
    ir.num_host_transfers = 7
    assert ir.num_host_transfers == 7
    with pytest.raises(ValueError, match="num_host_transfers"):
        ir.num_host_transfers = 0


def test_streams_count_once_an_op_uses_them_in_any_graph() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x, y = popxl.h2d_stream((3,), popxl.float32, "x"), popxl.d2h_stream((3,), popxl.float32)
        popxl.h2d_stream((3,), popxl.float32, "unused")
        assert ir.get_all_h2d_streams() == ir.get_all_d2h_streams() == set()
        ir.create_graph(lambda: ops.host_store(y, ops.host_load(x)))
    assert (ir.get_all_h2d_streams(), ir.get_all_d2h_streams()) == ({x}, {y})
    with pytest.raises(NotImplementedError, match="Use `h2d_stream` or `d2h_stream`"):
        popxl.HostToDeviceStream()


# ---------------------------------------------------------------- replica groupings


@pytest.mark.parametrize(
    ("stride", "size", "assignment"),
    [
        (1, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
        (1, 4, [0, 0, 0, 0, 1, 1, 1, 1]),
        (2, 4, [0, 1, 0, 1, 0, 1, 0, 1]),
        (4, 2, [0, 1, 2, 3, 0, 1, 2, 3]),
        (2, 2, [0, 1, 0, 1, 2, 3, 2, 3]),
        (1, None, [0] * 8),
        (4, None, [0, 1, 2, 3, 0, 1, 2, 3]),
    ],
)
def test_replica_grouping_by_stride_and_size(
    stride: int, size: int | None, assignment: list[int]
) -> None:
    ir = popxl.Ir(replication=8)
    grouping = ir.replica_grouping(stride, size)
    assert grouping.assignment == assignment and grouping.is_const
    assert grouping == ir.replica_grouping_from_assignments(assignment)
    assert grouping.num_groups * grouping.group_size == 8
    assert grouping.transpose().transpose() == grouping
    assert grouping.const_rg is grouping
    assert grouping.to_device_map is None and grouping.to_host_map is None
    expected = size or 8 // stride
    assert repr(grouping) == (
        f"ReplicaGrouping(num_replicas=8, stride={stride}, group_size={expected}, "
        f"num_groups={8 // expected})"
    )


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ([0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3]),
        (
            [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 2, 3, 2, 3],
            [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7],
        ),
        ([0, 1, 1, 0, 0, 1, 1, 0], list(range(8))),
        ([0, 1, 2, 3, 1, 2, 3, 0], list(range(8))),
        ([0, 1, 0, 0, 1, 1, 0, 1], list(range(8))),
    ],
)
def test_groups_of_varying_strides_are_split_into_parts_of_one(
    assignment: list[int], parts: list[int]
) -> None:
    ir = popxl.Ir(replication=len(assignment))
    grouping = ir.replica_grouping_from_assignments(assignment)
    assert not grouping.is_const and grouping.const_rg.is_const
    assert grouping.const_rg.assignment == parts
    to_device, to_host = grouping.to_device_map, grouping.to_host_map
    assert [to_device[part] for part in parts] == assignment
    assert [to_device[part] for part in to_host] == list(range(grouping.num_groups))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "Stride must be greater than zero and less than or equal to number of replicas. "
         "Stride: 0. Replicas: 6"),
        ((7,), "Stride must be greater than zero"),
        ((4,), "Stride must be a factor of the number of replicas. Stride: 4. Replicas: 6"),
        ((1, 0), "Group size must be greater than zero and less than or equal to number of "
         "replicas. Group size: 0. Replicas: 6"),
        ((1, 7), "Group size must be greater than zero"),
        ((1, 4), "factor"),
        ((3, 6), "factor"),
    ],
)  # fmt: skip
def test_replica_groupings_divide_the_replicas(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        popxl.Ir(replication=6).replica_grouping(*arguments)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ([0, 0, 1], "The length of `assignment` (3) does not equal the number of replicas (4)."),
        ([0, 0, 0, 1], "All groups should have the same size but they dont. (Group, Sizes): "
         "[(0, 3), (1, 1)]"),
        ([0, 0, 2, 2], "do not start at 0. Groups: [0, 2]"),
        ([1, 1, 0, 0], "When ordered by first appearance, the group numbers are not monotonically "
         "increasing. Ordering: [1, 0]"),
    ],
)  # fmt: skip
def test_assignments_number_groups_as_they_appear(assignment: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        popxl.Ir(replication=4).replica_grouping_from_assignments(assignment)


def test_groups_without_one_stride_serve_no_collective() -> None:
    ir = popxl.Ir(replication=6)
    grouping = ir.replica_grouping_from_assignments([0, 1, 0, 0, 1, 1])
    assert not grouping.is_const and grouping.num_groups == 2
    with pytest.raises(NotImplementedError, match="non-constant stride"):
        grouping.stride  # noqa: B018 asking is what raises
    assert grouping.const_rg.num_groups == 6
    values = np.array([10, 20])
    on_device = values[grouping.to_device_map]
    assert on_device.tolist() == [10, 20, 10, 10, 20, 20]
    assert (on_device[grouping.to_host_map] == values).all()
    with ir.main_graph, pytest.raises(NotImplementedError, match="non-constant stride"):
        ops.collectives.replicated_all_reduce(popxl.constant(1.0), group=grouping)
    with pytest.raises(RuntimeError, match="cannot be constructed directly"):
        popxl.ReplicaGrouping()
    with pytest.raises(TypeError, match=r"Value must be of type popxl\.ReplicaGrouping"):
        grouping == 1  # noqa: B015 the comparison is what raises


# ---------------------------------------------------------------- create_graph


def test_inputs_are_the_signatures_tensors_then_those_of_graph_input() -> None:
    def function(a, b, *rest, scale, factor=2.0, **more):
        assert (scale, factor) == (0.5, 2.0)
        extra = popxl.graph_input((), popxl.int32, "extra")
        assert isinstance(rest, tuple) and set(more) == {"named"} and isinstance(b, list)
        return a, extra

    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.constant([1.0, 2.0])
    graph = ir.create_graph(function, x, [VECTOR, VECTOR], VECTOR, scale=0.5, named=x)
    assert names(graph.inputs) == ["a", "b_0", "b_1", "rest_0", "named", "extra"]
    assert names(graph.outputs) == ["a", "extra"]
    assert [tensor.shape for tensor in graph.inputs] == [(2,), (3,), (3,), (3,), (2,), ()]
    assert list(graph.inputs_by_name) == names(graph.inputs)


def test_graphs_are_named_after_functions_and_modules() -> None:
    class Layer(popxl.Module):
        def build(self, x: popxl.Tensor) -> popxl.Tensor:
            self.weight = popxl.graph_input(x.shape, x.dtype, "weight")
            return x * self.weight

    def layer(x: popxl.Tensor) -> popxl.Tensor:
        return x

    ir, module = popxl.Ir(), Layer()
    graphs = [ir.create_graph(what, VECTOR) for what in (layer, layer, module)]
    stem = "test_graphs_are_named_after_functions_and_modules"
    assert [graph.id for graph in graphs] == [
        f"{stem}.layer_subgraph(0)",
        f"{stem}.layer_subgraph(1)",
        f"{stem}.Layer_subgraph(0)",
    ]
    assert module.weight == graphs[2].inputs[1] and module.weight in graphs[2]
    assert ir.create_empty_graph().id == "graph_subgraph(0)"
    assert ir.create_empty_graph("mine").id == "mine_subgraph(0)"
    assert ir.getAllGraphs()[0] == ir.main_graph and len(ir.getAllGraphs()) == 6


@pytest.mark.parametrize("value", [None, [], iter(())])
def test_a_graph_may_return_nothing(value: object) -> None:
    assert popxl.Ir().create_graph(lambda: value).outputs == ()


def test_what_create_graph_refuses() -> None:
    ir = popxl.Ir()
    create = ir.create_graph
    with pytest.raises(TypeError, match="must be either a function or a class that extends"):
        create(3)
    with pytest.raises(TypeError, match="must be either a function or a class that extends"):
        create(popxl.Module)
    with pytest.raises(ValueError, match="do not match the signature of the function `fn`"):
        create(lambda x: x, VECTOR, VECTOR)
    for arguments in (([VECTOR, 3],), ((3, VECTOR),)):
        with pytest.raises(TypeError, match="can't contain a mixture of Tensors and other types"):
            create(lambda x: None, *arguments)
    with pytest.raises(TypeError, match=r"mixture .* Arg name: kw"):
        create(lambda **kw: None, a=VECTOR, b=1)
    with pytest.raises(TypeError, match=r"mixture .* Arg name: each"):
        create(lambda *each: None, VECTOR, 1)
    for output in (3, [3], "x"):
        with pytest.raises(ValueError, match="Output of subgraph must be None, a Tensor or an"):
            create(lambda x, output=output: output, VECTOR)
    with pytest.raises(NotImplementedError, match="must override `build` method"):
        create(popxl.Module())


def test_inputs_are_by_reference_where_the_annotation_says_so() -> None:
    def function(
        a: popxl.TensorByRef, b: popxl.Tensor, c: list[popxl.TensorByRef], d: popxl.Tensor | None
    ) -> None: ...

    graph = popxl.Ir().create_graph(function, VECTOR, VECTOR, [VECTOR], VECTOR)
    assert [tensor._by_ref for tensor in graph.inputs] == [True, False, True, False]
    with pytest.raises(NotImplementedError, match="TensorByRef should only be used as an annot"):
        popxl.TensorByRef()


# ---------------------------------------------------------------- Graph


def test_a_graph_knows_its_tensors() -> None:
    ir = popxl.Ir()
    with ir.main_graph as main:
        one, v = popxl.constant(1.0, name="one"), popxl.variable(2.0, name="v")
        graph = ir.create_graph(lambda x: x + 1.0, v)
        (out,) = ops.call(graph, v)
        ops.call(graph, one)
    assert main.constants == (one,) and main.variables == (v,)
    assert main.tensors[:3] == (one, v, out) and main.get_tensor("one") == one
    assert main.called_graphs == (graph,) and graph.called_graphs == ()
    assert [op.opType() for op in main._pb_graph.getOps()] == ["Call", "Call"]
    assert v in main and v not in graph
    with pytest.raises(ValueError, match="no tensor with the id nothing"):
        main.get_tensor("nothing")
    with pytest.raises(TypeError, match=r"Value must be of type popxl\.Tensor"):
        3 in main  # noqa: B015 asking is what raises
    with pytest.raises(TypeError, match=r"Value must be of type popxl\.Graph"):
        main == 3  # noqa: B015 the comparison is what raises
    with pytest.raises(TypeError, match="using the constructor"):
        popxl.Graph()


def test_hooks_see_every_op_of_their_graph_or_of_all() -> None:
    ir = popxl.Ir()
    seen: list[str] = []
    handle = ir.main_graph.register_op_created_hook(lambda op: seen.append(op.opType()))
    context = popxl.get_current_context()
    everywhere = context.register_op_created_hook(lambda op: seen.append(f"any {op.opType()}"))
    with ir.main_graph:
        a = popxl.constant(1.0)
        ops.add(a, a)
        ir.create_graph(lambda x: ops.exp(x), a)
        ir.main_graph.remove_op_created_hook(handle)
        context.remove_op_created_hook(everywhere)
        ops.sub(a, a)
    assert seen == ["any Add", "Add", "any Exp"] or seen == ["Add", "any Add", "any Exp"]
    for owner in (ir.main_graph, context):
        with pytest.raises(ValueError, match=f"Unknown op created hook {handle}"):
            owner.remove_op_created_hook(handle)


def test_op_classes_are_by_type() -> None:
    from gpusim.popart._internal import ir as _ir

    ir = popxl.Ir()
    with ir.main_graph:
        ops.add(popxl.constant(1.0), popxl.constant(2.0))
    (op,) = ir.main_graph.getOps()
    assert isinstance(op, _ir.op.AddOp) and isinstance(op, _ir.Op)
    assert not isinstance(op, _ir.op.SubtractOp)
    with ir.main_graph:
        ops.sub(popxl.constant(1.0), popxl.constant(2.0))
    sub = ir.main_graph.getOps()[-1]
    assert sub.opType() == "Sub" and isinstance(sub, _ir.op.SubtractOp)
    assert op.getInputIds() == ["t", "t__t0"] and op.getOutputIds() == ["add_out"]


# ---------------------------------------------------------------- contexts


def test_outside_of_a_graph_nothing_can_be_made() -> None:
    hint = "no graph has been selected. Hint - try performing the operations in a context manager"
    for ask in (popxl.gcg, popxl.gmg, popxl.gir, lambda: popxl.constant(1.0)):
        with pytest.raises(RuntimeError, match=hint):
            ask()


def test_the_current_graph_is_the_innermost() -> None:
    ir, other = popxl.Ir(), popxl.Ir()
    inner = ir.create_empty_graph()
    with ir.main_graph:
        with inner:
            assert popxl.gcg() == inner and popxl.gmg() == ir.main_graph and popxl.gir() == ir
        assert popxl.gcg() == ir.main_graph
        with pytest.raises(RuntimeError, match="previous context's Ir is different"):
            other.main_graph.__enter__()


def test_name_scopes_begin_names() -> None:
    ir = popxl.Ir()
    graph = ir.create_empty_graph("g")
    with graph, popxl.name_scope("outer"), popxl.name_scope("inner"):
        x = popxl.graph_input((), popxl.float32, "x")
        again = popxl.graph_input((), popxl.float32, "x")
    assert (x.id, x.name, x.scope) == (
        "g_subgraph(0)/outer/inner/x",
        "outer/inner/x",
        "g_subgraph(0)",
    )
    assert again.id == "g_subgraph(0)/outer/inner/x__t0"
    with ir.main_graph, popxl.name_scope("foo"):
        for made in (popxl.variable(1.0, name="bar"), popxl.constant(1.0, name="baz")):
            assert made.name == made.id in ("foo/bar", "foo/baz") and made.scope == ""
        (called,) = ops.call(ir.create_graph(lambda x: ops.exp(x), made), made)
        assert called.name.startswith("foo/") and called.scope == ""


def test_ops_are_where_the_contexts_put_them() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        a = popxl.constant(1.0)
        with pytest.raises(popxl.errors.UndefinedValue, match="IPU is undefined"):
            a.ipu  # noqa: B018 asking is what raises
        with pytest.raises(popxl.errors.UndefinedValue, match="tile set is undefined"):
            a.tile_set  # noqa: B018
        with popxl.ipu(3), popxl.io_tiles():
            b = ops.exp(a)
        assert (b.ipu, b.tile_set, a.ipu) == (3, "io", 3)
        assert ops.exp(b).tile_set == "compute"
        v = popxl.variable(1.0)
        with pytest.raises(popxl.errors.UndefinedValue, match="IPU is undefined"):
            v.ipu  # noqa: B018
        outside = v + 0.0
        assert (outside.ipu, v.ipu) == (0, 0)
        with popxl.ipu(1):
            other = v + 1.0
            text = r"`lhs` and `rhs` are located on different IPUs: 0 != 1"
            with pytest.raises(ValueError, match=text):
                outside + other


def test_in_sequence_orders_the_ops_of_a_graph() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        a = popxl.constant(1.0)
        with popxl.in_sequence():
            ops.exp(a)
            with popxl.in_sequence(False):
                ops.exp(a)
            with popxl.in_sequence("pass"):
                ops.exp(a)
        ops.exp(a)
        with pytest.raises(TypeError, match="Try `False` instead"), popxl.in_sequence(None):
            pass
        with pytest.raises(ValueError, match="mode not understood: often"):
            with popxl.in_sequence("often"):
                pass
    first, free, second, last = ir.main_graph.getOps()
    assert (second.after, free.after, last.after) == ([first], [], [])
    context = popxl.get_current_context()
    with pytest.raises(AttributeError, match="Cannot delete in_sequence"):
        del context.in_sequence


def test_ops_know_the_line_that_made_them() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        ops.exp(popxl.constant(1.0))
    location = ir.main_graph.getOps()[0].location
    assert location is not None and Path(location[0]) == Path(__file__)
    assert Path(get_source_location(0)[0]) == Path(__file__)
    with pytest.raises(IndexError, match="Incorrect source location offset"):
        get_source_location(10_000)


# ---------------------------------------------------------------- tensors


def test_a_tensor_has_a_shape_but_no_values() -> None:
    with popxl.Ir(replication=2).main_graph:
        t = popxl.variable(np.zeros((2, 3), np.float16), name="t")
    assert (t.shape, t.dtype, t.rank, t.nelms, t.meta_shape) == ((2, 3), popxl.float16, 2, 6, ())
    assert (t.strides(), t.strides((4, 5, 6)), len(t)) == ((6, 2), (60, 12, 2), 2)
    assert t.spec == popxl.TensorSpec((2, 3), popxl.float16) and dict(**t.spec)["shape"] == (2, 3)
    assert repr(t) == "Variable[t popxl.dtypes.float16 (2, 3)]"
    for ask in (bool, lambda t: 1.0 in t):
        with pytest.raises(TypeError, match="no values yet"):
            ask(t)
    with pytest.raises(RuntimeError, match="cannot be constructed directly"):
        popxl.Tensor()
    with popxl.Ir().main_graph, pytest.raises(ValueError, match="scalar and doesn't have a len"):
        len(popxl.constant(1.0))


def test_tensors_are_equal_if_they_are_the_same_of_one_ir() -> None:
    first, second = popxl.Ir(), popxl.Ir()
    with first.main_graph:
        a, b = popxl.constant(1.0, name="a"), popxl.constant(1.0, name="b")
    with second.main_graph:
        elsewhere = popxl.constant(1.0, name="a")
    assert a == a and a != b and a != elsewhere and a != "a" and len({a, b, a}) == 2


def test_inputs_of_ops_are_tensors_of_the_current_graph() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        a = popxl.constant(1.0)
        with pytest.raises(TypeError, match=r"The input `\w+` is not a Tensor\. Type: .*float"):
            ops.add(a, 1.0)
        with ir.create_empty_graph():
            with pytest.raises(ValueError, match=r"The input tensor `\w+` is not in the current"):
                ops.exp(a)
            with pytest.raises(ValueError, match=r"within the main graph. Please create a graph"):
                popxl.variable(1.0)


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (1, popxl.int32),
        (1.5, popxl.float32),
        (True, popxl.bool),
        ([1, 2], popxl.int32),
        (np.zeros(2), popxl.float32),
        (np.zeros(2, np.uint64), popxl.uint32),
        (np.zeros(2, np.int8), popxl.int8),
        (torch.zeros(2, dtype=torch.float64), popxl.float32),
        (torch.zeros(2, dtype=torch.float16), popxl.float16),
        (torch.zeros(2, dtype=torch.bfloat16), popxl.float32),
    ],
)
def test_constants_of_64_bits_become_32(data: object, dtype: dtypes.dtype) -> None:
    with popxl.Ir().main_graph:
        assert popxl.constant(data).dtype is dtype
        assert popxl.constant(data, popxl.float16).dtype is popxl.float16


def test_data_is_copied_and_64_bits_stay_on_request() -> None:
    data = np.arange(3.0)
    assert to_numpy(data, downcast=False).dtype == np.float64
    assert to_numpy(data, popxl.float64) is not data
    for named in (popxl.float64, popxl.int64, popxl.uint64):  # asked for, and so not cast
        assert to_numpy([1, 2], named).dtype == named.as_numpy()
    assert to_numpy(data, downcast=False) is not data
    assert to_numpy(data, downcast=False, copy=False) is data
    with pytest.raises(RuntimeError, match="'log2scale' is not supported"):
        to_numpy(data, popxl.float32, log2_scale=1)
    with pytest.raises(TypeError, match="int64 is not supported for float8 tensors"):
        to_numpy(np.arange(3), popxl.float8_143)


def test_a_memory_mapped_array_stays_as_it_is(tmp_path: Path) -> None:
    def mapped(dtype: object, shape: tuple[int, ...] = (2, 3)) -> np.memmap:
        return np.memmap(tmp_path / "data", dtype, "w+", shape=shape)

    single = mapped(np.float32)
    assert to_numpy(single) is single
    with pytest.raises(ValueError, match="`dtype` parameter must be None or the same"):
        to_numpy(single, popxl.float16)
    with pytest.raises(ValueError, match="already be in C-ordered and aligned form"):
        to_numpy(single.T)
    with pytest.raises(ValueError, match="the dtype float64 is not supported"):
        to_numpy(mapped(np.float64))


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("name", ["bool", "int8", "uint32", "float16", "float32", "complex64"])
def test_dtypes_have_their_numpy_and_torch_types(name: str) -> None:
    dtype = dtypes.dtype.from_name(name)
    assert dtype.as_numpy() == np.dtype(name)
    if name != "uint32" or hasattr(torch, name):
        assert dtype.as_torch() is getattr(torch, name)
        assert dtypes.dtype.as_dtype(getattr(torch, name)) is dtype
    assert dtypes.dtype.as_dtype(np.dtype(name)) is dtype is dtypes.dtype.as_dtype(name)
    assert dtype.is_int == (np.dtype(name).kind in "iu")


def test_float8_types_are_those_without_negative_zero() -> None:
    assert popxl.float8_143.as_numpy() == ml_dtypes.float8_e4m3fnuz
    assert popxl.float8_152.as_numpy() == ml_dtypes.float8_e5m2fnuz
    assert popxl.float8_143.is_floating_point and popxl.float8_143.is_signed
    assert popxl.complex64.is_signed and popxl.complex128.is_signed
    assert not popxl.bool.is_signed and not popxl.uint8.is_signed
    assert popxl.half is popxl.float16 and popxl.double is popxl.float64
    assert popxl.dtype.as_dtype(bool) is popxl.bool and popxl.float is popxl.float32


def test_dtypes_that_there_are_not() -> None:
    with pytest.raises(TypeError, match="Cannot create"):
        dtypes.dtype()
    with pytest.raises(ValueError, match=r"There is not a `popxl.dtype` that has a name: int4"):
        dtypes.dtype.from_name("int4")
    with pytest.raises(ValueError, match="that is compatible with value: <U3"):
        dtypes.dtype.as_dtype(np.dtype("<U3"))


# ---------------------------------------------------------------- seeds


def test_seeds_are_of_every_replica_and_step_its_own() -> None:
    shape = {"batches_per_step": 3, "gradient_accumulation_factor": 2, "replicas": 4}
    seeds = popxl.create_seeds(1984, 0, **shape)
    later = popxl.create_seeds(1984, 1, **shape)
    assert seeds.shape == (3, 2, 4, 2) and seeds.dtype == np.uint32
    together = np.concatenate([seeds.reshape(-1, 2), later.reshape(-1, 2)])
    assert len(np.unique(together, axis=0)) == 48
    assert (popxl.create_seeds(1984, 0, **shape) == seeds).all()


def test_numbers_of_64_bits_are_two_of_32() -> None:
    from gpusim.popxl.random_seed import two_uint32_to_uint64, uint64_to_two_uint32

    for number in (0, 7, 2**32, 2**64 - 1):
        assert two_uint32_to_uint64(*uint64_to_two_uint32(number)) == number
    for wrong in (-1, 2**64):
        with pytest.raises(ValueError, match="cannot be represented as a uint64"):
            uint64_to_two_uint32(wrong)
        with pytest.raises(ValueError, match="cannot be represented as a uint32"):
            two_uint32_to_uint64(wrong, 0)


# ---------------------------------------------------------------- dot files


def parsed(text: str) -> tuple[set[str], list[tuple[str, str]]]:
    """Nodes and edges of a Graphviz file: every line has to be one, as the language has them."""
    string = r'"((?:[^"\\]|\\.)*)"'
    attributes = rf"(?: \[(?:\w+=(?:{string}|\w+)(?:, )?)+\])?"
    lines = text.splitlines()
    assert re.fullmatch(rf"digraph {string} {{", lines[0]) and lines[-1] == "}"
    nodes, edges = set(), []
    for line in lines[1:-1]:
        if edge := re.fullmatch(rf"  {string} -> {string}{attributes};", line):
            edges.append((edge[1], edge[2]))
        elif node := re.fullmatch(rf"  {string}{attributes};", line):
            nodes.add(node[1])
        else:
            assert re.fullmatch(r"  rankdir=TB;|  node \[shape=box\];", line), line
    return nodes, edges


def program() -> popxl.Ir:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        v = popxl.variable(1.0, name='ä "quoted" name\n<of> {two} | lines\\')
        graph = ir.create_graph(lambda x: ops.exp(x) + x, v)
        ops.host_store(popxl.d2h_stream((), popxl.float32), ops.call(graph, v)[0])
    return ir


def test_dot_files_are_graphs_of_all_ops(tmp_path: Path) -> None:
    ir = program()
    ir.dot_checkpoint("Fwd0", tmp_path / "dots")
    folder = tmp_path / "dots"
    files = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.dot")}
    assert len(files) == 2 and "Fwd0.main_graph.dot" in files
    for text in files.values():
        nodes, edges = parsed(text)
        assert {end for edge in edges for end in edge} <= nodes and edges
    assert ir.getSessionOptions().dotChecks == {"ALL"}


def test_graphs_whose_names_differ_in_signs_only_have_a_dot_file_each(tmp_path: Path) -> None:
    ir = popxl.Ir()
    for name in ("a b", "a_b", "a-b"):
        ir.create_empty_graph(name)
    ir.dot_checkpoint("names", tmp_path)
    titles = {path.read_text(encoding="utf-8").split('"')[1] for path in tmp_path.iterdir()}
    assert titles == {graph.name for graph in ir.getAllGraphs()}


def test_dot_files_are_rendered_where_graphviz_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[Path] = []

    class ExecutableNotFound(RuntimeError): ...

    def render(engine: str, kind: str, path: Path) -> None:
        rendered.append(path)
        if len(rendered) > 1:
            raise ExecutableNotFound  # the package is there, and its program is not

    package = SimpleNamespace(render=render, ExecutableNotFound=ExecutableNotFound)
    monkeypatch.setitem(sys.modules, "graphviz", package)
    program().dot_checkpoint("all", tmp_path)
    assert sorted(rendered) == sorted(tmp_path.glob("*.dot")) and len(rendered) == 2


def test_only_activated_checks_write_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ir = program()
    monkeypatch.setenv("POPART_DOT_CHECKS", "Bwd0")
    ir.dot_checkpoint("Fwd0", tmp_path)
    assert not list(tmp_path.iterdir())
    ir.dot_checkpoint("Bwd0")
    assert len(list(tmp_path.glob("Bwd0.*.dot"))) == 2, "the folder given once holds for later"
    monkeypatch.delenv("POPART_DOT_CHECKS")
    ir.getSessionOptions().dotChecks = {"Fwd0"}
    ir.dot_checkpoint("Bwd1")
    ir.dot_checkpoint("Fwd0")
    assert {path.name.split(".")[0] for path in tmp_path.glob("*.dot")} == {"Bwd0", "Fwd0"}
