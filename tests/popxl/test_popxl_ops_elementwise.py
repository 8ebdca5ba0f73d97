"""PopXL's elementwise ops: values and gradients as PyTorch's, replicas that do not touch others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gpusim.popxl as popxl
from gpusim.popxl import ops
from tests.popxl import popxl_cases
from tests.popxl.popxl_cases import HALF, SINGLE, Case, Floats, Integers

X = Floats((3, 5))
ROW = Floats((5,))
POSITIVE = Floats((3, 5), 0.2, 3.0)
gelu = torch.nn.functional.gelu


def unary(op, reference, given=X, **options):
    return Case(op.__name__, op, [given], reference, **options)


def binary(op, reference, lhs=X, rhs=ROW, **options):
    return Case(op.__name__, op, [lhs, rhs], reference, **options)


UNARY = [
    unary(ops.abs, torch.abs),
    unary(ops.ceil, torch.ceil),
    unary(ops.cos, torch.cos),
    unary(ops.exp, torch.exp),
    unary(ops.floor, torch.floor),
    unary(ops.gelu, lambda x: gelu(x, approximate="tanh")),
    unary(ops.geluerf, gelu),
    unary(ops.identity, lambda x: x),
    unary(ops.log, torch.log, POSITIVE),
    unary(ops.log2, torch.log2, POSITIVE),
    unary(ops.negate, torch.neg),
    unary(ops.relu, torch.relu),
    unary(ops.sign, torch.sign),
    unary(ops.sin, torch.sin),
    unary(ops.sqrt, torch.sqrt, POSITIVE),
    unary(ops.swish, torch.nn.functional.silu),
    unary(ops.tanh, torch.tanh),
    unary(ops.detach, lambda x: x.detach() + 0 * x),
    Case("clip", lambda x: ops.clip(x, -0.5, 1.25), [X], lambda x: x.clip(-0.5, 1.25)),
    Case("clip without limits", ops.clip, [X], lambda x: x),
    Case("clamp", lambda x: ops.clamp(x, min=-0.5, max=1.25), [X], lambda x: x.clip(-0.5, 1.25)),
    Case("scalar", ops.tanh, [Floats(())], torch.tanh),
]

BINARY = [
    binary(ops.add, torch.add),
    binary(ops.sub, torch.sub, Floats((5,)), X),
    binary(ops.mul, torch.mul, Floats((3, 1)), Floats((4, 1, 5))),
    binary(ops.div, torch.div, X, POSITIVE),
    binary(ops.fmod, torch.fmod, Floats((3, 5), -9, 9), Floats((3, 5), 0.7, 3)),
    binary(ops.pow, torch.pow, POSITIVE, Floats((5,), -1, 2), scale=4),
    Case("add a scalar", ops.add, [X, Floats(())], torch.add),
    Case("pow of a number", lambda x: ops.pow(x, 3), [X], lambda x: x**3, scale=4),
    Case("maximum", ops.maximum, [X, Floats((5,)), Floats((3, 1))],
         lambda x, y, z: torch.maximum(torch.maximum(x, y), z)),
    Case("where", lambda x, y: ops.where(ops.greater(x, y), x, y), [X, Floats((5,))],
         torch.maximum),
    Case("operators", lambda x, y: (x + 1.5) * y - x / (2.0 + y * y) + -x, [X, X],
         lambda x, y: (x + 1.5) * y - x / (2.0 + y * y) - x, scale=3),
    Case("scaled_add", lambda x, y: ops.scaled_add(x, y, 0.5, -2.0), [X, X],
         lambda x, y: 0.5 * x - 2 * y),
    Case("scaled_add by tensors",
         lambda x, y, a, b: ops.scaled_add(x, y, a, b),
         [X, X, Floats(()), Floats(())],
         lambda x, y, a, b: a * x + b * y),
    Case("a tensor used twice", lambda x: x * x + ops.sin(x), [X], lambda x: x * x + torch.sin(x)),
]  # fmt: skip

TESTS = [
    binary(ops.equal, torch.eq, Integers((3, 5), 0, 3), Integers((5,), 0, 3), differentiable=False),
    binary(ops.greater, torch.gt, differentiable=False),
    binary(ops.logical_and, torch.logical_and, Integers((3, 5), 0, 2, popxl.bool),
           Integers((5,), 0, 2, popxl.bool), differentiable=False),
    binary(ops.logical_or, torch.logical_or, Integers((3, 5), 0, 2, popxl.bool),
           Integers((5,), 0, 2, popxl.bool), differentiable=False),
    unary(ops.logical_not, torch.logical_not, Integers((3, 5), 0, 2, popxl.bool),
          differentiable=False),
    Case("integers divide as in C", ops.div, [Integers((9,), -9, 9), Integers((9,), 1, 4)],
         lambda x, y: torch.div(x, y, rounding_mode="trunc"), False),
    Case("increment_mod", lambda t: ops.increment_mod(t, 3, 5),
         [Integers((9,), 0, 5, popxl.uint32)], lambda t: (t + 3) % 5, False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["float32", "float16"])
@pytest.mark.parametrize("case", UNARY + BINARY, ids=str)
def test_values_and_gradients_are_pytorchs(case, dtype):
    popxl_cases.check(case, dtype)


@pytest.mark.parametrize("case", TESTS, ids=str)
def test_tests_and_integers_are_pytorchs(case):
    popxl_cases.check(case, SINGLE)


@pytest.mark.parametrize(
    ("op", "function"),
    [(ops.isnan, np.isnan), (ops.isinf, np.isinf), (ops.isfinite, np.isfinite)],
)
def test_infinities_and_nans_are_told_apart(op, function):
    given = np.array([1.0, np.inf, -np.inf, np.nan], np.float32)
    ir = popxl.Ir()
    with ir.main_graph:
        stream = popxl_cases.stored(op(popxl.constant(given)))
    with popxl.Session(ir) as session:
        assert session.run()[stream].tolist() == function(given).tolist()


IN_PLACE = [
    (ops.exp_, np.exp),
    (ops.relu_, lambda x: np.maximum(x, 0)),
    (ops.gelu_, lambda x: gelu(torch.tensor(x), approximate="tanh").numpy()),
    (ops.geluerf_, lambda x: gelu(torch.tensor(x)).numpy()),
    (ops.swish_, lambda x: torch.nn.functional.silu(torch.tensor(x)).numpy()),
    (lambda t: ops.add_(t, popxl.constant(2.0)), lambda x: x + 2),
    (lambda t: ops.scaled_add_(t, popxl.constant(np.ones(6, np.float32)), 2.0, 3.0),
     lambda x: 2 * x + 3),
    (lambda t: ops.increment_mod_(t, 1.0, 2.0), lambda x: (x + 1) % 2),
]  # fmt: skip


@pytest.mark.parametrize(("op", "function"), IN_PLACE)
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_in_place_ops_change_their_variable(op, function, replicas, one_by_one):
    start = np.linspace(-2, 2, 6).astype(np.float32)
    ir = popxl.Ir(replication=replicas)
    ir._pb_ir.getSessionOptions().oneByOne = one_by_one
    with ir.main_graph, popxl.in_sequence():
        variable = popxl.variable(start)
        stream = popxl_cases.stored(op(variable))
    with popxl.Session(ir, "ipu_model") as session:
        result = session.run()[stream]
    np.testing.assert_allclose(session.get_tensor_data(variable), function(start), 1e-5, 1e-6)
    np.testing.assert_array_equal(
        result.reshape(replicas, 6), np.broadcast_to(variable._host, (replicas, 6))
    )


def test_a_mix_of_dtypes_is_an_error_that_names_both():
    with popxl.Ir().main_graph:
        with pytest.raises(TypeError, match="float32, float16"):
            ops.add(popxl.constant([1.0]), popxl.constant([1.0], popxl.float16))


def test_shapes_that_do_not_broadcast_are_an_error():
    with popxl.Ir().main_graph:
        with pytest.raises(ValueError, match=r"\(2,\), \(3,\)"):
            ops.mul(popxl.constant([1.0, 2.0]), popxl.constant([1.0, 2.0, 3.0]))


def test_each_of_several_greatest_elements_gets_the_gradient():
    ir = popxl.Ir()
    graph = ir.create_graph(lambda t: ops.max(t), popxl.TensorSpec((3,), SINGLE))
    info = popxl.transforms.autodiff(graph)
    with ir.main_graph:
        call = ops.call_with_info(graph, popxl.constant([2.0, 1.0, 2.0]))
        (gradient,) = ops.call(info.graph, popxl.constant(5.0), inputs_dict=info.inputs_dict(call))
        stream = popxl_cases.stored(gradient)
    with popxl.Session(ir) as session:
        assert session.run()[stream].tolist() == [5.0, 0.0, 5.0]
