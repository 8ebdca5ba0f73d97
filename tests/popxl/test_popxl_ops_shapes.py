"""PopXL's ops that arrange, reduce, and index: values and gradients as PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gpusim.popxl as popxl
from gpusim.popxl import ops
from gpusim.popxl.exceptions import popart_exception
from tests.popxl import popxl_cases
from tests.popxl.popxl_cases import HALF, SINGLE, Case, Floats, Integers

X = Floats((3, 4, 5))
APART = Floats((3, 4, 5), apart=True)
POSITIVE = Floats((3, 4, 5), 0.5, 2.0)


def case(name, build, reference, *inputs, **options):
    return Case(name, build, list(inputs) or [X], reference, **options)


REDUCTIONS = [
    case("sum", ops.sum, torch.sum),
    case("sum of axes", lambda t: ops.sum(t, [0, -1]), lambda t: t.sum([0, -1])),
    case("sum, axes kept", lambda t: ops.sum(t, 1, True), lambda t: t.sum(1, True)),
    case("mean", lambda t: ops.mean(t, (1,)), lambda t: t.mean(1)),
    case("mean of all", ops.mean, torch.mean),
    case("max", lambda t: ops.max(t, [0, 2]), lambda t: t.amax([0, 2]), APART),
    case("min", lambda t: ops.min(t, 1, True), lambda t: t.amin(1, True), APART),
    case("prod", lambda t: ops.prod(t, 1), lambda t: t.prod(1), scale=3),
    case("prod of axes", lambda t: ops.prod(t, [0, 2]),
         lambda t: t.permute(1, 0, 2).reshape(4, -1).prod(1), scale=10),
    case("l1", lambda t: ops.l1(t, -1), lambda t: t.abs().sum(-1)),
    case("l2", lambda t: ops.l2(t, [0, 1]), lambda t: t.square().sum([0, 1]).sqrt()),
    case("logsum", lambda t: ops.logsum(t, 2), lambda t: t.sum(2).log(), POSITIVE),
    case("logsumexp", lambda t: ops.logsumexp(t, [1, 2]), lambda t: t.logsumexp([1, 2])),
    case("sumsquare", lambda t: ops.sumsquare(t, 0, True), lambda t: t.square().sum(0, True)),
    case("median", lambda t: ops.median(t, 2), lambda t: t.median(2).values, APART),
    case("median of all", ops.median, torch.median, APART),
    case("median, axes kept", lambda t: ops.median(t, [0, 1], True),
         lambda t: t.reshape(12, 5).median(0).values.reshape(1, 1, 5), APART),
    case("cumsum", lambda t: ops.cumsum(t, 1), lambda t: t.cumsum(1)),
    case("argmax", lambda t: ops.argmax(t, -1, True), lambda t: t.argmax(-1, True), APART,
         differentiable=False),
    case("argmin", ops.argmin, lambda t: t.argmin(0), APART, differentiable=False),
    case("topk", lambda t: ops.topk(t, 2, 1, True, True),
         lambda t: (t.topk(2, 1).values, t.topk(2, 1).indices), APART),
    case("topk of the least", lambda t: ops.topk(t, 3, -1, False, True)[0],
         lambda t: t.topk(3, -1, False).values, APART),
]  # fmt: skip

SHAPES = [
    case("reshape", lambda t: ops.reshape(t, (6, -1)), lambda t: t.reshape(6, 10)),
    case("flatten", ops.flatten, torch.flatten),
    case("reshape_", lambda t: ops.reshape_(t, (60,)), torch.flatten),
    case("transpose", ops.transpose, lambda t: t.permute(2, 1, 0)),
    case("transpose by order", lambda t: ops.transpose(t, (1, 2, 0)),
         lambda t: t.permute(1, 2, 0)),
    case("transpose_", lambda t: ops.transpose_(t, (0, 2, 1)), lambda t: t.permute(0, 2, 1)),
    case("T, then exp of it", lambda t: ops.exp(t.T), lambda t: t.permute(2, 1, 0).exp()),
    case("squeeze", ops.squeeze, lambda t: t.squeeze(), Floats((1, 3, 1))),
    case("squeeze an axis", lambda t: ops.squeeze(t, [-1]), lambda t: t.squeeze(-1),
         Floats((1, 3, 1))),
    case("slice", lambda t: ops.slice(t, [1, 0], [3, -1]), lambda t: t[1:3, :-1]),
    case("slice backwards", lambda t: ops.slice(t, stop=1, step=-1, axis=1),
         lambda t: t.flip(1)[:, :2]),
    case("slice backwards by two", lambda t: t[::-1, :, ::-2], lambda t: t.flip(0, 2)[:, :, ::2]),
    case("slice_", lambda t: ops.slice_(t, start=1, axis=2), lambda t: t[:, :, 1:]),
    case("indexing", lambda t: t[1, :, 2:4], lambda t: t[1, :, 2:4]),
    case("subsample", lambda t: ops.subsample(t, [2, 3]), lambda t: t[::2, ::3]),
    case("concat", lambda x, y: ops.concat([x, y, x], 1), lambda x, y: torch.cat([x, y, x], 1),
         X, Floats((3, 2, 5))),
    case("concat_", lambda x, y: ops.concat_([x, y], -1), lambda x, y: torch.cat([x, y], -1), X,
         Floats((3, 4, 1))),
    case("split", lambda t: ops.split(t, [1, 3], 1), lambda t: t.split([1, 3], 1)),
    case("a part of a split", lambda t: ops.split(t, 3)[1], lambda t: t[1:2]),
    case("diagonal", lambda t: t.diag(), lambda t: t.diag(), Floats((3, 4))),
    case("ipu_copy", lambda t: ops.ipu_copy(t, 1, 0), lambda t: t + 0),
    case("io_tile_copy", ops.io_tile_copy, lambda t: t + 0),
    case("print_tensor", lambda t: ops.print_tensor(t, print_self=False), lambda t: t + 0),
]  # fmt: skip


def scattered(t, indices, values, axis):
    return t.scatter(axis, indices, values)


def reduced(reduction, include):
    names = {"sum": "sum", "max": "amax", "min": "amin"}

    def reference(data, indices, initial=None):
        spread = indices.reshape(-1, 1).expand(data.shape)
        start = torch.zeros(4, data.shape[1], dtype=data.dtype) if initial is None else initial
        return start.scatter_reduce(0, spread, data, names[reduction], include_self=include)

    return reference


ROWS = Floats((6, 3), apart=True)
PLACES = Integers((6,), 0, 4)
WINDOW = {"axes": [0, 2], "sizes": [2, 3], "no_overlap": True}


def window(t, index):
    rows = (index[0] + torch.arange(2)) % 3
    columns = (index[1] + torch.arange(3)) % 5
    return t[rows][:, :, columns]


def updated(t, index, update):
    out = t.clone()
    rows = ((index[0] + torch.arange(2)) % 3)[:, None, None]
    columns = ((index[1] + torch.arange(3)) % 5)[None, None, :]
    out[rows, torch.arange(4)[None, :, None], columns] = update
    return out


INDEXING = [
    case("gather", lambda t, i: ops.gather(t, i), lambda t, i: t[i], X, Integers((2, 6), 0, 3)),
    case("gather on the last axis", lambda t, i: ops.gather(t, i, -1), lambda t, i: t[:, :, i], X,
         Integers((7,), 0, 5)),
    case("gather in the middle", lambda t, i: ops.gather(t, i, 1), lambda t, i: t[:, i], X,
         Integers((2, 2), 0, 4, popxl.uint32)),
    case("tied_gather", lambda t, i: ops.tied_gather(t, i, 1), lambda t, i: t[:, i], X,
         Integers((3,), 0, 4)),
    case("indexing by a tensor", lambda t, i: t[i], lambda t, i: t[i], X, Integers((6,), 0, 3)),
    case("groupedgather", lambda t, i: ops.groupedgather(t, i, 1, 3),
         lambda t, i: torch.stack([x[j] for x, j in zip(t, i, strict=True)]), X,
         Integers((3, 6), 0, 4)),
    case("gather of zeros", lambda t, i: ops.gather(t, i, zero_OOR=True),
         lambda t, i: torch.where(((i >= 0) & (i < 3))[:, None, None], t[i.clip(0, 2)], 0), X,
         Integers((8,), -3, 6)),
    case("scatter", lambda t, i, v: ops.scatter(t, i, v, 1),
         lambda t, i, v: t.scatter(1, i, v), Floats((2, 9)),
         Integers((2, 1), 0, 9), Floats((2, 1))),
    *(case(f"scatter_reduce {kind}",
           lambda d, i, kind=kind: ops.scatter_reduce(d, i, kind, axis_size=4),
           reduced(kind, kind == "sum"), ROWS, PLACES) for kind in ("sum", "max", "min")),
    *(case(f"scatter_reduce {kind} into values",
           lambda d, i, s, kind=kind: ops.scatter_reduce(d, i, kind, s),
           reduced(kind, True), ROWS, PLACES, Floats((4, 3), -1.99, 1.99))
      for kind in ("sum", "max", "min")),
    case("scatter_reduce none", lambda d, i, s: ops.scatter_reduce(d, i, "none", s, axis=1),
         lambda d, i, s: s.scatter(1, i.expand(d.shape), d), Floats((2, 1)), Integers((1,), 0, 4),
         Floats((2, 4))),
    case("grouped_scatter_reduce",
         lambda d, i: ops.grouped_scatter_reduce(d, i, "sum", axis=1, axis_size=4, group_size=2),
         lambda d, i: torch.zeros(2, 4, 3, dtype=d.dtype).scatter_add(
             1, i[:, :, None].expand(d.shape), d),
         Floats((2, 6, 3)), Integers((2, 6), 0, 4)),
    case("dynamic_slice", lambda t, i: ops.dynamic_slice(t, i, **WINDOW), window, X,
         Integers((2,), 0, 3, popxl.uint32)),
    case("dynamic_update by less",
         lambda t, i, u: ops.dynamic_update(t, i, u, **WINDOW), updated, X,
         Integers((2,), 0, 3, popxl.uint32), Floats((1, 3))),
    case("dynamic_update", lambda t, i, u: ops.dynamic_update(t, i, u, **WINDOW), updated, X,
         Integers((2,), 0, 3, popxl.uint32), Floats((2, 4, 3))),
    case("onehot", lambda i: ops.onehot(i, popxl.constant(4, popxl.int32),
                                        popxl.constant([-1.0, 2.0]), 1),
         lambda i: torch.nn.functional.one_hot(i, 4).permute(0, 2, 1).double() * 3 - 1,
         Integers((2, 3), 0, 4), differentiable=False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["float32", "float16"])
@pytest.mark.parametrize("case", REDUCTIONS + SHAPES + INDEXING, ids=str)
def test_values_and_gradients_are_pytorchs(case, dtype):
    if case.name == "onehot" and dtype is HALF:
        return  # its values are constants of float32
    popxl_cases.check(case, dtype)


def one(build, *arrays):
    """What a program of one replica makes of constants."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        made = build(*map(popxl.constant, arrays))
        streams = [popxl_cases.stored(t) for t in popxl_cases.listed(made)]
    with popxl.Session(ir) as session:
        results = session.run()
    return [results[stream] for stream in streams]


