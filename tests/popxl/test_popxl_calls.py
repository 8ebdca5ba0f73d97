"""popxl's call, repeat and conditional, and what is changed in place through them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

import gpusim.popxl as popxl
from gpusim.popart import popart_exception
from gpusim.popxl import ops

VECTOR = popxl.TensorSpec((2,), popxl.float32)


def run(
    build: Callable[[], list[popxl.Tensor]], replicas: int = 1, one_by_one: bool = False
) -> list[np.ndarray]:
    """What the tensors that `build` returns, in the main graph, are after a run."""
    ir = popxl.Ir(replication=replicas)
    ir.getSessionOptions().oneByOne = one_by_one
    with ir.main_graph, popxl.in_sequence():
        streams = []
        for tensor in build():
            streams.append(popxl.d2h_stream(tensor.shape, tensor.dtype))
            ops.host_store(streams[-1], tensor)
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run()
    return [outputs[stream] for stream in streams]


def twice(x: popxl.Tensor, y: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
    return x + y, x * y


# ---------------------------------------------------------------- call


def test_a_call_gives_the_graphs_outputs() -> None:
    def build() -> list[popxl.Tensor]:
        graph = popxl.gir().create_graph(twice, VECTOR, VECTOR)
        x, y = popxl.constant([1.0, 2.0]), popxl.constant([3.0, 4.0])
        by_dict = ops.call(graph, inputs_dict={graph.inputs[1]: y, graph.inputs[0]: [5, 6]})
        return [*ops.call(graph, x, y), *ops.call(graph, [x, y]), *by_dict]

    found = [array.tolist() for array in run(build)]
    assert found == [[4, 6], [3, 8], [4, 6], [3, 8], [8, 10], [15, 24]]


def test_numbers_become_constants_of_the_inputs_dtype() -> None:
    def build() -> list[popxl.Tensor]:
        graph = popxl.gir().create_graph(twice, VECTOR, popxl.TensorSpec((), popxl.float32))
        return list(ops.call(graph, [1, 2], 3))

    assert [array.tolist() for array in run(build)] == [[4, 5], [3, 6]]


def test_a_call_site_knows_which_tensors_belong_together() -> None:
    ir = popxl.Ir()
    graph = ir.create_graph(twice, VECTOR, VECTOR)
    with ir.main_graph:
        x, y = popxl.constant([1.0, 2.0]), popxl.constant([3.0, 4.0])
        site = ops.call_with_info(graph, x, inputs_dict={graph.inputs[1]: y})
        other = ops.exp(x)
    assert site.called_graph == graph and site.inputs == (x, y)
    assert site.outputs == tuple(ir.main_graph.getOps()[0].outTensors())
    for index in range(2):
        assert site.graph_to_parent_input_index(index) == index
        assert site.parent_to_graph_input_index(index) == index
        assert site.graph_to_parent_output_index(index) == index
        assert site.parent_to_graph_output_index(index) == index
        assert (
            site.parent_input(index) == site.graph_to_parent(graph.inputs[index]) == (x, y)[index]
        )
        assert site.parent_to_graph(site.parent_input(index)) == graph.inputs[index]
        assert site.parent_output(index) == site.graph_to_parent(graph.outputs[index])
        assert site.parent_to_graph(site.parent_output(index)) == graph.outputs[index]
    for wrong in (2, -1):
        with pytest.raises(IndexError, match="Invalid graph input index"):
            site.graph_to_parent_input_index(wrong)
        with pytest.raises(IndexError, match="Invalid parent graph input index"):
            site.parent_to_graph_input_index(wrong)
        with pytest.raises(IndexError):
            site.parent_to_graph_output_index(wrong)
    with pytest.raises(ValueError, match="is not an input or output of the called graph"):
        site.graph_to_parent(other)
    with pytest.raises(ValueError, match="is not a parent graph input of the call site"):
        site.parent_to_graph(other)
    with pytest.raises(ValueError, match="is not a parent graph input of the call site"):
        site.set_parent_input_modified(other)


def test_what_a_call_refuses() -> None:
    ir = popxl.Ir()
    graph = ir.create_graph(twice, VECTOR, VECTOR)
    inner = ir.create_empty_graph()
    with inner:
        stranger = popxl.constant([1.0, 2.0])
    with ir.main_graph:
        x = popxl.constant([1.0, 2.0])
        a, b = graph.inputs
        cases: list[tuple[type[Exception], str, tuple[object, ...], object]] = [
            (ValueError, "Too many inputs have been provided to the", (x, x, x), None),
            (ValueError, "Not enough inputs have been provided to the called graph", (x,), None),
            (ValueError, "is specified twice", (x, x), {a: x}),
            (ValueError, f'The graph input tensor "{x}" is not in the called graph', (x,), {x: x}),
            (ValueError, 'is not in parent graph "Graph[id= ', (x, stranger), None),
            (ValueError, "is not in the parent graph (Graph[id= ", (x,), {b: stranger}),
            *(
                (kind, "must have shape (2,) and dtype", (x, other), None)
                for other in (popxl.constant([1.0]), popxl.constant([1, 2]))
                for kind in (ValueError, popart_exception)
            ),
            (TypeError, 'Input at position "1" could not be coerced', (x, "text"), None),
            (TypeError, f'Input "{b}" could not be coerced', (x,), {b: None}),
        ]
        for kind, message, inputs, by_dict in cases:
            with pytest.raises(kind, match=re.escape(message)):
                ops.call(graph, *inputs, inputs_dict=by_dict)
        site = ops.call_with_info(graph, x, check_inputs=False)
        ops.host_store(popxl.d2h_stream((2,), popxl.float32), site.outputs[0])
    with ir.main_graph, pytest.raises(popart_exception, match=r"without its inputs \['y'\]"):
        popxl.Session(ir)


# ---------------------------------------------------------------- in place


def add_one_by_value(x: popxl.Tensor) -> popxl.Tensor:
    return ops.add_(x, popxl.constant([1.0, 1.0]))


def add_one_by_ref(x: popxl.TensorByRef) -> popxl.Tensor:
    return ops.add_(x, popxl.constant([1.0, 1.0]))


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("function", "modified", "after"),
    [
        (add_one_by_value, False, [1, 2]),
        (add_one_by_ref, False, [2, 3]),
        (add_one_by_value, True, [2, 3]),
    ],
)
def test_only_references_let_a_call_change_its_parents_tensor(
    function: Callable[..., popxl.Tensor], modified: bool, after: list[int], one_by_one: bool
) -> None:
    def build() -> list[popxl.Tensor]:
        v = popxl.variable([1.0, 2.0])
        site = ops.call_with_info(popxl.gir().create_graph(function, v), v)
        if modified:
            site.set_parent_input_modified(v)
        return [v, *site.outputs]

    found = [array.tolist() for array in run(build, 2, one_by_one)]
    assert found == [[after] * 2, [[2, 3]] * 2]


def test_references_reach_through_several_calls() -> None:
    def build() -> list[popxl.Tensor]:
        ir, v = popxl.gir(), popxl.variable([1.0, 2.0])
        inner = ir.create_graph(add_one_by_ref, v)

        def by_value(x: popxl.Tensor) -> popxl.Tensor:
            with popxl.in_sequence():
                ops.call(inner, x)
                return x + 0.0

        def by_ref(x: popxl.TensorByRef) -> None:
            ops.call(inner, x)

        (first,) = ops.call(ir.create_graph(by_value, v), v)
        before = v + 0.0
        ops.call(ir.create_graph(by_ref, v), v)
        return [first, before, v]

    assert [array.tolist() for array in run(build)] == [[2, 3], [1, 2], [2, 3]]


VIEWS = {
    "reshape": lambda t: ops.reshape_(t, (6,)),
    "transpose": lambda t: ops.transpose_(t),
    "slice": lambda t: ops.slice_(t, [0], [None], [2], [1]),
    "reverse": lambda t: ops.slice_(t, 2, None, -1, 1),
    "transpose, reshape": lambda t: ops.reshape_(ops.transpose_(t), (6,)),
    "transpose, reshape, slice": lambda t: ops.slice_(
        ops.reshape_(ops.transpose_(t), (6,)), 1, 5, 1, 0
    ),
    "flatten, detach": lambda t: ops.detach_(ops.flatten_(t)),
}


def numpy_view(name: str, data: np.ndarray) -> np.ndarray:
    """Indices of the elements that a view shows."""
    return {
        "reshape": lambda t: t.reshape(6),
        "transpose": lambda t: t.T,
        "slice": lambda t: t[:, 0::2],
        "reverse": lambda t: t[:, ::-1],
        "transpose, reshape": lambda t: t.T.reshape(6),
        "transpose, reshape, slice": lambda t: t.T.reshape(6)[1:5],
        "flatten, detach": lambda t: t.reshape(6),
    }[name](data)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_changes_of_views_and_of_what_they_view_are_one(name: str, one_by_one: bool) -> None:
    data = np.arange(6, dtype=np.float32).reshape(2, 3)

    def build() -> list[popxl.Tensor]:
        v = popxl.variable(data)
        view = VIEWS[name](v)
        ops.add_(view, popxl.constant(10.0))
        after_view = v + 0.0
        ops.add_(v, popxl.constant(100.0))
        return [after_view, v, view]

    expected = data.ravel().copy()
    places = numpy_view(name, np.arange(6).reshape(2, 3))
    expected[places.ravel()] += 10
    after_view, v, view = (array[0] for array in run(build, 2, one_by_one))
    np.testing.assert_array_equal(after_view, expected.reshape(2, 3))
    np.testing.assert_array_equal(v, expected.reshape(2, 3) + 100)
    np.testing.assert_array_equal(view, expected[places] + 100)


def test_a_changed_concatenation_changes_its_parts() -> None:
    def build() -> list[popxl.Tensor]:
        a, b = popxl.variable([1.0, 2.0]), popxl.variable([3.0])
        both = ops.concat_([a, b])
        ops.add_(both, popxl.constant(10.0))
        middle = b + 0.0
        ops.add_(b, popxl.constant(100.0))
        return [a, middle, both]

    found = [array.tolist() for array in run(build)]
    assert found == [[11, 12], [13], [11, 12, 113]]


def test_copies_do_not_see_later_changes() -> None:
    def build() -> list[popxl.Tensor]:
        v = popxl.variable([[1.0, 2.0], [3.0, 4.0]])
        copies = [
            ops.reshape(v, (4,)),
            ops.transpose(v),
            ops.identity(v),
            ops.slice(v, 0, 1, 1, 0),
            *ops.split(v, 2, axis=1),
            *ops.call(popxl.gir().create_graph(lambda x: x, v), v),
            ops.detach(v),
        ]
        ops.add_(v, popxl.constant(10.0))
        return copies

    flat = [array.ravel().tolist() for array in run(build)]
    assert (
        flat
        == [[1, 2, 3, 4], [1, 3, 2, 4], [1, 2, 3, 4], [1, 2], [1, 3], [2, 4]] + [[1, 2, 3, 4]] * 2
    )


def test_constants_and_inputs_from_the_host_are_not_changed_for_good() -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x, y = popxl.h2d_stream((2,), popxl.float32), popxl.d2h_stream((2,), popxl.float32)
        changed = ops.add_(
            ops.host_load(x), ops.add_(popxl.constant([1.0, 1.0]), popxl.constant(1.0))
        )
        ops.host_store(y, changed)
    given = np.zeros(2, np.float32)
    with popxl.Session(ir) as session:
        for _ in range(2):
            assert session.run({x: given})[y].tolist() == [2, 2]
    assert not given.any()


def test_changes_and_uses_without_an_order_are_refused() -> None:
    def ir_of(body: Callable[[popxl.Variable], object]) -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            body(popxl.variable([1.0, 2.0]))
        return ir

    one = lambda: popxl.constant([1.0, 1.0])  # noqa: E731

    def use_and_change(v: popxl.Variable) -> None:
        ops.exp(v)
        ops.add_(v, one())

    def change_twice(v: popxl.Variable) -> None:
        ops.add_(v, one())
        ops.add_(v, one())

    def change_a_view(v: popxl.Variable) -> None:
        ops.add_(ops.reshape_(v, (2, 1)), popxl.constant(1.0))
        ops.exp(v)

    def change_in_a_call(v: popxl.Variable) -> None:
        ops.call(popxl.gir().create_graph(add_one_by_ref, v), v)
        ops.exp(v)

    for body in (use_and_change, change_twice, change_a_view, change_in_a_call):
        with pytest.raises(popart_exception, match=r"^Inplacing ambiguity detected\."):
            popxl.Session(ir_of(body))

        def ordered(v: popxl.Variable, body: Callable[[popxl.Variable], object] = body) -> None:
            with popxl.in_sequence():
                body(v)

        popxl.Session(ir_of(ordered))

    def through_tensors(v: popxl.Variable) -> None:
        changed = ops.add_(v, ops.exp(v))
        ops.add_(changed, one())

    popxl.Session(ir_of(through_tensors))


# ---------------------------------------------------------------- repeat


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_repeat_feeds_outputs_into_the_first_inputs(count: int, one_by_one: bool) -> None:
    def body(x: popxl.Tensor, y: popxl.Tensor, z: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
        return y, x + z

    def build() -> list[popxl.Tensor]:
        values = [popxl.constant([number, 1.0]) for number in (1.0, 2.0, 10.0)]
        graph = popxl.gir().create_graph(body, *values)
        return list(ops.repeat(graph, count, *values))

    x, y = np.array([1.0, 1.0]), np.array([2.0, 1.0])
    for _ in range(count):
        x, y = y, x + np.array([10.0, 1.0])
    found = run(build, 2, one_by_one)
    np.testing.assert_array_equal(found, [[x] * 2, [y] * 2])


def test_what_a_loop_changes_in_place_is_its_own() -> None:
    def body(x: popxl.Tensor, y: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
        x = ops.add_(x, popxl.constant([1.0, 1.0]))
        return x, x * y

    def swapped(x: popxl.Tensor, y: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
        with popxl.in_sequence():
            x = ops.add_(x, popxl.constant([1.0, 1.0]))
            return y, ops.identity(x)

    def build() -> list[popxl.Tensor]:
        v, w = popxl.variable([1.0, 2.0]), popxl.variable([1.0, 1.0])
        graphs = [popxl.gir().create_graph(function, v, w) for function in (body, swapped)]
        return [v, *ops.repeat(graphs[0], 3, v, w), *ops.repeat(graphs[1], 3, v, w), v, w]

    found = [array.tolist() for array in run(build)]
    x, y = np.array([1.0, 2.0]), np.array([1.0, 1.0])
    for _ in range(3):
        x = x + 1
        y = x * y
    a, b = np.array([1.0, 2.0]), np.array([1.0, 1.0])
    for _ in range(3):
        a, b = b, a + 1
    expected = [[1, 2], x, y, a, b, [1, 2], [1, 1]]
    assert found == [np.asarray(array).tolist() for array in expected]


def test_views_of_what_a_loop_changes_are_copies_when_they_come_around() -> None:
    def add_up(x: popxl.Tensor, y: popxl.Tensor, total: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
        with popxl.in_sequence():
            x = ops.add_(x, popxl.constant([[1.0, 2.0], [3.0, 4.0]]))
            return x, ops.transpose_(x), total + y

    def build() -> list[popxl.Tensor]:
        zero = popxl.constant(np.zeros((2, 2), np.float32))
        graph = popxl.gir().create_graph(add_up, zero, zero, zero)
        return list(ops.repeat(graph, 3, zero, zero, zero))

    one = np.array([[1.0, 2.0], [3.0, 4.0]])
    found = [array.tolist() for array in run(build)]
    assert found == [(3 * one).tolist(), (3 * one.T).tolist(), ((0 + 1 + 2) * one.T).tolist()]


def test_a_loop_by_reference_changes_the_parents_tensor_each_time() -> None:
    def body(total: popxl.TensorByRef, x: popxl.Tensor) -> None:
        ops.var_updates.accumulate_(total, x)

    def build() -> list[popxl.Tensor]:
        v = popxl.variable([0.0, 0.0])
        ops.repeat(popxl.gir().create_graph(body, v, v), 4, v, popxl.constant([1.0, 2.0]))
        return [v]

    assert run(build)[0].tolist() == [4, 8]


def test_what_repeat_refuses() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.constant([1.0, 2.0])
        graph = ir.create_graph(twice, x, x)
        more = ir.create_graph(lambda a: (a, a), x)
        other = ir.create_graph(lambda a: ops.sum(a), x)
        with pytest.raises(ValueError, match=r"Repeat count must be >= 0. Repeat count: -1"):
            ops.repeat(graph, -1, x, x)
        with pytest.raises(
            ValueError, match=r"greater than or equal to the number of outputs. 1 <"
        ):
            ops.repeat(more, 2, x)
        with pytest.raises(ValueError, match="must have the shape and dtype of the input"):
            ops.repeat(other, 2, x)
        with pytest.raises(ValueError, match=r"^Not enough inputs have been provided"):
            ops.repeat(graph, 2, x)
        with pytest.raises(ValueError, match=r"not in the called graph"):
            ops.repeat(graph, 2, x, inputs_dict={more.inputs[0]: x})
        site = ops.repeat_with_info(graph, 2, x, x)
    assert site.called_graph == graph and len(site.outputs) == 2
    assert ir.main_graph.getOps()[-1].opType() == "Loop"


# ---------------------------------------------------------------- conditional


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("chosen", ([True] * 4, [False] * 4, [True, False, False, True]))
def test_every_replica_takes_its_own_branch(chosen: list[bool], one_by_one: bool) -> None:
    ir = popxl.Ir(replication=4)
    ir.num_host_transfers = 2
    ir.getSessionOptions().oneByOne = one_by_one
    with ir.main_graph, popxl.in_sequence():
        which = popxl.h2d_stream((), popxl.bool, "which")
        x, y = popxl.h2d_stream((2,), popxl.float32, "x"), popxl.d2h_stream((2,), popxl.float32)
        v = popxl.variable(np.arange(8.0).reshape(4, 2), replica_grouping=ir.replica_grouping(1, 1))

        def loads(a: popxl.Tensor) -> popxl.Tensor:
            return a + ops.host_load(x)

        def squares(a: popxl.Tensor) -> popxl.Tensor:
            return ops.add_(a, a + popxl.constant([1.0, 2.0]))

        branches = [ir.create_graph(function, v) for function in (loads, squares)]
        condition = ops.host_load(which)
        (first,) = ops.conditional(condition, *branches, [v], [v])
        (second,) = ops.conditional(condition, *branches, [first], [first])
        ops.host_store(y, first)
        ops.host_store(y, second)
    data = np.arange(16, dtype=np.float32).reshape(2, 4, 2) * 10
    with popxl.Session(ir, "ipu_model") as session:
        found = session.run({which: np.array([chosen, chosen]), x: data})[y]
        kept = session.get_tensor_data(v)
    start = np.arange(8.0).reshape(4, 2)
    take = np.array(chosen)[:, None]
    first_expected = np.where(take, start + data[0], 2 * start + [1, 2])
    second_expected = np.where(take, first_expected + data[1], 2 * first_expected + [1, 2])
    np.testing.assert_array_equal(found, [first_expected, second_expected])
    np.testing.assert_array_equal(kept, start)


def test_a_conditional_site_knows_its_branches() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x, y = popxl.constant([1.0, 2.0]), popxl.constant([3.0, 4.0])
        then, other = ir.create_graph(lambda a: a + a, x), ir.create_graph(lambda a, b: a * b, x, y)
        site = ops.conditional_with_info(popxl.constant(True), then, other, [x], [y, y])
    assert site.called_graph == (then, other) and len(site.inputs) == 4
    assert site.graph_to_parent_input_index(0) == 1
    assert [site.graph_to_parent_input_index(k, False) for k in (0, 1)] == [2, 3]
    assert [site.parent_to_graph_input_index(k) for k in (1, 2, 3)] == [0, 0, 1]
    assert [site.is_parent_index_in_then_branch(k) for k in (1, 2, 3)] == [True, False, False]
    assert site.graph_to_parent(then.inputs[0]) == x == site.parent_input(1)
    assert site.graph_to_parent(other.inputs[1]) == y
    assert site.graph_to_parent(other.outputs[0]) == site.parent_output(0)
    assert site.parent_to_graph(x) == then.inputs[0]
    assert site.graph_to_parent_output_index(0, False) == 0
    with pytest.raises(popart_exception, match="Invalid parent graph input index"):
        site.parent_to_graph_input_index(0)
    with pytest.raises(IndexError, match="Invalid parent graph input index"):
        site.parent_to_graph_input_index(4)
    for beyond in (4, -1):
        with pytest.raises(IndexError, match="Invalid parent graph input index"):
            site.is_parent_index_in_then_branch(beyond)
    with pytest.raises(IndexError, match="Invalid graph input index"):
        site.graph_to_parent_input_index(1)
    with pytest.raises(NotImplementedError, match="Parent input modification is not yet"):
        site.set_parent_input_modified(x)


def test_what_a_conditional_refuses() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x, yes = popxl.constant([1.0, 2.0]), popxl.constant(True)
        one, two = ir.create_graph(lambda a: a, x), ir.create_graph(twice, x, x)
        with pytest.raises(ValueError, match="must have the same number of outputs: 1 != 2"):
            ops.conditional(yes, one, two, [x], [x, x])
        for inputs, role in (([], [x]), "then_branch"), (([x], []), "else_branch"):
            with pytest.raises(ValueError, match=f"^Not enough inputs .* to the {role} graph"):
                ops.conditional(yes, one, one, *inputs)
        short = ir.create_graph(lambda a: ops.sum(a), x)
        with pytest.raises(ValueError, match="must have outputs of the same shapes"):
            ops.conditional(yes, one, short, [x], [x])
        by_ref = ir.create_graph(add_one_by_ref, x)
        for branches, name in (((by_ref, one), "then_branch"), ((one, by_ref), "else_branch")):
            with pytest.raises(NotImplementedError, match=f"input to the {name} graph by ref"):
                ops.conditional(yes, *branches, [x], [x])
        which = popxl.h2d_stream((), popxl.bool, "which")
        summed = ir.create_graph(lambda a: ops.collectives.replicated_all_reduce(a), x)
        (out,) = ops.conditional(ops.host_load(which), summed, one, [x], [x])
        ops.host_store(popxl.d2h_stream((2,), popxl.float32), out)
    with popxl.Session(ir, "ipu_model") as session:
        session.run({which: np.array([True, True])})
        with pytest.raises(RuntimeError, match=r"only replicas \[0\] of 2 have taken"):
            session.run({which: np.array([True, False])})
