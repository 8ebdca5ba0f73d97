"""popxl tensors' operators, methods and indices, against NumPy's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpusim.popxl as popxl
from gpusim.popxl import ops

DATA = np.arange(12, dtype=np.float32).reshape(3, 4) / 2 - 2


def run(build: Callable[[popxl.Tensor], popxl.Tensor], data: np.ndarray = DATA) -> np.ndarray:
    """What a function of a variable gives on two replicas, which agree."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        result = build(popxl.variable(data))
        stream = popxl.d2h_stream(result.shape, result.dtype)
        ops.host_store(stream, result)
    with popxl.Session(ir, "ipu_model") as session:
        found = session.run()[stream]
    np.testing.assert_array_equal(found[0], found[1])
    return found[0]


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "x + 1": lambda x: x + 1,
    "1 + x": lambda x: 1 + x,
    "x - 2": lambda x: x - 2,
    "2 - x": lambda x: 2 - x,
    "x * x": lambda x: x * x,
    "3 * x": lambda x: 3 * x,
    "x / 4": lambda x: x / 4,
    "1 / (x + 3)": lambda x: 1 / (x + 3),
    "x ** 2": lambda x: x**2,
    "2 ** x": lambda x: 2**x,
    "-x": lambda x: -x,
    "abs(x)": abs,
    "x @ x.T": lambda x: x @ x.T,
    "array @ x": lambda x: (
        np.ones((2, 3), np.float32).tolist() @ x
        if isinstance(x, popxl.Tensor)
        else np.ones((2, 3), np.float32) @ x
    ),
    "x > 1": lambda x: x > 1,
    "x < 1": lambda x: x < 1,
    "(x > 0) & (x < 2)": lambda x: (x > 0) & (x < 2),
    "(x > 1) | (x < -1)": lambda x: (x > 1) | (x < -1),
    "~(x > 1)": lambda x: ~(x > 1),
    "(x + 3) % 2": lambda x: (x + 3) % 2,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_numpys(name: str) -> None:
    np.testing.assert_allclose(run(OPERATORS[name]), OPERATORS[name](DATA), rtol=1e-6)


ARRAYS = {
    "array": np.linspace(0.5, 2, 12, dtype=np.float32).reshape(3, 4),
    "array of float64": np.linspace(0.5, 2, 12).reshape(3, 4),
    "row": np.array([1.0, 2.0, 3.0, 4.0], np.float32),
    "number": np.float32(2),
    "number of float64": np.float64(3),
    "integer": np.int64(2),
    "array without axes": np.array(2.0),
}
FUNCTIONS = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.pow,
    operator.mod,
    operator.gt,
    operator.lt,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_on_either_side_are_one_constant_and_one_op(
    name: str, function: Callable[..., Any]
) -> None:
    given, base = ARRAYS[name], np.abs(DATA) + 0.25

    def build(x: popxl.Tensor) -> popxl.Tensor:
        graph = popxl.gcg()
        before = len(graph._pb_graph.getOps()), len(graph.constants)
        results = [function(given, x), function(x, given)]
        assert all(isinstance(result, popxl.Tensor) for result in results)
        assert (len(graph._pb_graph.getOps()), len(graph.constants)) == (
            before[0] + 2,
            before[1] + 2,
        )
        return ops.concat(results)

    expected = np.concatenate([function(given, base), function(base, given)])
    np.testing.assert_allclose(run(build, base), expected, rtol=1e-5)


def test_an_array_is_multiplied_as_a_matrix_from_either_side() -> None:
    square = np.arange(9.0).reshape(3, 3)
    np.testing.assert_array_equal(run(lambda x: square @ x), square @ DATA)
    np.testing.assert_array_equal(run(lambda x: x.T @ square), DATA.T @ square)


def test_numpy_makes_no_arrays_of_tensors() -> None:
    with popxl.Ir().main_graph as graph:
        x = popxl.variable(DATA)
        for function in (np.add, np.multiply, np.exp):
            with pytest.raises(TypeError):
                function(*([x] * function.nin))
        array = DATA.copy()
        with pytest.raises(TypeError):
            array += x
        with pytest.raises(TypeError):
            iter(x)
        with pytest.raises((TypeError, ValueError)):
            popxl.constant([x, x])
    assert not graph._pb_graph.getOps()