def test_integers_are_added_as_integers():
    (summed,) = one(ops.sum, np.array([2**30, 2**30, 2**30], np.int32))
    assert summed.dtype == np.int32 and summed == 3 * 2**30 - 2**32
    (mean,) = one(ops.mean, np.array([-3, -4], np.int32))
    assert mean == -3


def test_lamb_square_is_a_float32_sum_of_squares():
    (squares,) = one(ops.lamb_square, np.full((40, 40), 10, np.float16))
    assert squares.dtype == np.float32 and squares == 160000


def test_a_histogram_counts_what_lies_between_levels():
    given = np.array([-5.0, -1.0, 0.0, 0.5, 1.0, 3.0], np.float32)
    (counts,) = one(lambda t: ops.histogram(t, [0.0, 1.0], False), given)
    assert counts.dtype == np.uint32 and counts.tolist() == [2, 2, 2]
    (counts,) = one(lambda t: ops.histogram(t, [1.0, 4.0], True), given)
    assert counts.tolist() == [2, 3, 1]
    with pytest.raises(ValueError, match="not a monotonically increasing list"):
        one(lambda t: ops.histogram(t, [1.0, 1.0], True), given)


def test_topk_unsorted_has_the_same_elements():
    given = np.array([3.0, 9.0, 1.0, 7.0], np.float32)
    values, indices = one(lambda t: ops.topk(t, 2, 0, True, False), given)
    assert sorted(values) == [7.0, 9.0] and given[indices].tolist() == values.tolist()
    assert indices.dtype == np.uint32


