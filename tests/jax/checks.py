"""What is checked of gpusim.jax, on the devices that JAX shows in this process."""

from __future__ import annotations

import gc
import os
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import ad
from jax.lax import pmean as imported_pmean
from jax.sharding import PartitionSpec as P

import gpusim.jax
from gpusim import Reduction, collectives
from gpusim.jax import ffi, ragged
from gpusim.jax.installation import refuse_sums
from gpusim.tools.compare.comparing import compare
from gpusim.tools.compare.report import sentences
from gpusim.tools.compare.runs import Run, read
from tests.collectives.test_ragged_all_to_all import Program, random_program, reference
from tests.oracles.budget import FULL, SEED, budget
from tests.oracles.machine_time import PATIENCE, until

DEVICES = jax.device_count()
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
SPLIT = jax.NamedSharding(MESH, P("i"))


def mapped(function: Callable[..., Any], *, check: bool = False, mesh: Any = MESH) -> Any:
    """The function on each device, on values whose leading axis is the devices'."""

    def local(*arguments: Any) -> Any:
        own = jax.tree.map(lambda x: x[0], arguments)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), function(*own))

    axes = P(mesh.axis_names)
    whole = jax.shard_map(local, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=check)
    return jax.jit(whole)


def same(found: Any, expected: Any) -> None:
    """Equal dtypes, shapes and bits."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes(), (found, expected)


def first(results: Any) -> Any:
    """The first device's value. (Indexing JAX's array would be a program with a sum.)"""
    return np.asarray(results)[0]


def everywhere(result: Any) -> Any:
    """A Result as stacked values."""
    if result.mapped:
        return np.stack(result.value)
    return np.broadcast_to(result.value, (DEVICES, *result.value.shape))


# ---------------------------------------------------------------- sums

DTYPES = ("float32", "float16", "bfloat16", "float64", "complex64", "int32", "float8_e4m3fn")


def values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """Values of all magnitudes, subnormal ones included, that no order sums to the same bits."""
    if np.dtype(dtype).kind == "i":
        return rng.integers(-(2**31), 2**31, shape).astype(dtype)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-4, 4, shape)
    if dtype == "float32":
        x[..., ::5] *= 1e-42
    if dtype == "complex64":
        x = x + 1j * rng.normal(size=shape)
    return x.astype(np.dtype(dtype))


def reductions() -> list[tuple[Reduction, tuple[str, ...]]]:
    """Orders, accumulators, roundings and twins, each with dtypes that it adds."""
    floating = DTYPES[:4]
    found = [
        (Reduction(order=order), DTYPES) for order in ("linear", "reverse", "tree", "ring", "exact")
    ]
    found += [
        (Reduction(order="ring", accumulate="float16"), ("float32", "float16")),
        (Reduction(order="tree", accumulate="float64"), floating),
        (Reduction(order="reverse", accumulate="bfloat16"), ("float32", "bfloat16")),
    ]
    found += [
        (
            Reduction(order=order, rounding="stochastic", seed=seed, accumulate=accumulate),
            ("float32", "float16", "bfloat16", "float8_e4m3fn")[: 2 if accumulate else 4],
        )
        for seed, (order, accumulate) in enumerate(
            [("ring", None), ("tree", None), ("linear", "float16"), ("reverse", "float16")]
        )
    ]
    for name, twin in Reduction.twins().items():
        least, most = ("openmpi", "openmpi-nonoverlapping"), 15
        if name not in least or DEVICES <= most:
            known = [dtype for dtype in twin.dtypes if dtype in DTYPES]
            found.append((Reduction.like(name), tuple(known)))
    if DEVICES in (8, 3) or FULL:
        return found
    return found[:1] + found[3::3]


def sums_have_the_bits_of_collectives() -> None:
    rng = np.random.default_rng(DEVICES)
    groups = [[*range(DEVICES)][::-2], [*range(DEVICES)][-2::-2]]  # of any sizes
    even = len({len(group) for group in groups}) == 1
    for reduction, dtypes in reductions():
        x = {dtype: values(rng, dtype, (DEVICES, 2 * DEVICES, 3)) for dtype in dtypes}
        floating = {dtype: v for dtype, v in x.items() if v.dtype.kind not in "iu"}

        def program(x: Any, floating: Any = floating) -> Any:
            means = {dtype: x[dtype] for dtype in floating}
            return (
                lax.psum(x, "i"),
                imported_pmean(means, "i"),
                lax.psum_scatter(x, "i", scatter_dimension=0, tiled=True),
                lax.psum(x, "i", axis_index_groups=groups),
                lax.psum_scatter(x, "i", axis_index_groups=groups, tiled=True) if even else {},
            )

        with gpusim.jax.installed(reduction):
            results = mapped(program)(x)
        number = 0
        plans = (
            (collectives.psum, {}),
            (collectives.pmean, {}),
            (collectives.psum_scatter, {"tiled": True}),
            (collectives.psum, {"groups": groups}),
            (collectives.psum_scatter, {"groups": groups, "tiled": True}),
        )
        for (collective, options), found in zip(plans, results, strict=True):
            if collective is collectives.pmean and reduction == Reduction.like("xla-cpu"):
                continue  # XLA's own quotient: tests/jax/faults.py
            for dtype in sorted(found):
                expected = collective(x[dtype], reduction=reduction, call=number, **options)
                same(found[dtype], everywhere(expected))
                number += 1


def extremes_have_the_bits_of_collectives() -> None:
    x = np.random.default_rng(1).normal(size=(DEVICES, 5)).astype(np.float32)
    x[0, 0], x[-1, 1], x[:, 2] = np.nan, -np.inf, 0.0
    x[0, 2] = -0.0
    with gpusim.jax.installed(Reduction()):
        largest, smallest = mapped(lambda x: (lax.pmax(x, "i"), lax.pmin(x, "i")))(x)
    assert np.isnan(largest[:, 0]).all()
    assert np.isnan(smallest[:, 0]).all()
    same(largest[:, 1:], everywhere(collectives.pmax(x))[:, 1:])
    same(smallest[:, 1:], everywhere(collectives.pmin(x))[:, 1:])


def typed_sums_and_their_gradients_agree() -> None:
    """With check_vma, where psum is another primitive: bits, and gradients under jit."""
    reduction = Reduction(order="ring", accumulate="float16")
    rng = np.random.default_rng(2)
    x, weights = (values(rng, "float32", (DEVICES, 2 * DEVICES)) for _ in range(2))
    with gpusim.jax.installed(reduction):
        for check in (False, True):

            def total(x: Any) -> Any:
                return lax.psum(x, "i") + lax.pcast(x * 0, "i", to="varying")

            same(first(mapped(lambda x: lax.psum(x, "i"), check=check)(x)), _fold(x, reduction))
            same(first(mapped(lambda x: lax.pmean(x, "i"), check=check)(x)), _mean(x, reduction))
        # The transposes: of psum without types a psum, of all_gather a psum_scatter.
        gathered = mapped(lambda x: lax.all_gather(x, "i", tiled=True))
        each = np.tile(weights, (1, DEVICES)) * (1 + np.arange(DEVICES, dtype=np.float32))[:, None]
        _, back = jax.vjp(gathered, x)
        expected = collectives.psum_scatter(each, tiled=True, reduction=reduction)
        same(first(jax.jit(back)(each)), everywhere(expected))
        _, back = jax.vjp(mapped(lambda x: lax.psum(x, "i")), x)
        same(
            first(jax.jit(back)(weights)),
            everywhere(collectives.psum(weights, reduction=reduction)),
        )
        _, back = jax.vjp(mapped(lambda x: lax.pmean(x, "i")), x)
        same(
            first(jax.jit(back)(weights)),
            everywhere(collectives.pmean(weights, reduction=reduction)),
        )

        # A replicated parameter's gradient is summed by the transpose of its broadcast.
        def loss(w: Any, x: Any) -> Any:
            return jax.shard_map(
                lambda w, x: lax.psum((w * x).sum(), "i"), mesh=MESH,
                in_specs=(P(), P("i")), out_specs=P(),
            )(w, x)  # fmt: skip

        w = np.ones(2 * DEVICES, np.float32)
        same(jax.jit(jax.grad(loss))(w, x), _fold(x, reduction))


def _fold(x: Any, reduction: Reduction) -> Any:
    return collectives.psum(x, reduction=reduction).value


def _mean(x: Any, reduction: Reduction) -> Any:
    return collectives.pmean(x, reduction=reduction).value


def pmap_and_eager_maps_are_reached() -> None:
    x = values(np.random.default_rng(3), "float32", (DEVICES, 7))
    with gpusim.jax.installed(Reduction(order="reverse")):
        expected = everywhere(collectives.psum(x, reduction=Reduction(order="reverse")))
        same(jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x), expected)
        eager = jax.shard_map(lambda x: lax.psum(x, "i"), mesh=MESH, in_specs=P("i"), out_specs=P())
        same(first(eager(x)), expected[0])
        # vmap inside: the entries of the batch are elements of one sum
        same(mapped(jax.vmap(lambda x: lax.psum(x, "i")))(x), expected)
        over_both = mapped(jax.vmap(lambda x: lax.psum(x, ("b", "i")), axis_name="b"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            over_both(np.ones((DEVICES, 4, 2), np.float32))
        assert any(issubclass(w.category, gpusim.jax.ReductionWarning) for w in caught)


def axes_have_their_own_reductions() -> None:
    """On a mesh of two axes; the devices of the mesh are in another order than JAX's."""
    rows = 1 if DEVICES % 2 else 2
    devices = np.array(jax.devices())[::-1].reshape(rows, -1)
    mesh = jax.sharding.Mesh(devices, ("x", "y"))
    x = values(np.random.default_rng(4), "float16", (DEVICES, 11))
    cube = x.reshape(rows, -1, 11)
    stochastic = Reduction(order="ring", rounding="stochastic", seed=8)
    chosen = {"x": Reduction(order="reverse"), "y": stochastic, ("y", "x"): Reduction(order="tree")}
    with gpusim.jax.installed(chosen), warnings.catch_warnings():
        warnings.simplefilter("error")
        program = mapped(
            lambda x: (lax.psum(x, "y"), lax.psum(x, "x"), lax.psum(x, ("y", "x"))), mesh=mesh
        )
        over_y, over_x, over_both = map(np.asarray, program(x))
        found = collectives.psum(cube.swapaxes(0, 1), reduction=stochastic, batch_ndim=1).value
        same(np.reshape(over_y, cube.shape)[:, 0], found)
        same(np.reshape(over_x, cube.shape)[0], collectives.psum(cube, reduction=chosen["x"]).value)
        ordered = cube.swapaxes(0, 1).reshape(x.shape)
        same(first(over_both), collectives.psum(ordered, reduction=chosen["y", "x"]).value)
        try:
            mapped(lambda x: lax.psum(x, ("x", "y")), mesh=mesh)(x)
        except ValueError as error:
            assert "give install an entry for the tuple ('x', 'y')" in str(error)
        else:
            raise AssertionError("two reductions for one sum")
    with gpusim.jax.installed({"x": None, "y": Reduction(order="reverse")}):
        left = mapped(lambda x: lax.psum(x, "x"), mesh=mesh)
        same(
            np.asarray(left(x)).reshape(cube.shape)[0], collectives.psum(cube).value
        )  # XLA's is linear


