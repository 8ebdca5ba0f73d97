"""PopXL's ops that change tensors, run graphs, keep state or draw numbers, all in the same grid:
float32 and float16; 1, 2 and 4 replicas; batched and one by one. PyTorch says what is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gpusim.popxl as popxl
from gpusim.popxl import fp8_utils, ops
from gpusim.popxl.ops import collectives, var_updates
from tests.popxl import popxl_cases
from tests.popxl.popxl_cases import HALF, REPLICAS, SINGLE, Case, Floats, Integers

X, ROW = Floats((3, 5), wanted=False), Floats((5,), wanted=False)
POSITIVE = Floats((5,), 0.1, 2.0, wanted=False)
functional = torch.nn.functional


def still(name, build, reference, *inputs, **options):
    """A case without gradients."""
    return Case(name, build, inputs, reference, differentiable=False, **options)


def changed(op, reference, *inputs, **options):
    """An op that changes its first input: that, and what it returns, are both the new values."""
    inputs = inputs or (X,)
    return still(
        op.__name__,
        lambda t, *others: [op(t, *others), t],
        lambda *given: [reference(*given)] * 2,
        *inputs,
        **options,
    )


def named(name, function):
    function.__name__ = name
    return function


IN_PLACE = [
    changed(ops.add_, torch.add, X, ROW),
    changed(named("scaled_add_", lambda x, y: ops.scaled_add_(x, y, 2.0, -0.5)),
            lambda x, y: 2 * x - 0.5 * y, X, X),
    changed(ops.detach_, lambda x: x),
    changed(ops.exp_, torch.exp),
    changed(ops.gelu_, lambda x: functional.gelu(x, approximate="tanh")),
    changed(ops.geluerf_, functional.gelu),
    changed(ops.relu_, torch.relu),
    changed(ops.swish_, functional.silu),
    changed(named("increment_mod_", lambda x: ops.increment_mod_(x, 1.0, 2.0)),
            lambda x: (x + 1) % 2, Floats((3, 5), 0.0, 0.9)),
    changed(named("dynamic_update_",
                  lambda x, i, y: ops.dynamic_update_(x, i, y, [0], [1], True)),
            lambda x, i, y: torch.cat([y if row == i[0] else x[row:row + 1] for row in range(3)]),
            X, Integers((1,), 0, 3, popxl.uint32), Floats((1, 5))),
]  # fmt: skip

VALUES = [
    still("isnan", lambda x: ops.isnan(ops.sqrt(x)), lambda x: x < 0, X),
    still("isinf", lambda x: ops.isinf(x / ops.relu(x)), lambda x: x < 0, X),
    still("histogram", lambda x: ops.histogram(x, [-1.0, 0.0, 0.5], False),
          lambda x: torch.bincount(torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5]).double(),
                                                   right=True).flatten(), minlength=4), X),
    still("onehot", lambda x, i: ops.cast(ops.onehot(
              i, popxl.constant(4, popxl.int32), popxl.constant([-1.0, 2.0], x.dtype), 0),
              x.dtype),
          lambda x, i: functional.one_hot(i, 4).T.double() * 3 - 1,
          ROW, Integers((5,), 0, 4)),
    still("nll_loss_with_softmax_grad",
          lambda x, i: ops.nll_loss_with_softmax_grad(ops.softmax(x, 1), i),
          lambda x, i: [functional.cross_entropy(x, i),
                        (torch.softmax(x, 1) - functional.one_hot(i, 5)) / 3],
          X, Integers((3,), 0, 5), scale=2),
    still("lamb_square", lambda x: ops.cast(ops.lamb_square(x), x.dtype), lambda x: (x * x).sum(),
          X),
]  # fmt: skip


def moved(factor):
    """A tensor as the factor of an update, which is a number in float32."""
    return ops.cast(factor, popxl.float32)


def corrected(name, updater, **numbers):
    def build(m, v, w):
        step = popxl.constant(2.0)  # counted on to 3
        term = updater(m, v, weight=w, time_step=step, beta1=0.9, epsilon=1e-2, **numbers)
        return ops.cast(term, m.dtype)

    return named(name, build)


def adam(m, v, w):
    return m / (1 - 0.9**3) / (torch.sqrt(v / (1 - 0.99**3)) + 1e-2)


FACTOR = Floats((), 0.2, 0.8, wanted=False)
UPDATES = [
    changed(var_updates.copy_var_update_, lambda x, y: y, X, X),
    changed(named("accumulate_", lambda x, y, f: var_updates.accumulate_(x, y, moved(f))),
            lambda x, y, f: x + f * y, X, X, FACTOR),
    changed(named("scale", lambda x, f: var_updates.accumulator_scale_(x, moved(f))),
            lambda x, f: x * f, X, FACTOR),
    changed(var_updates.accumulator_zero_, torch.zeros_like),
    changed(named("sparse_accumulate_",
                  lambda x, y, i: var_updates.sparse_accumulate_(x, y, i, 0, 0.5)),
            lambda x, y, i: x.index_add(0, i, 0.5 * y),
            X, Floats((4, 5)), Integers((4,), 0, 3, popxl.uint32)),
    changed(named("adam_var_update",
                  lambda w, x: var_updates.adam_var_update(
                      w, x, ops.lamb_square(w), ops.lamb_square(x), 0.1)),
            lambda w, x: w - 0.1 * x * torch.linalg.norm(w) / torch.linalg.norm(x), ROW, ROW),
    still("adam", corrected("adam", var_updates.adam_updater, beta2=0.99, weight_decay=0.0), adam,
          ROW, POSITIVE, ROW),
    still("lamb", corrected("lamb", var_updates.lamb_updater, beta2=0.99, weight_decay=0.1),
          lambda m, v, w: adam(m, v, w) + 0.1 * w, ROW, POSITIVE, ROW),
    still("adamax", corrected("adamax", var_updates.adamax_updater),
          lambda m, v, w: m / (1 - 0.9**3) / (v + 1e-2), ROW, POSITIVE, ROW),
]  # fmt: skip


def buffered(x):
    """Through a remote buffer: stored, loaded, and loaded into another tensor."""
    buffer = popxl.remote_buffer(x.shape, x.dtype, 2)
    with popxl.in_sequence():
        ops.remote_store(buffer, 1, x)
        loaded = ops.remote_load(buffer, popxl.constant(1, popxl.uint32))
        other = ops.remote_load_(buffer, 1, ops.init(x.shape, x.dtype))
    return loaded, other


def graph_of(function, *tensors):
    return popxl.gir().create_graph(function, *tensors)


def repeated(x, y):
    step = graph_of(lambda x, y: ops.tanh(x) * y, x, y)
    return ops.repeat(step, 3, x, y)[0]


def by_condition(x, y, i):
    """One branch on some replicas, the other one on others."""
    then = graph_of(lambda x, y: x * y, x, y)
    other = graph_of(lambda x: ops.tanh(x), x)
    return ops.conditional(ops.cast(i, popxl.bool), then, other, [x, y], [x])[0]


def straight(value, through):
    """A value whose gradient is that of another one."""
    return value.detach() + through - through.detach()


A = Floats((3, 5))
GRAPHS = [
    still("remote buffer", buffered, lambda x: [x, x], X),
    Case("repeat", repeated, [A, A],
         lambda x, y: torch.tanh(torch.tanh(torch.tanh(x) * y) * y) * y, scale=2),
    Case("conditional", by_condition, [A, A, Integers((), 0, 2)],
         lambda x, y, i: x * y if i else torch.tanh(x) + 0 * y),
    Case("all_reduce", lambda x, y: collectives.all_reduce([x, y], [0, 1]), [A, A],
         lambda x, y: [x + y, x + y]),
    Case("all_reduce_identical_inputs",
         lambda x, y: collectives.all_reduce_identical_inputs([x, y], [0, 1]), [A, A],
         lambda x, y: [straight(x, x + y), straight(y, x + y)]),
    Case("all_reduce_identical_grad_inputs",
         lambda x, y: collectives.all_reduce_identical_grad_inputs([x, y], [0, 1]), [A, A],
         lambda x, y: [straight(x + y, x), straight(x + y, y)]),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["float32", "float16"])
@pytest.mark.parametrize("case", IN_PLACE + VALUES + UPDATES + GRAPHS, ids=str)
def test_values_and_gradients_are_pytorchs(case, dtype):
    popxl_cases.check(case, dtype)


@pytest.mark.parametrize("float8", [popxl.float8_143, popxl.float8_152], ids=["143", "152"])
def test_casts_to_8_bits_and_back_are_the_hosts_on_every_replica(float8):
    def through(x):
        eighths = ops.pow2scale_cast_to_fp8(x, popxl.constant(1, popxl.int32), float8)
        return ops.pow2scale_cast_from_fp8(eighths, popxl.constant(-1, popxl.int32), HALF)

    def on_host(x):
        eighths = fp8_utils.host_pow2scale_cast_to_fp8(x.numpy(), float8, 1)
        return torch.tensor(fp8_utils.host_pow2scale_cast_from_fp8(eighths, HALF, -1)).double()

    popxl_cases.check(still("cast", through, on_host, X), HALF)


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["float32", "float16"])
def test_what_is_drawn_depends_on_the_seed_and_not_on_the_replicas(dtype):
    def draw(x, seed):
        parts = ops.split_random_seed(seed, 4)
        return [
            ops.dropout(x, parts[0], 0.5),
            ops.shaped_dropout(x, parts[1], (6, 1), 0.5),
            ops.random_uniform(parts[2], (6, 5), dtype=dtype),
            ops.random_normal(parts[3], (6, 5), dtype=dtype),
        ]

    case = Case("draws", draw, [Floats((6, 5)), Integers((2,), 0, 1 << 31, popxl.uint32)], draw)
    values = popxl_cases.values_of(case, dtype)
    slope = np.ones((REPLICAS, 6, 5), dtype.as_numpy())
    found = popxl_cases.run(case, dtype, values, cotangents=[slope] * 4)
    dropped, rows = found.outputs[0] == 0, found.outputs[1] == 0
    np.testing.assert_array_equal(found.outputs[0], np.where(dropped, 0, 2 * values[0]))
    np.testing.assert_array_equal(found.outputs[1], np.where(rows, 0, 2 * values[0]))
    assert (rows == rows[:, :, :1]).all() and dropped.any() and not dropped.all()
    np.testing.assert_array_equal(found.gradients[0], 2.0 * ~dropped + 2.0 * ~rows)
    alone = popxl_cases.run(case, dtype, values, cotangents=[slope] * 4, one_by_one=True)
    popxl_cases.assert_equal_bits(alone, found, REPLICAS, "one by one")
    for count in (1, 2):
        given = [value[:count] for value in values]
        fewer = popxl_cases.run(case, dtype, given, cotangents=[slope[:count]] * 4)
        popxl_cases.assert_equal_bits(fewer, found, count, f"on {count}")