def test_views_see_changes_of_what_they_are_views_of():
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        v = popxl.variable(np.arange(6, dtype=np.float32).reshape(2, 3))
        column = ops.slice_(ops.transpose_(v), start=1, stop=2)
        ops.add_(column, popxl.constant([[10.0, 20.0]]))
        flat = ops.reshape_(v, (6,))
        ops.var_updates.accumulator_scale_(flat, 2.0)
        stream = popxl_cases.stored(v)
    with popxl.Session(ir, "ipu_model") as session:
        first, second = session.run()[stream]
    assert first.tolist() == second.tolist() == [[0, 22, 4], [6, 48, 10]]


def test_dynamic_update_in_place_changes_its_variable():
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.zeros((4, 2), np.float32))
        rows = popxl.constant(np.ones((2, 2), np.float32))
        ops.dynamic_update_(v, popxl.constant([3], popxl.uint32), rows, [0], [2], True)
    with popxl.Session(ir) as session:
        session.run()
        assert session.get_tensor_data(v)[:, 0].tolist() == [1, 0, 0, 1]


def test_printed_tensors_go_to_standard_error(capfd):
    one(lambda t: ops.print_tensor(t, "two", digits=2, separator=",", open_bracket="(",
                                   close_bracket=")", float_format="fixed"),
        np.array([1.0, 2.5], np.float32))  # fmt: skip
    assert "two: (1.00,2.50)" in capfd.readouterr().err