def test_an_operand_of_no_elements_is_refused() -> None:
    with popxl.Ir().main_graph:
        x, numbers = popxl.constant([1.0]), []
        for empty in ([], np.zeros((0, 3), np.float32)):
            for function in (operator.add, operator.mul):
                with pytest.raises(ValueError, match="The value has 0 elements"):
                    function(empty, x)
                with pytest.raises(ValueError, match="The value has 0 elements"):
                    function(x, empty)
        with pytest.raises(ValueError, match="The value has 0 elements"):
            numbers += x


def test_adding_in_place_changes_the_tensor() -> None:
    def build(x: popxl.Tensor) -> popxl.Tensor:
        before = x
        x += 1
        return ops.concat([before, x])

    np.testing.assert_array_equal(run(build), np.concatenate([DATA + 1, DATA + 1]))


def test_what_is_no_number_has_no_operator() -> None:
    with popxl.Ir().main_graph:
        x = popxl.constant([1.0])
        for other in ("text", None, {}):
            for apply in (operator.add, operator.mul, operator.gt):
                with pytest.raises(TypeError):
                    apply(x, other)


KEYS: dict[str, Any] = {
    "0": 0,
    "-1": -1,
    "1:": slice(1, None),
    "::-1": slice(None, None, -1),
    "1, 2": (1, 2),
    ":, -1": (slice(None), -1),
    "0:2, ::-2": (slice(0, 2), slice(None, None, -2)),
    ":": slice(None),
    "[2, 0]": [2, 0],
    "array": np.array([[0, 1], [1, 2]]),
    "np.int64": np.int64(1),
}


@pytest.mark.parametrize("name", KEYS)
def test_indices_are_numpys(name: str) -> None:
    np.testing.assert_array_equal(run(lambda x: x[KEYS[name]]), DATA[KEYS[name]])


def test_tensors_are_indices_and_masks() -> None:
    chosen = run(lambda x: x[popxl.constant([2, 1], popxl.uint32)])
    np.testing.assert_array_equal(chosen, DATA[[2, 1]])
    np.testing.assert_array_equal(run(lambda x: x[x > 1]), np.where(DATA > 1, DATA, 0))
    mask = DATA > 1
    np.testing.assert_array_equal(run(lambda x: x[mask]), np.where(mask, DATA, 0))


@pytest.mark.parametrize("key", [1.5, "a", None, (0, "a"), (0, 1.0), ...])
def test_other_keys_are_no_indices(key: Any) -> None:
    text = r"Only integers, slices \(`:`\), integer tensors and boolean tensors are valid indices"
    with popxl.Ir().main_graph:
        x = popxl.constant(DATA)
        with pytest.raises(TypeError, match=text):
            x[key]
        with pytest.raises(TypeError, match=text):
            x[popxl.constant([1.0])]


def test_indices_are_in_range() -> None:
    with popxl.Ir().main_graph:
        x = popxl.constant(DATA)
        for key in (3, -4, (0, 4)):
            with pytest.raises(IndexError, match="out of range"):
                x[key]
        with pytest.raises(IndexError, match="too many"):
            x[0, 0, 0]


METHODS: dict[str, tuple[Callable[[popxl.Tensor], popxl.Tensor], np.ndarray]] = {
    "T": (lambda x: x.T, DATA.T),
    "T_": (lambda x: x.T_, DATA.T),
    "transpose": (lambda x: x.transpose((1, 0)), DATA.T),
    "transpose_": (lambda x: x.transpose_((0, 1)), DATA),
    "reshape": (lambda x: x.reshape((2, -1)), DATA.reshape(2, 6)),
    "reshape_": (lambda x: x.reshape_((6, 2)), DATA.reshape(6, 2)),
    "flatten": (lambda x: x.flatten(), DATA.ravel()),
    "flatten_": (lambda x: x.flatten_(), DATA.ravel()),
    "detach": (lambda x: x.detach(), DATA),
    "detach_": (lambda x: x.detach_(), DATA),
    "diag": (lambda x: x.diag(), np.diag(DATA)),
    "rows": (lambda x: ops.concat([x[row].reshape((1, 4)) for row in range(len(x))]), DATA),
    "copy_to_ipu": (lambda x: x.copy_to_ipu(1, 0), DATA),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods(name: str) -> None:
    build, expected = METHODS[name]
    np.testing.assert_array_equal(run(build), expected)


def test_only_matrices_have_a_diagonal() -> None:
    with popxl.Ir().main_graph, pytest.raises(ValueError, match="Diag expected a 2d tensor"):
        popxl.constant([1.0]).diag()
