"""popxl's collectives over replicas and IPUs, and the updates of variables, against NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import gpusim
import gpusim.popxl as popxl
from gpusim.popxl import ops
from gpusim.popxl.ops import collectives, var_updates
from gpusim.popxl.transforms import autodiff

Build = Callable[..., popxl.Tensor]


def run(build: Build, *values: np.ndarray, replicas: int, **options: bool) -> np.ndarray:
    """What a function of tensors gives for values (replicas, *shape), one set for each replica.

    The same to the bit, replica by replica, unless `one_by_one` says which of both is meant.
    """
    if options:
        return run_once(build, *values, replicas=replicas, **options)
    found = run_once(build, *values, replicas=replicas, one_by_one=False)
    alone = run_once(build, *values, replicas=replicas, one_by_one=True)
    assert found.dtype == alone.dtype and found.tobytes() == alone.tobytes()
    return found


def run_once(
    build: Build, *values: np.ndarray, replicas: int, one_by_one: bool = False
) -> np.ndarray:
    ir = popxl.Ir(replication=replicas)
    ir.getSessionOptions().oneByOne = one_by_one
    with ir.main_graph, popxl.in_sequence():
        dtypes = [popxl.dtype.as_dtype(value) for value in values]
        streams = [
            popxl.h2d_stream(value.shape[1:], dtype)
            for value, dtype in zip(values, dtypes, strict=True)
        ]
        result = build(*map(ops.host_load, streams))
        output = popxl.d2h_stream(result.shape, result.dtype)
        ops.host_store(output, result)
    with popxl.Session(ir, "ipu_model") as session:
        given = {
            stream: value[0] if replicas == 1 else value
            for stream, value in zip(streams, values, strict=True)
        }
        found = session.run(given)[output]
    return found[None] if replicas == 1 else found


def numbers(*shape: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    """Small multiples of 1/4, with which sums and products of a few are exact in float16."""
    return (np.random.default_rng(seed).integers(-6, 7, shape) / 4).astype(dtype)


def groups_of(replicas: int) -> list[tuple[int, int]]:
    """Strides and sizes of the groups of so many replicas."""
    return {1: [(1, 1)], 2: [(1, 2), (1, 1)], 4: [(1, 4), (1, 2), (2, 2)]}[replicas]


CASES = [(replicas, *group) for replicas in (1, 2, 4) for group in groups_of(replicas)]
each_group = pytest.mark.parametrize(("replicas", "stride", "size"), CASES)
each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float16])
FOLDS = {
    "add": lambda rows: functools.reduce(np.add, rows),
    "mean": lambda rows: functools.reduce(np.add, rows) / len(rows),
    "mul": lambda rows: functools.reduce(np.multiply, rows),
    "min": lambda rows: np.min(rows, axis=0),
    "max": lambda rows: np.max(rows, axis=0),
    "and": lambda rows: np.all(rows, axis=0),
    "or": lambda rows: np.any(rows, axis=0),
    "square_add": lambda rows: functools.reduce(np.add, [row * row for row in rows]),
    "local": None,
}


def folded(values: np.ndarray, members: Sequence[Sequence[int]], op: str) -> np.ndarray:
    """The reduction over each group, on all of its replicas."""
    if op == "local":
        return values
    result = np.empty_like(values)
    for group in members:
        result[list(group)] = FOLDS[op]([values[row] for row in group])
    return result


def members_of(replicas: int, stride: int, size: int) -> tuple[tuple[int, ...], ...]:
    return gpusim.Groups.from_stride(replicas, stride, size).members


# ---------------------------------------------------------------- over replicas


@each_dtype
@each_group
@pytest.mark.parametrize("op", FOLDS)
def test_all_reduce(replicas: int, stride: int, size: int, op: str, dtype: type) -> None:
    values = numbers(replicas, 2, 3, dtype=dtype)
    expected = folded(values, members_of(replicas, stride, size), op)

    def reduced(t: popxl.Tensor) -> popxl.Tensor:
        group = popxl.gir().replica_grouping(stride, size)
        return collectives.replicated_all_reduce(t, op, group)

    def in_place(t: popxl.Tensor) -> popxl.Tensor:
        group = popxl.gir().replica_grouping(stride, size)
        changed = collectives.replicated_all_reduce_(t, op, group)
        return ops.concat([changed, t])

    np.testing.assert_array_equal(run(reduced, values, replicas=replicas), expected)
    found = run(in_place, values, replicas=replicas)
    np.testing.assert_array_equal(found, np.concatenate([expected, expected], axis=1))


def test_truth_values_are_reduced_as_such() -> None:
    values = np.array([[True, True, False], [True, False, False]])
    for op, expected in (("add", values.any(0)), ("mul", values.all(0)), ("max", values.any(0))):
        found = run(lambda t, op=op: collectives.replicated_all_reduce(t, op), values, replicas=2)
        np.testing.assert_array_equal(found, [expected] * 2)


@each_dtype
@each_group
@pytest.mark.parametrize("mode", ["new_axis", "concat 0", "concat 1", "auto", "meta_shape"])
def test_all_gather(replicas: int, stride: int, size: int, mode: str, dtype: type) -> None:
    values = numbers(replicas, 2, 3, dtype=dtype)
    members = members_of(replicas, stride, size)
    output_shape, _, axis = mode.partition(" ")

    def gathered(t: popxl.Tensor) -> popxl.Tensor:
        group = popxl.gir().replica_grouping(stride, size)
        if mode == "meta_shape":
            t = collectives.replica_sharded_slice(t, group)
        return collectives.replicated_all_gather(t, int(axis or 0), group, output_shape)

    def join(rows: list[np.ndarray]) -> np.ndarray:
        if mode == "new_axis":
            return np.stack(rows)
        if mode == "meta_shape":
            part = -(-6 // size)
            flat = [row.ravel()[k * part : (k + 1) * part] for k, row in enumerate(rows)]
            return np.concatenate(flat).reshape(2, 3)
        return np.concatenate(rows, axis=int(axis or 0))

    group_of = {row: group for group in members for row in group}
    expected = [join([values[row] for row in group_of[r]]) for r in range(replicas)]
    np.testing.assert_array_equal(run(gathered, values, replicas=replicas), expected)


@each_dtype
@each_group
@pytest.mark.parametrize("op", ["add", "mean", "max", "local"])
def test_reduce_scatter(replicas: int, stride: int, size: int, op: str, dtype: type) -> None:
    values = numbers(replicas, 7, dtype=dtype)
    members = members_of(replicas, stride, size)
    whole = folded(values, members, op)
    part = -(-7 // size)
    padded = np.pad(whole, ((0, 0), (0, part * size - 7)))
    place = {row: k for group in members for k, row in enumerate(group)}
    expected = [padded[r, place[r] * part : (place[r] + 1) * part] for r in range(replicas)]
    metas: list[tuple[int, ...]] = []

    def scattered(t: popxl.Tensor) -> popxl.Tensor:
        group = popxl.gir().replica_grouping(stride, size)
        plain = collectives.replicated_reduce_scatter(t, op, group)
        shard = collectives.replicated_reduce_scatter(t, op, group, True)
        metas[:] = plain.meta_shape, shard.meta_shape
        return plain

    np.testing.assert_array_equal(run(scattered, values, replicas=replicas), expected)
    assert metas == [(), (7,)]


@each_dtype
@each_group
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_replicated_slice(replicas: int, stride: int, size: int, axis: int, dtype: type) -> None:
    values = numbers(replicas, 4, 8, dtype=dtype)
    place = {row: k for group in members_of(replicas, stride, size) for k, row in enumerate(group)}
    expected = [np.split(values[r], size, axis)[place[r]] for r in range(replicas)]
    if (4, 8)[axis] == size:  # an axis as long as the group is dropped
        expected = [np.squeeze(part, axis) for part in expected]

    def sliced(t: popxl.Tensor) -> popxl.Tensor:
        group = popxl.gir().replica_grouping(stride, size)
        return collectives.replicated_slice(t, axis, group)

    np.testing.assert_array_equal(run(sliced, values, replicas=replicas), expected)


LINEAR: dict[str, Build] = {
    "all_reduce add": lambda t, group: collectives.replicated_all_reduce(t, "add", group),
    "all_reduce mean": lambda t, group: collectives.replicated_all_reduce(t, "mean", group),
    "all_reduce local": lambda t, group: collectives.replicated_all_reduce(t, "local", group),
    "reduce_scatter add": lambda t, group: collectives.replicated_reduce_scatter(t, "add", group),
    "reduce_scatter mean": lambda t, group: collectives.replicated_reduce_scatter(t, "mean", group),
}


@each_group
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_are_the_adjoint_over_all_replicas(
    replicas: int, stride: int, size: int, name: str
) -> None:
    values, shapes = numbers(replicas, 2, 3), []

    def forward(t: popxl.Tensor) -> popxl.Tensor:
        result = LINEAR[name](t, popxl.gir().replica_grouping(stride, size))
        shapes.append(result.shape)
        return result

    out = run(forward, values, replicas=replicas)
    cotangent = numbers(replicas, *shapes[0], seed=1)

    found = run(lambda t, ct: gradient(forward, t, ct)[1], values, cotangent, replicas=replicas)
    assert found.shape == values.shape
    np.testing.assert_allclose((found * values).sum(), (out * cotangent).sum(), rtol=1e-6)


def gradient(
    forward: Build, t: popxl.Tensor, ct: popxl.Tensor | None = None
) -> tuple[popxl.Tensor, popxl.Tensor]:
    """The result of a function, and its gradient for a cotangent, by default the result itself."""
    graph = popxl.gir().create_graph(forward, t)
    info = autodiff(graph)
    site = ops.call_with_info(graph, t)
    out = site.outputs[0]
    (back,) = ops.call(info.graph, out if ct is None else ct, inputs_dict=info.inputs_dict(site))
    return out, back


@each_group
@pytest.mark.parametrize("mode", ["new_axis", "concat 0", "concat 1", "meta_shape"])
def test_the_gradient_of_a_gather_takes_each_replicas_part(
    replicas: int, stride: int, size: int, mode: str
) -> None:
    """The gradient of y = all_gather(x), applied to y, is x on every replica: nothing is summed."""
    values = numbers(replicas, 5, 3)
    shape, _, axis = mode.partition(" ")

    def shards(t: popxl.Tensor) -> popxl.Tensor:
        group = popxl.gir().replica_grouping(stride, size)
        return collectives.replica_sharded_slice(t, group) if shape == "meta_shape" else t

    def gathered(t: popxl.Tensor) -> popxl.Tensor:
        group = popxl.gir().replica_grouping(stride, size)
        return collectives.replicated_all_gather(t, int(axis or 0), group, shape)

    given = run(shards, values, replicas=replicas)
    found = run(lambda t: gradient(gathered, shards(t))[1], values, replicas=replicas)
    np.testing.assert_array_equal(found, given)


@each_group
@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_drops_an_axis_as_long_as_the_group_and_its_gradient_has_it(
    replicas: int, stride: int, size: int, axis: int
) -> None:
    shape = (size, 4, 3) if axis == 0 else (4, size, 3)
    values = np.broadcast_to(numbers(*shape), (replicas, *shape))
    shapes: list[tuple[int, ...]] = []

    def sliced(t: popxl.Tensor) -> popxl.Tensor:
        return collectives.replicated_slice(t, axis, popxl.gir().replica_grouping(stride, size))

    def back(t: popxl.Tensor) -> popxl.Tensor:
        part, joined = gradient(sliced, t)
        shapes.append(part.shape)
        return joined

    np.testing.assert_array_equal(run(back, values, replicas=replicas), values)
    assert set(shapes) == {(4, 3)}


@pytest.mark.parametrize("order", ["linear", "ring"])
def test_sums_are_folded_as_the_reduction_context_says(order: str) -> None:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float16)
    with gpusim.reduction(order=order, accumulate=np.float16):
        found = run(collectives.replicated_all_reduce, values, replicas=4)
        expected = gpusim.collectives.psum(values).value
    np.testing.assert_array_equal(found, [expected] * 4)


def test_what_collectives_refuse() -> None:
    with popxl.Ir(replication=2).main_graph:
        t = popxl.constant(np.zeros((3, 2), np.float32))
        with pytest.raises(ValueError, match=r"Not a valid op: sum\. Must choose from: add, mean"):
            collectives.replicated_all_reduce(t, "sum")
        with pytest.raises(ValueError, match=r"output_shape must equal one of .* Value: flat"):
            collectives.replicated_all_gather(t, output_shape="flat")
        with pytest.raises(
            ValueError, match=r"Axis should be an int\. Type: .*float.* Value: 0\.5"
        ):
            collectives.replicated_all_gather(t, axis=0.5)
        with pytest.raises(ValueError, match="out of range"):
            collectives.replicated_all_gather(t, axis=2)
        with pytest.raises(ValueError, match="do not make up the meta_shape"):
            collectives.replicated_all_gather(t, output_shape="meta_shape")
        with pytest.raises(ValueError, match=r"equally divide axis\. Axis size: 3\. Replica group"):
            collectives.replicated_slice(t)


# ---------------------------------------------------------------- over the IPUs of a replica

IPUS: dict[str, tuple[Callable[..., list[popxl.Tensor]], bool, bool]] = {
    # the op, whether its outputs are reduced, and whether its inputs' gradients are
    "all_reduce": (collectives.all_reduce, True, True),
    "identical inputs": (collectives.all_reduce_identical_inputs, False, True),
    "identical gradients": (collectives.all_reduce_identical_grad_inputs, True, False),
}


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("name", IPUS)
def test_reductions_over_ipus_and_their_gradients(name: str, one_by_one: bool) -> None:
    reduce, reduces, reduces_gradients = IPUS[name]
    a, b, c, d = (numbers(2, 3, seed=seed) for seed in range(4))

    def build(*given: popxl.Tensor) -> popxl.Tensor:
        graph = popxl.gir().create_graph(lambda x, y: reduce([x, y], [0, 1]), *given[:2])
        info = autodiff(graph)
        site = ops.call_with_info(graph, *given[:2])
        gradients = ops.call(info.graph, *given[2:], inputs_dict=info.inputs_dict(site))
        return ops.concat([*site.outputs, *gradients])

    forward = [a + b] * 2 if reduces else [a, b]
    backward = [c + d] * 2 if reduces_gradients else [c, d]
    found = run(build, a, b, c, d, replicas=2, one_by_one=one_by_one)
    np.testing.assert_array_equal(found, np.concatenate(forward + backward, axis=1))


@pytest.mark.parametrize("op", [op for op in FOLDS if op != "local"])
def test_operators_over_ipus(op: str) -> None:
    rows = [numbers(1, 4, seed=seed) for seed in range(3)]

    def build(*ts: popxl.Tensor) -> popxl.Tensor:
        return ops.concat(collectives.all_reduce(ts, [0, 1, 2], op))

    expected = np.concatenate([FOLDS[op](rows)] * 3, axis=1)
    np.testing.assert_array_equal(run(build, *rows, replicas=1), expected)


def test_ipus_have_to_be_known() -> None:
    with popxl.Ir().main_graph:
        a, b = popxl.constant(1.0), popxl.constant([1.0])
        with pytest.raises(ValueError, match="Could not automatically infer the IPU of all input"):
            collectives.all_reduce([a, a])
        with pytest.raises(ValueError, match=r"number of specified IPUs\. 2 != 1"):
            collectives.all_reduce([a, a], [0])
        with pytest.raises(ValueError, match="same shape and dtype"):
            collectives.all_reduce([a, b], [0, 1])


# ---------------------------------------------------------------- updates of variables


def half(t: np.ndarray) -> np.ndarray:
    return t.astype(np.float32)


UPDATES: dict[str, tuple[Callable[..., popxl.Tensor], Callable[..., np.ndarray]]] = {
    "copy": (lambda t, x, f: var_updates.copy_var_update_(t, x), lambda t, x, f: x),
    "add": (lambda t, x, f: var_updates.accumulate_(t, x), lambda t, x, f: t + x),
    "dampened": (var_updates.accumulate_, lambda t, x, f: t + f * x),
    "square": (var_updates.accumulate_square_, lambda t, x, f: t + f * x * x),
    "mean": (var_updates.accumulate_mean_, lambda t, x, f: (t * f + x) / (f + 1)),
    "average": (var_updates.accumulate_moving_average_, lambda t, x, f: f * t + (1 - f) * x),
    "average of squares": (
        var_updates.accumulate_moving_average_square_,
        lambda t, x, f: f * t + (1 - f) * x * x,
    ),
    "scale": (lambda t, x, f: var_updates.accumulator_scale_(t, f), lambda t, x, f: t * f),
    "zero": (lambda t, x, f: var_updates.accumulator_zero_(t), lambda t, x, f: 0 * t),
    "scale by 0": (lambda t, x, f: var_updates.accumulator_scale_(t, 0.0), lambda t, x, f: 0 * t),
}


@pytest.mark.parametrize("one_by_one", [False, True])
@each_dtype
@pytest.mark.parametrize("by_tensor", [False, True])
@pytest.mark.parametrize("name", UPDATES)
def test_accumulators(name: str, by_tensor: bool, dtype: type, one_by_one: bool) -> None:
    build, rule = UPDATES[name]
    t, x = numbers(2, 2, 3, dtype=dtype), numbers(2, 2, 3, dtype=dtype, seed=1)
    f = np.array([0.5, 0.25], np.float32) if by_tensor else np.full(2, 0.5, np.float32)

    def updated(t: popxl.Tensor, x: popxl.Tensor, f: popxl.Tensor) -> popxl.Tensor:
        changed = build(t, x, f if by_tensor else 0.5)
        return ops.concat([changed, t])

    exact = rule(t.astype(np.float64), x.astype(np.float64), f.reshape(2, 1, 1))
    found = run(updated, t, x, f, replicas=2, one_by_one=one_by_one)
    expected = np.concatenate([exact, exact], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-3 if dtype is np.float16 else 1e-6)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_repeated_indices_accumulate(axis: int, one_by_one: bool) -> None:
    t = numbers(2, 4, 5)
    indices = np.array([[0, 3, 0], [2, 2, 2]], np.uint32)
    shape = (3, 5) if axis == 0 else (4, 3)
    x = numbers(2, *shape, seed=1)
    expected = t.copy()
    for replica in range(2):
        where = (slice(None),) * axis + (indices[replica],)
        np.add.at(expected[replica], where, 0.5 * x[replica])

    def updated(t: popxl.Tensor, x: popxl.Tensor, i: popxl.Tensor) -> popxl.Tensor:
        return var_updates.sparse_accumulate_(t, x, i, axis, 0.5)

    found = run(updated, t, x, indices, replicas=2, one_by_one=one_by_one)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("one_by_one", [False, True])
@each_dtype
@pytest.mark.parametrize("kind", ["adam", "adam, not corrected", "lamb, decay", "adamax"])
def test_updater_terms(kind: str, dtype: type, one_by_one: bool) -> None:
    m, v, w = (numbers(2, 5, dtype=dtype, seed=seed) for seed in range(3))
    v, step = np.abs(v), np.array([0.0, 6.0], np.float32)
    corrected, decay = "not" not in kind, 0.1 if "decay" in kind else 0.0

    def build(*given: popxl.Tensor) -> popxl.Tensor:
        m, v, w, step = given
        common = {"weight": w, "time_step": step if corrected else None, "weight_decay": decay}
        if kind == "adamax":
            term = var_updates.adamax_updater(m, v, beta1=0.9, epsilon=1e-3, **common)
        else:
            updater = var_updates.lamb_updater if "lamb" in kind else var_updates.adam_updater
            term = updater(m, v, beta1=0.9, beta2=0.99, epsilon=1e-3, **common)
        return ops.concat([ops.cast(term, popxl.float32), ops.reshape(step, (1,))])

    t = step[:, None].astype(np.float64) + 1
    mean, spread = m.astype(np.float64), v.astype(np.float64)
    if corrected:
        mean = mean / (1 - 0.9**t)
    if kind == "adamax":
        term = mean / (spread + 1e-3)
    else:
        spread = spread / (1 - 0.99**t) if corrected else spread
        term = mean / (np.sqrt(spread) + 1e-3) + decay * w
    found = run(build, m, v, w, step, replicas=2, one_by_one=one_by_one)
    rtol = 1e-3 if dtype is np.float16 else 1e-5
    np.testing.assert_allclose(found[:, :5], term, rtol=rtol)
    np.testing.assert_array_equal(found[:, 5], step + (1 if corrected else 0))


@pytest.mark.parametrize("most", [None, 0.5])
def test_lamb_scales_by_the_ratio_of_norms(most: float | None) -> None:
    w, x = numbers(2, 5), numbers(2, 5, seed=1)
    x[1] = 0

    def build(w: popxl.Tensor, x: popxl.Tensor) -> popxl.Tensor:
        r1, r2 = ops.lamb_square(w), ops.lamb_square(x)
        return var_updates.adam_var_update(w, x, r1, r2, 0.1, most)

    r1, r2 = (np.sqrt((value**2).sum(axis=1, keepdims=True)) for value in (w, x))
    r1 = r1 if most is None else np.minimum(r1, most)
    ratio = np.where(r2 > 0, r1 / np.where(r2 > 0, r2, 1), 1)
    np.testing.assert_allclose(run(build, w, x, replicas=2), w - 0.1 * ratio * x, rtol=1e-6)


def test_what_updates_refuse() -> None:
    with popxl.Ir().main_graph:
        m, w = popxl.variable([1.0, 2.0]), popxl.variable([1.0, 2.0])
        with pytest.raises(ValueError, match=r"Weight decay requires weight to not be None\."):
            var_updates.adam_updater(m, m, weight_decay=0.1)
        with pytest.raises(ValueError, match="Bias correction requires both beta1 and beta2"):
            var_updates.adam_updater(m, m, time_step=popxl.variable(0.0), beta1=0.9)
        with pytest.raises(ValueError, match=r"AdaMax requires time_step to not be None\."):
            var_updates.adamax_updater(m, m)
        with pytest.raises(ValueError, match=r"X must have the shape \(2,\) of t, got \(1,\)"):
            var_updates.accumulate_(m, popxl.constant([1.0]))
        with pytest.raises(ValueError, match="A factor must have one element"):
            var_updates.accumulate_(m, w, w)