ERRORS = [
    (lambda t: ops.reshape(t, (2, -3)), ValueError, "Invalid shape value in reshape"),
    (lambda t: ops.reshape(t, (-1, -1)), ValueError, "at most one '-1' value"),
    (lambda t: ops.reshape(t, (7,)), ValueError, "cannot be reshaped"),
    (lambda t: ops.squeeze(t, [0, 0]), ValueError, "Axes contains duplicates"),
    (lambda t: ops.squeeze(t, [5]), ValueError, "Can't squeeze axis '5' as tensor has rank '2'"),
    (lambda t: ops.squeeze(t, [1]), ValueError, "as length of axis is >1: 3"),
    (lambda t: ops.split(t, 2, 1), ValueError, "does not equally divide tensor axis 1 of length 3"),
    (lambda t: ops.split(t, [1, 1], 1), ValueError, "do not add up"),
    (lambda t: ops.transpose(t, (0, 2)), ValueError, r"less than the tensor's rank 2. Found \(2,"),
    (lambda t: ops.subsample(t, [1, 1, 1]), ValueError, "must not be greater than the rank"),
    (lambda t: ops.slice(t, [0, 1], [1]), ValueError, "`stop` has length 1 != 2"),
    (lambda t: ops.concat([t, ops.cast(t, popxl.float16)]), TypeError, "the same type"),
    (lambda t: ops.concat([t, ops.transpose(t)]), ValueError, "differ in more than the axis 0"),
    (lambda t: ops.gather(t, t), TypeError, "indices must be integers"),
    (lambda t: ops.scatter_reduce(t, t, "sum"), ValueError, "One of initial_values and axis_size"),
    (lambda t: ops.scatter_reduce(t, t, "mean", axis_size=2), ValueError, "must be one of"),
    (lambda t: ops.topk(t, 9, 1, True, True), ValueError, "k must be 1 to 3"),
    (lambda t: ops.sum(t, 2), ValueError, "axis 2 is out of range"),
    (lambda t: ops.print_tensor(t, separator="--"), ValueError, "must be 1 character exactly"),
    (lambda t: ops.ipu_copy(t, 1), ValueError, "Could not infer the ipu"),
    (lambda t: ops.maximum(), ValueError, "one tensor at least"),
    (lambda t: ops.onehot(t, ops.sum(t), t, 0), TypeError, "must be a constant"),
]


@pytest.mark.parametrize(("build", "error", "text"), ERRORS)
def test_what_cannot_be_done_is_an_error_that_says_why(build, error, text):
    with popxl.Ir().main_graph:
        t = popxl.constant(np.zeros((1, 3), np.float32))
        with pytest.raises(error, match=text):
            build(t)


