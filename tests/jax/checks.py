"""Sums and extremes on the devices of this process have gpusim's bits."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.lax import pmean as imported_pmean
from jax.sharding import PartitionSpec as P

import gpusim.jax
from gpusim import Reduction, collectives
from tests.jax.devices import DEVICES, MESH, SPLIT, everywhere, first, mapped, same
from tests.oracles.budget import FULL

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
        (Reduction(order=order), DTYPES)
        for order in ("linear", "reverse", "tree", "ring", "exact", "kahan", "neumaier")
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

            same(first(mapped(lambda x: lax.psum(x, "i"), check=check)(x)), folded(x, reduction))
            same(first(mapped(lambda x: lax.pmean(x, "i"), check=check)(x)), averaged(x, reduction))
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
        same(jax.jit(jax.grad(loss))(w, x), folded(x, reduction))


def folded(x: Any, reduction: Reduction) -> Any:
    return collectives.psum(x, reduction=reduction).value


def averaged(x: Any, reduction: Reduction) -> Any:
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
        same(first(found), folded(x, replace(reduction, accumulate=dtype)))
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
                    expected = np.asarray(folded(xs[k], reduction))  # noqa: B023
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