def axes_of_the_partitioner_stay_split() -> None:
    """shard_map over one axis of two, the other being the partitioner's."""
    mesh = jax.make_mesh(
        (2, DEVICES // 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    reduction = Reduction(order="reverse", accumulate="float16")
    for dtype in ("float32", "bfloat16"):
        x = values(np.random.default_rng(5), dtype, (2, 6 * DEVICES))
        with gpusim.jax.installed(replace(reduction, accumulate=dtype)):
            program = jax.jit(
                jax.shard_map(
                    lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P(),
                    axis_names={"x"}, check_vma=False,
                )
            )  # fmt: skip
            given = jax.device_put(x, jax.NamedSharding(mesh, P("x", "y")))
            found = program(given)
        same(first(found), _fold(x, replace(reduction, accumulate=dtype)))
        # XLA:CPU ends the process where JAX's own sum of bfloat16 is split so.
        split = dtype == "float32" and DEVICES // 2 > 1
        assert found.sharding.spec == (P(None, "y") if split else P()), found.sharding


def stochastic_rounding_is_numbered() -> None:
    """The same bits in each run of a program, others in each round of a loop and for `calls`."""
    reduction = Reduction(rounding="stochastic", accumulate="float16", seed=5)
    x = values(np.random.default_rng(6), "float32", (DEVICES, 50))

    def loop(x: Any) -> Any:
        return lax.scan(lambda carry, _: (carry, lax.psum(x, "i")), 0, None, length=3)[1]

    with gpusim.jax.installed(reduction) as installation:
        program = mapped(loop)
        once, again = np.asarray(program(x)), np.asarray(program(x))
        same(once, again)
        for k in range(3):
            expected = collectives.psum(x, reduction=reduction, call=k * 2**32).value
            same(once[0, k], expected)
        installation.calls = 7
        expected = collectives.psum(x, reduction=reduction, call=7).value
        same(np.asarray(program(x))[0, 0], expected)


def calls_of_one_function_keep_apart() -> None:
    """A jitted function called twice is one function in the program, and two calls on a device."""
    x = np.random.default_rng(7).normal(size=(DEVICES, 9)).astype(np.float32)
    inner = jax.jit(lambda x: lax.psum(x, "i"))
    with gpusim.jax.installed(Reduction(order="tree")):
        one, other = mapped(lambda x: (inner(x), inner(-2 * x)))(x)
    expected = collectives.psum(x, reduction=Reduction(order="tree")).value
    same(first(one), expected)
    same(first(other), -2 * expected)


def collectives_of_xla_may_follow() -> None:
    """XLA's own wait on the thread that goes on after ours, and ours come after XLA's."""
    x = np.random.default_rng(10).normal(size=(DEVICES, 6)).astype(np.float32)
    reduction = Reduction(order="reverse")

    def program(x: Any) -> Any:
        for _ in range(3):
            x = lax.ppermute(
                lax.psum(x, "i"), "i", [(k, (k + 1) % DEVICES) for k in range(DEVICES)]
            )
            x = lax.all_gather(x, "i")[-1] / DEVICES
        return x

    expected = x
    for _ in range(3):
        expected = everywhere(collectives.psum(expected, reduction=reduction)) / np.float32(DEVICES)
    with gpusim.jax.installed(reduction):
        call = mapped(program)
        runs = [call(x) for _ in range(5)]
        if DEVICES & (DEVICES - 1) == 0:  # otherwise XLA's quotients differ from NumPy's
            same(first(runs[-1]), expected[0])
        for run in runs:
            same(np.asarray(run), runs[0])


def the_rest_of_a_program_flushes_as_xla_does() -> None:
    x = np.full((DEVICES, 40), 2.0**-100, np.float32)

    def program(x: Any) -> Any:
        return lax.psum(x, "i") * 2.0**-40, lax.psum(x, "i") / 2.0**40 + lax.axis_index("i")

    by_xla = mapped(program)(x)
    assert not np.asarray(by_xla[0]).any()
    with gpusim.jax.installed(Reduction()):
        for _ in range(10):
            for found, expected in zip(mapped(program)(x), by_xla, strict=True):
                same(found, expected)


def hundred_runs_in_flight_do_not_mix() -> None:
    rng = np.random.default_rng(8)
    kinds = (Reduction(order="ring"), Reduction(order="tree", rounding="stochastic", seed=1))
    for reduction, dtype in zip(kinds, ("float32", "float16"), strict=True):
        xs = [values(rng, dtype, (DEVICES, 33 + k)) for k in range(2)]
        with gpusim.jax.installed(reduction):
            programs = [mapped(lambda x: lax.psum(x, "i")) for _ in xs]
            placed = [jax.device_put(x, SPLIT) for x in xs]
            failures: list[BaseException] = []

            def repeat(
                k: int, xs: Any = xs, programs: Any = programs, placed: Any = placed
            ) -> None:
                try:
                    expected = np.asarray(_fold(xs[k], reduction))  # noqa: B023
                    for _ in range(20):  # JAX itself hangs with more than 32 in flight
                        runs = [programs[k](placed[k]) for _ in range(5)]
                        for run in runs:
                            same(np.asarray(run)[-1], expected)
                except BaseException as error:
                    failures.append(error)  # noqa: B023

            threads = [threading.Thread(target=repeat, args=(k,)) for k in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures, failures[0]


# ---------------------------------------------------------------- ragged_all_to_all


def ragged_call(**options: Any) -> Callable[..., Any]:
    return lambda *arguments: lax.ragged_all_to_all(*arguments, axis_name="i", **options)


def random_plans_equal_the_reference() -> None:
    """Results, and the gradients: rows added where they were sent, zeros where rows arrived."""
    rng = np.random.default_rng([SEED, DEVICES])
    half = [*range(DEVICES)][::-1]
    partitions: list[Any] = [None, [half]]
    if DEVICES % 2 == 0:
        partitions += [[half[::2], half[1::2]], [[k, k + 1] for k in range(0, DEVICES, 2)]]
    names = "int8 bool complex64 float8_e4m3fn bfloat16 float16 float32 float64".split()
    with gpusim.jax.installed():
        for _ in range(budget(125) if DEVICES <= 64 else 2):
            groups = partitions[rng.integers(len(partitions))]
            row = ((), (3,), (2, 1, 2))[rng.integers(3)]
            dtype = np.dtype(names[rng.integers(len(names))])
            plan = random_program(
                rng, DEVICES, groups, row=row, per_member=int(rng.integers(1, 4)),
                rows=int(rng.integers(1, 4)),
            )  # fmt: skip
            arguments = {
                name: values.astype(dtype if name in ("operand", "output") else np.int32)
                for name, values in plan.arguments.items()
            }
            plan = Program(arguments, groups, 0)
            call = mapped(ragged_call(axis_index_groups=groups))
            same(call(*arguments.values()), reference(plan))
            if dtype.kind == "f" and dtype.itemsize >= 2:
                check_gradients(rng, plan, call)


def check_gradients(rng: np.random.Generator, plan: Program, call: Any) -> None:
    operand, output, *indices = plan.arguments.values()
    ct = rng.integers(-8, 9, output.shape).astype(output.dtype)  # sums of these are exact
    operand_ct, output_ct = np.zeros_like(operand), ct.copy()
    for _, sender, _, sent, receiver, written in plan.sends():
        operand_ct[sender, sent] += ct[receiver, written]
        output_ct[receiver, written] = 0

    def gradients(operand: Any, output: Any, ct: Any) -> Any:
        return jax.vjp(lambda *data: call(*data, *indices), operand, output)[1](ct)

    found = jax.jit(gradients)(operand, output, ct)
    same(found[0], operand_ct)
    same(found[1], output_ct)


def jaxs_own_cases_of_ragged_all_to_all() -> None:
    """JAX's tests of the collective, by their names, with arguments and results of our own."""
    size = DEVICES
    with gpusim.jax.installed():
        # a worked example, on two of the devices
        pair = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
        arguments = [
            np.array(each)
            for each in (
                [[1, 2, 2], [3, 4, 0]], [[0] * 4] * 2, [[0, 1]] * 2,
                [[1, 2], [1, 1]], [[0, 0], [1, 2]], [[1, 1], [2, 1]],
            )
        ]  # fmt: skip
        expected = np.array([[1, 3, 0, 0], [2, 2, 4, 0]])
        same(mapped(ragged_call(), mesh=pair)(*arguments), expected)  # jit(shard_map)
        same(mapped(ragged_call(), mesh=pair, check=True)(*arguments), expected)
        by_pmap = jax.pmap(ragged_call(), axis_name="i", devices=jax.devices()[:2])
        same(by_pmap(*arguments), expected)
        # under vmap outside, with all and with some arguments batched
        stacked = [np.stack([each, each]) for each in arguments]
        same(
            jax.jit(jax.vmap(mapped(ragged_call(), mesh=pair)))(*stacked), np.stack([expected] * 2)
        )
        some = jax.vmap(mapped(ragged_call(), mesh=pair), in_axes=(0, *[None] * 5))
        same(jax.jit(some)(stacked[0], *arguments[1:]), np.stack([expected] * 2))
        # each sends one row to each; with rows of several axes
        grid = np.arange(size * size * 6, dtype=np.float32).reshape(size, size, 2, 3)
        ones, along = (
            np.ones((size, size), np.int32),
            np.tile(np.arange(size, dtype=np.int32), (size, 1)),
        )
        same(
            mapped(ragged_call())(grid, np.zeros_like(grid), along, ones, along.T.copy(), ones),
            grid.swapaxes(0, 1),
        )
        # nothing is sent: the output is as it was
        none = np.zeros_like(ones)
        same(mapped(ragged_call())(grid, -grid, along, none, along.T.copy(), none), -grid)
        # groups under vmap, which JAX refuses
        members = [[*range(size)][::-1]]
        call = mapped(ragged_call(axis_index_groups=members))
        every = (grid, np.zeros_like(grid), along, ones, size - 1 - along.T, ones)
        twice = [np.stack([each, each]) for each in every]
        once = call(*every)
        same(jax.vmap(call)(*twice), np.stack([once, once]))
        # gradients under vmap outside, and the second derivative
        vmapped = jax.vmap(jax.grad(lambda x, *rest: (call(x, *rest) ** 2).sum() / 2))
        same(vmapped(*twice), twice[0])
        curved = jax.grad(lambda x: jax.grad(lambda x: (call(x, *every[1:]) ** 3).sum())(x).sum())
        same(jax.jit(curved)(grid), 6 * grid)
        # axes that JAX checks
        for wrong, message in (
            (np.ones((size, size), np.float32), "must be integer type"),
            (np.ones((size, size, 1), np.int32), "must be rank 1"),
        ):
            try:
                mapped(ragged_call())(grid, grid, wrong, ones, along, ones)
            except ValueError as error:
                assert message in str(error)
            else:
                raise AssertionError(message)


def jaxs_gradient_for_output_is_wrong_and_ours_is_right() -> None:
    """The minimal case: an empty slice begins where another does."""
    pair = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
    operand, output = np.ones((2, 2), np.float32), np.zeros((2, 3), np.float32)
    # device 1 sends both rows to device 0, at row 0; the other slices are empty, at row 0 too
    zero = np.zeros((2, 2), np.int32)
    sent, received = np.array([[0, 0], [2, 0]], np.int32), np.array([[0, 2], [0, 0]], np.int32)
    call = mapped(ragged_call(), mesh=pair)

    def gradient(output: Any) -> Any:
        return call(operand, output, zero, sent, zero, received).sum()

    right = np.array([[0, 0, 1], [1, 1, 1]], np.float32)
    with gpusim.jax.installed():
        same(jax.jit(jax.grad(gradient))(output), right)
        ours = ad.primitive_transposes[ragged.ragged_p]
        ad.primitive_transposes[ragged.ragged_p] = ragged.jax_transpose
        jax.clear_caches()
        try:
            found = np.asarray(jax.jit(jax.grad(gradient))(output))
            assert (found != right).any(), "JAX has mended its gradient: mend the documentation"
        finally:
            ad.primitive_transposes[ragged.ragged_p] = ours


def an_output_that_all_devices_share_has_a_right_gradient() -> None:
    """JAX gives the result the type of `output`: with types, gradients would be summed."""
    size = DEVICES
    rows = np.random.default_rng(11).normal(size=(size, size, 2)).astype(np.float32)
    along = np.tile(np.arange(size, dtype=np.int32), (size, 1))
    ones = np.ones((size, size), np.int32)

    def exchange(rows: Any, along: Any, places: Any, ones: Any) -> Any:
        return lax.ragged_all_to_all(
            rows, jnp.zeros(rows.shape, rows.dtype), along, ones, places, ones, axis_name="i"
        )

    with gpusim.jax.installed():
        for check in (False, True):
            call = mapped(exchange, check=check)
            gradient = jax.jit(jax.grad(lambda x: (call(x, along, along.T, ones) ** 2).sum() / 2))  # noqa: B023
            same(gradient(rows), rows)


# ---------------------------------------------------------------- errors, ends, and the way back


def expect_error(call: Callable[[], Any], *texts: str) -> None:
    try:
        jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        assert all(text in str(error) for text in texts), str(error)
    else:
        raise AssertionError(f"no error with {texts}")


def faults_are_errors_that_name_device_and_call() -> None:
    size = DEVICES
    rows = np.zeros((size, size), np.float32)
    ones, along = (
        np.ones((size, size), np.int32),
        np.tile(np.arange(size, dtype=np.int32), (size, 1)),
    )
    with gpusim.jax.installed():
        call = mapped(ragged_call())
        wrong = ones.copy()
        wrong[1, 0] = 2
        expect_error(
            lambda: call(rows, rows, along, wrong, along.T.copy(), ones),
            "device ", "lax.ragged_all_to_all over 'i' at ", "checks.py:",
            "replica 1, slice 0 has send_sizes 2",
        )  # fmt: skip
        same(call(rows, rows, along, ones, along.T.copy(), ones), rows)  # and all goes on
    with gpusim.jax.installed(Reduction.like("gloo-ring")):
        half = np.ones((size, 2), np.complex64)
        expect_error(lambda: mapped(lambda x: lax.psum(x, "i"))(half), "lax.psum", "TypeError")


def devices_that_disagree_end() -> None:
    with gpusim.jax.installed(Reduction(), timeout=12):
        disagree = mapped(
            lambda x: lax.cond(
                lax.axis_index("i") == 0, lambda x: x, lambda x: lax.psum(2 * x, "i"), x
            )
        )
        x = np.arange(DEVICES * 2.0, dtype=np.float32).reshape(DEVICES, 2)
        expect_error(
            lambda: disagree(x),
            "for 12 seconds", "[0] have not", "lax.psum over 'i'", "checks.py:",
        )  # fmt: skip
        gpusim.jax.install(Reduction(), timeout=PATIENCE)  # for devices that are only slow
        same(first(mapped(lambda x: lax.psum(x, "i"))(x)), x.sum(0))


def sums_of_the_partitioner_are_reached() -> None:
    """XLA's are listed, and with a Reduction there are none, and no warning."""
    x = jax.device_put(np.ones((DEVICES, 4), np.float32), SPLIT)
    replicated = jax.NamedSharding(MESH, P())

    def left() -> list[str]:
        program = jax.jit(lambda x: x.sum(0), out_shardings=replicated).lower(x).compile()
        return gpusim.jax.sums_of_xla(program.as_text())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = left()
        assert found and all("reduce_sum" in each for each in found), found
        for reduction in ({"another": "ring"}, None):
            with gpusim.jax.installed(reduction):
                assert left() == found
        with gpusim.jax.installed(Reduction()):
            assert left() == []
            program = mapped(lambda x: lax.psum(x, "i")).lower(x).compile()
            assert gpusim.jax.sums_of_xla(program.as_text()) == []


def sums_for_gpus_are_refused() -> None:
    """No GPU is needed to lower for one. What has no Reduction stays XLA's."""
    x = np.ones((DEVICES, 2 * DEVICES), np.float32)
    programs = {
        "psum": lambda x: lax.psum(x, "i"),
        "pmean": lambda x: lax.pmean(x, "i"),
        "pmax": lambda x: lax.pmax(x, "i"),
        "psum_scatter": lambda x: lax.psum_scatter(x, "i", tiled=True),
    }
    for platform in ("cuda", "rocm", "tpu"):
        for name, program in programs.items():
            for check in (False, True):

                def lower(program: Any = program, check: bool = check, on: str = platform) -> str:
                    traced = mapped(program, check=check).trace(x)
                    return str(traced.lower(lowering_platforms=(on,)).as_text())

                plain = lower()
                with gpusim.jax.installed(Reduction()):
                    try:
                        lower()
                    except NotImplementedError as error:
                        texts = (
                            f"lax.{name} has a Reduction",
                            f"for {platform}: ",
                            "JAX_PLATFORMS=cpu",
                        )
                        assert all(text in str(error) for text in texts), str(error)
                    else:
                        raise AssertionError((platform, name))
                for left in (None, {"another": "ring"}):
                    with gpusim.jax.installed(left):
                        assert "all_reduce" in lower() or "reduce_scatter" in lower()
                assert lower() == plain


def inserted_sums_for_gpus_are_refused() -> None:
    """The executable is XLA:CPU's; one for a GPU has the same words."""
    given = jax.device_put(np.ones((DEVICES, 3), np.float32), SPLIT)
    summing = jax.jit(lambda x: x.sum(0)).lower(given).compile().runtime_executable()
    moving = jax.jit(lambda x: x * 2).lower(given).compile().runtime_executable()
    for reductions in (Reduction(), {"i": Reduction()}):
        refuse_sums(moving, "cuda", reductions)
    words = "for cuda", "all-reduce of f32 for jit(<lambda>)/reduce_sum", "JAX_PLATFORMS=cpu"
    try:
        refuse_sums(summing, "cuda", Reduction())
    except NotImplementedError as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError("not refused")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refuse_sums(summing, "cuda", {"another": Reduction()})
    [warned] = caught
    assert warned.category is gpusim.jax.ReductionWarning
    assert all(word in str(warned.message) for word in words), warned.message


def a_warning_that_is_an_error_stays_one() -> None:
    """A sum of a dtype that gpusim does not reduce is warned of, once."""
    x = np.ones((DEVICES, 3)).astype("float8_e4m3b11fnuz")
    given = jax.device_put(x, SPLIT)
    with gpusim.jax.installed("tree"), warnings.catch_warnings():
        warnings.simplefilter("error", gpusim.jax.ReductionWarning)
        try:
            jax.jit(lambda x: x.sum(0))(given)
        except gpusim.jax.ReductionWarning as error:
            assert str(error).count("keep XLA's order") == 1, str(error)
            assert "gpusim does not reduce f8E4M3B11FNUZ" in str(error), str(error)
        else:
            raise AssertionError("no warning")


def uninstalling_restores_jax() -> None:
    from jax._src import compiler
    from jax._src.interpreters import batching, mlir
    from jax._src.lax import parallel

    def state() -> Any:
        return (
            {name: {**rules} for name, rules in mlir._platform_specific_lowerings.items()},
            {*mlir._uncacheable_primitives},
            {**ad.primitive_transposes}, {**batching.fancy_primitive_batchers},
            lax.pmean.__code__, lax.ragged_all_to_all.__code__, compiler.compile_or_get_cached,
        )  # fmt: skip

    x = values(np.random.default_rng(9), "float16", (DEVICES, 400))
    program = mapped(lambda x: (lax.psum(x, "i"), lax.pmean(x, "i")))
    before, results = state(), program(x)
    assert parallel.ragged_all_to_all_p not in before[0]["cpu"]
    reduction = Reduction(order="reverse", accumulate="float16")
    gpusim.jax.install()
    gpusim.jax.install(reduction)
    same(first(program(x)[0]), _fold(x, reduction))
    with gpusim.jax.installed():
        same(program(x)[0], results[0])
    same(first(program(x)[0]), _fold(x, reduction))
    gpusim.jax.uninstall()
    gpusim.jax.uninstall()
    assert state() == before
    for found, expected in zip(program(x), results, strict=True):
        same(found, expected)
    assert (first(results[0]) != _fold(x, reduction)).any()
    small = np.zeros((DEVICES, DEVICES), np.int32)
    expect_error(lambda: mapped(ragged_call())(*[small] * 6), "UNIMPLEMENTED")


def programs_that_are_dropped_leave_nothing() -> None:
    (handler,) = ffi._HANDLERS
    x = np.ones((DEVICES, 2), np.float32)
    before = {*handler._states}
    for _ in range(3):
        with gpusim.jax.installed(Reduction()):
            program = mapped(lambda x: lax.psum(x, "i"))
            program(x)
            assert {*handler._states} - before
            del program
    jax.clear_caches()
    gc.collect()
    # XLA's threads may hold a program for a moment.
    assert until(lambda: gc.collect() >= 0 and {*handler._states} <= before)


def arguments_are_checked() -> None:
    for given, error, text in (
        ({"reduction": "rang"}, ValueError, "reduction='rang': expected an order"),
        ({"reduction": {"i": "rang"}}, ValueError, "reduction['i']='rang': expected an order"),
        ({"reduction": {"i": 3}}, TypeError, "reduction['i']: expected a gpusim.Reduction"),
        ({"reduction": Reduction(op="max")}, ValueError, "op='sum'"),
        ({"timeout": 0}, ValueError, "positive"),
    ):
        try:
            gpusim.jax.install(**given)
        except error as raised:
            assert text in str(raised)
        else:
            raise AssertionError(given)
    for version in ((1, 0), (0, 2)):
        try:
            ffi.check_version(version)
        except RuntimeError as raised:
            assert f"{version[0]}.{version[1]}" in str(raised)
        else:
            raise AssertionError(version)
    (handler,) = ffi._HANDLERS
    assert handler._version is not None
    assert (ffi.MAJOR, ffi.MINOR) <= handler._version < (ffi.MAJOR + 1, 0)


# ---------------------------------------------------------------- records


def trained(x: Any, lax: Any, tanh: Any, plant: str) -> Any:
    """Sums of one replica, some of which need nothing of each other, by jax.lax or gpusim.lax."""
    w = x[0]
    for step in range(2):
        now = plant if step == 1 else "none"
        total = lax.psum(x[0] * w, "i")  # total
        part = lax.psum_scatter(x[1] * w, "i", tiled=True)  # part
        largest = lax.pmax(x[2] * w, "i")  # largest
        mean = lax.pmean(tanh(total) + largest + part.sum(), "i")  # mean
        if now == "missing":
            mean = tanh(total) + largest + part.sum()
        w = w - mean * x.dtype.type(0.1 if now != "rate" else 0.2)
    return lax.psum(w, "i")  # last


def line(mark: str) -> str:
    """The place of the line of this file with the comment."""
    for number, text in enumerate(Path(__file__).read_text().splitlines(), 1):
        if text.endswith(f"  # {mark}"):
            return f"{__file__}:{number}"
    raise AssertionError(mark)


def recorded(folder: Path, name: str, plant: str = "none", order: str = "linear") -> Run:
    """The record of the program in JAX, where four runs are in flight."""
    x = np.random.default_rng(5).normal(size=(DEVICES, 3, 8 * DEVICES)).astype(np.float32)
    if plant == "seed":
        x[DEVICES - 1, 1] += 1
    function = mapped(lambda x: trained(x, lax, jnp.tanh, plant))
    with gpusim.jax.installed(Reduction(order=order)), gpusim.record(folder / name, arrays=True):
        for _ in range(4):
            function(x)
    return read(folder / name)


def records_find_what_is_planted() -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plain = recorded(folder, "plain")
        assert plain.ranks == DEVICES
        assert len(plain.events) == 4 * 9
        again = compare(plain, recorded(folder, "again"))
        assert again.verdict is None, sentences(again)
        assert all(row.operands == row.results == 0 for row in again.rows)
        everyone = tuple(range(DEVICES))
        for plant, order, kind, mark, ranks in (
            ("seed", "linear", "operands", "part", (DEVICES - 1,)),
            ("rate", "linear", "operands", "last", everyone),
            ("missing", "linear", "missing", "mean", ()),
            ("none", "ring", "collective", "total", None),
        ):
            found = compare(plain, recorded(folder, f"{plant}-{order}", plant, order)).verdict
            assert found is not None
            assert found.a is not None
            sites = {line(mark)}
            if kind == "collective":
                # XLA may run the sum that needs nothing of the first one before it, in both runs.
                sites.add(line("part"))
                assert (found.folds["a"] or [])[0] == "linear"
                assert (found.folds["b"] or [])[0] == "ring"
            else:
                assert found.ranks == ranks, found
            assert found.kind == kind and found.a.site in sites, found


def records_of_maps_and_of_jax_are_compared() -> None:
    x = np.random.default_rng(6).normal(size=(DEVICES, 40)).astype(np.float32)

    def calls(x: Any, lax: Any) -> Any:
        return lax.psum(x, "i") + lax.pmean(x, "i") + lax.psum(x * x, "i", axis_index_groups=halves)

    halves = [[*range(0, DEVICES, 2)], [*range(1, DEVICES, 2)]]
    with TemporaryDirectory() as scratch:
        a, b = Path(scratch) / "a", Path(scratch) / "b"
        order = Reduction(order="nccl-tree")
        with gpusim.jax.installed(order), gpusim.record(a):
            mapped(lambda x: calls(x, lax))(x)
        with gpusim.reduction(order="nccl-tree"), gpusim.record(b):
            gpusim.vmap(lambda x: calls(x, gpusim.lax), axis_name="i")(x)
        one, other = read(a), read(b)
        sums = [[e for e in run.events if len(e.ranks) < DEVICES] for run in (one, other)]
        for run, halved in zip((one, other), sums, strict=True):  # XLA may reorder them
            run.events = sorted(run.events, key=lambda e: (e.first.op, len(e.ranks), e.ranks))
            assert len(halved) == 2
            for k, event in enumerate(run.events):
                event.index = k
                for call in event.calls.values():
                    call.program_call = None
        found = compare(one, other)
        assert found.verdict is None, sentences(found)
        assert [row.results for row in found.rows] == [0] * 4


def ragged_calls_are_recorded() -> None:
    def call(*arguments: Any) -> Any:
        return lax.ragged_all_to_all(*arguments, axis_name="i")  # ragged

    plan = random_program(np.random.default_rng(8), DEVICES, None, row=(3,))
    with TemporaryDirectory() as scratch:
        runs = []
        for name, change in (("a", 0), ("b", 1)):
            folder = Path(scratch) / name
            given = dict(plan.arguments, operand=np.array(plan.arguments["operand"]))
            given["operand"][-1, 0] += change
            with gpusim.jax.installed(), gpusim.record(folder):
                mapped(call)(*given.values())
            runs.append(read(folder))
        (event,) = runs[0].events
        assert event.first.operation == "ragged_all_to_all"
        assert event.first.site == line("ragged")
        assert len(event.first.operands or ()) == 6
        verdict = compare(*runs).verdict
        assert verdict is not None
        assert (verdict.kind, verdict.ranks) == ("operands", (DEVICES - 1,))


def plain_jax_writes_the_record_of_the_docs() -> None:
    """The pages' writer, in a JAX without gpusim, against the record of JAX with gpusim."""
    page = (Path(__file__).parents[2] / "docs" / "losses-differ.md").read_text()
    (writer,) = re.findall(r"```python\n(import json, zlib\n.*?)```", page, re.DOTALL)
    (program,) = re.findall(r'title="plain_jax.py"}\n(.*?)```', page, re.DOTALL)
    with TemporaryDirectory() as scratch:
        os.chdir(scratch)
        exec(compile(writer + program, "plain_jax.py", "exec"), {"__name__": "docs"})
        with gpusim.jax.installed(Reduction(order="xla-cpu")), gpusim.record("ours"):
            again = program.replace('"jax"', '"again"')
            exec(compile(writer + again, "plain_jax.py", "exec"), {"__name__": "docs"})
        found = compare(read(Path("jax")), read(Path("ours")))
        assert found.verdict is None, sentences(found)
        assert [row.results for row in found.rows] == [0] * 4
        os.chdir("/")