#: PopART's names of ops that are not those of PopXL's functions.
TYPES = [
    (lambda t: ops.negate(t), "Neg", "NegateOp"),
    (lambda t: ops.layer_norm(t, t[0], t[0]), "GroupNormalization", "GroupNormOp"),
    (lambda t: ops.sum(t), "ReduceSum", "ReduceSumOp"),
    (lambda t: ops.argmax(t), "ArgMax", "ArgMaxOp"),
    (lambda t: ops.flatten(t), "Reshape", "ReshapeOp"),
    (lambda t: ops.squeeze(t[:1]), "Reshape", "ReshapeOp"),
    (lambda t: ops.isnan(t), "IsNaN", "IsNaN"),
    (lambda t: ops.isinf(t), "IsInf", "IsInf"),
    (lambda t: ops.cumsum(t), "CumSum", "CumSumOp"),
    (lambda t: ops.maximum(t, t), "Max", "MaxOp"),
    (lambda t: ops.add_(t, t), "AddLhsInplace", "AddLhsInplaceOp"),
    (lambda t: ops.interpolate(t, (1, 1)), "Resize", "ResizeOp"),
    (lambda t: ops.tied_gather(t, popxl.constant(0)), "PopartTiedGather", "TiedGatherOp"),
    (lambda t: t > t, "Greater", "GreaterOp"),
    (lambda t: t @ t.T, "MatMul", "MatMulOp"),
    (lambda t: t[1:], "Slice", "SliceOp"),
]


@pytest.mark.parametrize(("build", "op_type", "name"), TYPES)
def test_ops_have_poparts_types_and_classes(build, op_type, name):
    from gpusim.popart._internal import ir as internal

    ir = popxl.Ir()
    with ir.main_graph:
        build(popxl.variable(np.ones((2, 3), np.float32)))
    op = ir.main_graph._pb_graph.getOps()[-1]
    assert op.opType() == op_type and isinstance(op, getattr(internal.op, name))


def test_tensors_of_another_graph_and_other_things_are_refused_by_name():
    ir = popxl.Ir()
    with ir.create_empty_graph("other"):
        there = popxl.constant([1.0])
    with ir.main_graph as main:
        here = popxl.constant([1.0])
        with pytest.raises(ValueError, match="`rhs` is not in the current Graph main_graph"):
            ops.add(here, there)
        with pytest.raises(TypeError, match="The input `indices` is not a Tensor"):
            ops.gather(here, [0])
        with pytest.raises(TypeError, match="The input `x` is not a Tensor"):
            ops.utils.check_in_graph(main, x=3)
        with pytest.raises(Exception, match="all tensors as keyword arguments"):
            ops.utils.check_in_graph(main, here)


def test_tensors_on_different_ipus_and_tiles_are_refused_by_name():
    with popxl.Ir().main_graph:
        t = popxl.constant([1.0])
        with popxl.ipu(0):
            first = ops.exp(t)
        with popxl.ipu(1):
            second = ops.exp(t)
        text = "`lhs` and `rhs` are located on different IPUs: 0 != 1"
        with pytest.raises(ValueError, match=text):
            ops.mul(first, second)
        with pytest.raises(ValueError, match="`ts_0` and `ts_1` are located on different IPUs"):
            ops.concat([first, second])
        with pytest.raises(ValueError, match=text):
            ops.utils.check_tensor_ipu_and_tile_set(lhs=first, rhs=second)
        assert ops.mul(first.copy_to_ipu(1), second).shape == (1,)
        aside = ops.io_tile_copy(ops.exp(t))
        assert (aside.tile_set, ops.io_tile_copy(aside).tile_set) == ("io", "compute")
        with pytest.raises(ValueError, match="different tile sets: compute != io"):
            ops.mul(ops.exp(t), aside)


def test_what_poparts_ops_refuse_is_its_exception_and_pythons():
    with popxl.Ir().main_graph:
        t = popxl.constant([1.0, 2.0, 3.0])
        with pytest.raises(popart_exception):
            ops.split(t, [1, 1])
        with pytest.raises(popart_exception) as caught:
            ops.add(t, popxl.constant([1, 2, 3]))
        assert isinstance(caught.value, TypeError)


def test_code_lies_where_it_can_run():
    ir = popxl.Ir()
    graph = ir.create_empty_graph()
    with ir.main_graph as main:
        ops.remote_code_load(graph, "executable")
        with pytest.raises(
            ValueError, match=r"Not a valid location: there\. Must choose from: exe"
        ):
            ops.remote_code_load(graph, "there")
        with pytest.raises(ValueError, match="cannot load the code for the graph it resides in"):
            ops.remote_code_load(main, "executable")
        with pytest.raises(NotImplementedError, match="destination == 'buffer'"):
            ops.remote_code_load(graph, "buffer")
        stream = popxl_cases.stored(popxl.constant(1.0))
    assert main._pb_graph.getOps()[0].opType() == "RemoteCodeLoad"
    with popxl.Session(ir) as session:
        assert session.run()[stream] == 1.0
