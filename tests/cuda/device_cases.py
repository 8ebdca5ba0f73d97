"""Claims about arrays on a GPU, of the stand-in (test_device_arrays.py) and of CuPy (tests/gpu).
Each module that imports these tests has a fixture `library`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import gpusim
from gpusim import collectives, lax, trees
from gpusim.fallback.formats import SUB_32_BIT
from gpusim.libraries import on_device
from tests.cuda.host_cuda.values import any_bits, same
from tests.cuda.on_device import Library, alike, chooses_by_cupy, run_on
from tests.oracles import programs
from tests.oracles.control_flow import ALONE, NUMPY, TOGETHER, N, X, slices_a_plain_table
from tests.oracles.replicated import names_on_the_route

# Programs of collectives, in every map.

PROGRAMS = settings(
    max_examples=8,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("first", tuple(programs.SHAPES))
def test_programs_have_numpys_bits_in_every_map(library: Library, first: str) -> None:
    @PROGRAMS
    @given(programs.programs((first,)))
    def agree(program: programs.Program) -> None:
        x = program.argument()
        expected, *_ = programs.executors(program).values()
        theirs = programs.outcome(lambda: expected(program, x))
        for who, run in programs.executors(program).items():
            if "pmap" in who and chooses_by_cupy(program):
                continue
            ours = programs.outcome(lambda run=run: run_on(library, run)(program, x))
            assert type(ours.error) is type(theirs.error), (who, ours.error, theirs.error)
            if ours.error is None:
                programs.assert_same_bits(ours.results, theirs.results, who)

    agree()


@pytest.mark.parametrize("order", ["linear", "reverse", "tree", "ring", "exact"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_stochastic_sums_have_numpys_bits_in_every_map(
    library: Library, order: str, dtype: str
) -> None:
    x = programs.values(np.random.default_rng(0), (2, 3, 41), dtype)
    sums = programs.Body(lambda lax, x: lax.psum(lax.psum(x, "y") * 2, "x"), (("x", 2), ("y", 3)))
    with gpusim.reduction(order=order, accumulate="float16", rounding="stochastic", seed=5):
        runs = programs.executors(sums)
        expected = runs["vmap of vmap"](sums, x)
    for run in runs.values():
        with gpusim.reduction(order=order, accumulate="float16", rounding="stochastic", seed=5):
            same(run_on(library, run)(sums, x), expected)


@pytest.mark.parametrize(
    "program",
    [program for program in ALONE + TOGETHER if program is not slices_a_plain_table],
    ids=lambda program: program.__name__,
)
def test_control_flow_has_numpys_bits(library: Library, program: Callable[..., Any]) -> None:
    def f(x: Any, n: Any) -> Any:
        return program(NUMPY, x, n)

    expected = gpusim.vmap(f, axis_name="i")(X, N)
    for run in (gpusim.vmap, gpusim.pmap):
        found = run(f, axis_name="i")(library.to_device(X), library.to_device(N))
        leaves, structure = trees.flatten(found)
        wanted, other = trees.flatten(expected)
        assert structure == other
        for a, b in zip(leaves, wanted, strict=True):
            a = library.to_host(a) if on_device(a) else np.asarray(a)
            same(a, b) if library.exact else np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("predicate", ["on the device", "on the host"])
def test_writes_change_the_replicas_that_take_the_branch(library: Library, predicate: str) -> None:
    def f(x: Any, n: Any) -> Any:
        a, b = x.copy(), np.zeros_like(x)

        def change() -> int:
            a[1:] += 1
            b[a > 0] = 2
            np.multiply(a, 2, out=a)
            return 0

        holds = n > 2 if predicate == "on the device" else lax.axis_index("i") > 1
        lax.cond(holds, change, lambda: 0)
        kept = lax.fori_loop(0, 2, lambda i, c: c, a)
        a[0] = 5
        return a, b, kept

    expected = gpusim.pmap(f, "i")(X, N)
    for run in (gpusim.vmap, gpusim.pmap):
        found = run(f, axis_name="i")(library.to_device(X), library.to_device(N))
        for a, b in zip(found, expected, strict=True):
            same(library.to_host(a), b)


WRITES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "x.at[i].set": lambda x, i, v: gpusim.at(x)[i].set(v),
    "x.at[:, i].set": lambda x, i, v: gpusim.at(x)[:, i % 2].set(v[:, 0]),
    "x[i] = v": lambda x, i, v: operator.setitem(x, i, v),
    "x[i, i] = v": lambda x, i, v: operator.setitem(x, (i, i % 2), v[:, 0]),
    "x.T[:, i] = v": lambda x, i, v: operator.setitem(x.T, (slice(None), i), v.T),
    "x[i] = v of more axes": lambda x, i, v: operator.setitem(x, i, v[None, None]),
    "put": lambda x, i, v: np.put(x, i, v),
    "put clipped": lambda x, i, v: np.put(x, 4 * i, v[0], mode="clip"),
    "put_along_axis": lambda x, i, v: np.put_along_axis(x, i[:, None], v[:, :1], 0),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", WRITES)
def test_the_last_of_values_for_one_element_stays(library: Library, name: str, dtype: str) -> None:
    # Of the first replica 200 values go to three rows, of the second to one.
    rows = np.random.default_rng(0).integers(0, 3, (2, 200)) * [[1], [0]]
    x = np.zeros((2, 3, 2)).astype(dtype)
    values = np.arange(800).reshape(2, 200, 2).astype(dtype)

    def f(x: Any, i: Any, v: Any) -> Any:
        x = x.copy()
        changed = WRITES[name](x, i, v)
        return x if changed is None else changed

    expected = gpusim.vmap(f)(x, rows, values)
    # In pmap a replica's arrays are the library's own, and so are their assignments.
    for run in (gpusim.vmap, gpusim.pmap) if "at[" in name else (gpusim.vmap,):
        found = run(f)(*map(library.to_device, (x, rows, values)))
        same(library.to_host(found), expected)


def test_arrays_of_two_libraries_are_a_type_error(library: Library) -> None:
    x, table = library.to_device(np.ones((2, 3))), np.ones(3)
    for mixed in (
        lambda x: x + table,
        lambda x: np.matmul(x, table),
        lambda x: np.concatenate([x, table]),
        lambda x: np.where(x > 0, x, table),
        lambda x: x.at[0].set(1.0) * table,
    ):
        with pytest.raises(TypeError, match=r"two libraries, \w+ .*\[2, 3\].*numpy .*cupy.asarray"):
            gpusim.vmap(mapped := mixed)(x)
        assert mapped is mixed
    with pytest.raises(TypeError, match=r"two libraries|expected an array of the device"):
        gpusim.vmap(lambda x, y: x + y)(x, np.ones((2, 3)))


def test_numbers_lists_and_numpys_scalars_go_with_arrays_of_any_library(library: Library) -> None:
    x = library.to_device(np.arange(6.0).reshape(2, 3))

    def f(x: Any, number: Any, scalar: Any) -> Any:
        y = x * number + np.float32(1) - scalar + lax.axis_size("i")
        return np.concatenate([np.where(y > 2, y, 0.5), [1.0, 2.0]])

    run = gpusim.vmap(f, in_axes=(0, None, None), axis_name="i")
    found = run(x, 2, np.float64(0.5))
    same(found.get(), run(x.get(), 2, np.float64(0.5)))


def test_the_values_of_a_gpu_come_to_the_host_when_they_are_asked_for(library: Library) -> None:
    def f(x: Any) -> Any:
        total = lax.psum(x, "i")
        assert total[0] > 0 and int(total[0]) == 3 and total[0].item() == 3.0
        assert [0, 1, 2, 3][total[0].astype(int)] == 3
        assert repr(total).startswith("MappedArray([3., 5., 7.]") and f"{total[0]:.2f}" == "3.00"
        with pytest.raises(TypeError, match="Implicit conversion"):
            np.asarray(total)
        return x

    gpusim.vmap(f, axis_name="i")(library.to_device(np.arange(6.0).reshape(2, 3)))


def test_random_numbers_are_where_the_arguments_are_and_the_same_as_on_the_host(
    library: Library,
) -> None:
    def f(x: Any) -> Any:
        draw = gpusim.rng(3, "i")
        noisy = x + draw.normal(3) * draw.uniform(low=x - 1, high=x + 1)
        return noisy, draw.permutation(x), draw.integers(7, shape=2), draw.bernoulli(0.5, (4,))

    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    for run in (gpusim.vmap(f, axis_name="i"), gpusim.pmap(f, "i")):
        for found, expected in zip(run(library.to_device(x)), run(x), strict=True):
            assert on_device(found)
            same(found.get(), expected)


def test_views_on_a_gpu_share_its_memory_too(library: Library) -> None:
    x = library.to_device(np.arange(24.0).reshape(4, 3, 2))
    for result in (
        collectives.all_gather(x, axis=1).value,
        collectives.pbroadcast(x, 2).value,
        collectives.ppermute(x, [(k, (k + 3) % 4) for k in range(4)][::-1]).value[:0],
        collectives.all_to_all(x[:3], 0, 0).value,
    ):
        assert result.base is x or not result.size
    gathered = gpusim.vmap(lambda x: lax.all_gather(x, "i"), axis_name="i", out_axes=None)(x)
    assert gathered.base is not x  # what a map returns is the caller's


def test_what_replicas_of_a_mesh_should_share_is_compared_on_the_device(library: Library) -> None:
    mesh = gpusim.Mesh((4,), ("x",))
    run = gpusim.shard_map(lambda x: x, mesh=mesh, in_specs=gpusim.P("x"), out_specs=gpusim.P())
    alike = library.to_device(np.array([1.0, np.nan] * 4))
    same(run(alike).get(), np.array([1.0, np.nan]))
    alike[5] = -0.0
    with pytest.raises(ValueError, match="replicas 0 and 2 hold different values"):
        run(alike)


# 8-bit formats, which CuPy only holds; subnormal numbers, which its kernels flush.

FLOAT8 = [dtype for dtype in SUB_32_BIT if dtype.itemsize == 1]
PAIRS = [[0, 3], [2, 1]]
CALLS: dict[str, Callable[[Any], Any]] = {
    "psum": lambda x: lax.psum(x, "i"),
    "psum in pairs": lambda x: lax.psum(x, "i", axis_index_groups=PAIRS),
    "pmean": lambda x: lax.pmean(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "pargmin": lambda x: lax.pargmin(x, "i"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "i", tiled=True, axis_index_groups=PAIRS),
    "all_gather": lambda x: lax.all_gather(x, "i", axis=1, tiled=True),
    "all_gather in pairs": lambda x: lax.all_gather(x, "i", axis_index_groups=PAIRS),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1), (3, 0)]),
    "pshuffle": lambda x: lax.pshuffle(x, "i", [2, 0, 3, 1]),
    "pbroadcast": lambda x: lax.pbroadcast(x, "i", 2),
    "pbroadcast.transpose": lambda x: lax.pbroadcast.transpose(x, "i", 2),
    "pgather": lambda x: lax.pgather(x, np.array([3, 0]), "i"),
    "round_to": lambda x: gpusim.round_to(gpusim.round_to(x, np.float32), x.dtype),
}
MOVES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda x: x.copy(),
    "stack": lambda x: np.stack([x, x], 1),
    "concatenate": lambda x: np.concatenate([x, x[:1]]),
    "take": lambda x: np.take(x, [1, 0], 0),
    "indices": lambda x: x[[0, 2], 1],
    "own indices": lambda x: x[lax.axis_index("i")],
    "transposed": lambda x: x.T.reshape(-1),
    "roll": lambda x: np.roll(x, 1),
    "zeros": lambda x: np.zeros_like(x) + 0 if isinstance(x, np.ndarray) else np.zeros_like(x),
    "where": lambda x: np.where(x.astype(np.float32) > 0, x, 0),
    "set": lambda x: x.at[0].set(x[1]),
    "set at indices": lambda x: x.at[[0, 2], 1].set(1.5),
    "add at indices": lambda x: x.at[[0, 2, 2, 0, 2], 1].add(1.5),
    "add to a slice": lambda x: x.at[:2].add(x[0]),
    "astype": lambda x: x.astype(np.float32).astype(x.dtype),
}


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("name", [*CALLS, *MOVES])
def test_arrays_of_8_bit_formats_are_moved_and_folded(
    library: Library, dtype: np.dtype[Any], name: str
) -> None:
    every = np.arange(256, dtype=np.uint8).view(dtype)
    x = np.random.default_rng(0).choice(every, (4, 4, 3))
    with np.errstate(all="ignore"):
        expected = gpusim.vmap((CALLS | MOVES)[name], axis_name="i")(x)
        with names_on_the_route() as names:
            found = gpusim.vmap((CALLS | MOVES)[name], axis_name="i")(library.to_device(x))
    assert not names
    same(library.to_host(found), expected)


@pytest.mark.parametrize("name", CALLS)
def test_replicas_of_a_pmap_have_8_bit_formats(library: Library, name: str) -> None:
    x = np.random.default_rng(0).normal(size=(4, 4, 3)).astype(np.float32).astype(FLOAT8[0])
    expected = gpusim.pmap(CALLS[name], "i")(x)
    same(library.to_host(gpusim.pmap(CALLS[name], "i")(library.to_device(x))), expected)


@pytest.mark.parametrize("dtype", [*SUB_32_BIT, np.float32, np.float64])
@pytest.mark.parametrize("name", ["pargmax", "pargmin", "pmax", "pmin"])
def test_extremes_are_found_among_subnormal_numbers(
    library: Library, name: str, dtype: Any
) -> None:
    codes = np.array([0, 1, 2, 3], f"u{np.dtype(dtype).itemsize}").view(dtype)
    special = np.array([-0.0, np.nan, 1.0]).astype(dtype)
    x = np.random.default_rng(1).choice(np.concatenate([codes, -codes, special]), (5, 400))
    call = getattr(collectives, name)
    same(library.to_host(call(library.to_device(x)).value), call(x).value)


@pytest.mark.parametrize("exponent_bits", [2, 5, 8])
def test_quantising_keeps_subnormal_numbers(library: Library, exponent_bits: int) -> None:
    x = np.random.default_rng(2).normal(size=500) * 2.0 ** np.repeat(np.arange(-149, -99), 10)
    x = np.concatenate([x, x[::-1] * 2.0**100, [0.0, -0.0, np.inf, np.nan]]).astype(np.float32)
    for rounding in ("nearest", "stochastic"):
        expected = gpusim.quantise_fpx(x, exponent_bits, 2, rounding)
        found = gpusim.quantise_fpx(library.to_device(x), exponent_bits, 2, rounding)
        same(library.to_host(found), expected)


# Updates of elements that are named more than once.

UPDATES = ("set", "add", "subtract", "multiply", "divide", "min", "max")
INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES = [*SUB_32_BIT, *map(np.dtype, ("f4", "f8", "F", "D", "?")), *INTEGERS]
INDICES: tuple[Any, ...] = (
    [0, 2, 2, 0, 0],
    (slice(None), [1, 1, 3]),
    ([0, 2, 2], [1, 1, 3]),
    np.array([[0, 1], [1, 1]]),
    np.array([True, False, True]),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("update", UPDATES)
@np.errstate(all="ignore")
def test_updates_at_indices_have_numpys_bits(
    library: Library, update: str, dtype: np.dtype[Any]
) -> None:
    x = any_bits((3, 4), dtype, 0)
    for seed, index in enumerate(INDICES, 1):
        values = any_bits(x[index].shape, dtype, seed)

        def run(x: Any, values: Any, index: Any = index) -> Any:
            return getattr(gpusim.at(x)[index], update)(values)

        try:
            expected = run(x, values)
        except TypeError as error:
            with pytest.raises(type(error)):
                run(library.to_device(x), library.to_device(values))
            continue
        found = run(library.to_device(x), library.to_device(values))
        same(library.to_host(found), expected)


@np.errstate(all="ignore")
def test_updates_at_indices_of_replicas_have_numpys_bits(library: Library) -> None:
    random = np.random.default_rng(3)
    x, values = (any_bits((5, n), np.dtype(np.float32), n) for n in (6, 900))
    places = random.integers(0, 6, (5, 900))
    for update in UPDATES[1:]:
        run = gpusim.vmap(lambda x, i, v, update=update: getattr(x.at[i], update)(v))
        found = run(*map(library.to_device, (x, places, values)))
        same(library.to_host(found), run(x, places, values))


def test_updates_without_a_kernel_take_turns(library: Library) -> None:
    x = np.array([3, 2, 5])
    there = library.to_device(x)
    found = gpusim.at(there)[[0, 1, 0, 0]].power(np.array([2, 3, 1, 2]))
    same(library.to_host(found), np.array([81, 8, 5]))
    found = gpusim.at(there)[[0, 1, 0, 0]].apply(np.negative)
    same(library.to_host(found), np.array([-3, -2, 5]))
    with pytest.raises(TypeError, match="same_kind"):
        gpusim.at(there)[[0, 1]].apply(np.sqrt)


# What CuPy takes no lists for, and in which it knows fewer dtypes.

LISTS: dict[str, Callable[[Any], Any]] = {
    "gradient": lambda x: np.gradient(x, [0.0, 1.0, 3.0, 4.0], 2.0),
    "isin": lambda x: np.isin(np.round(x), [1, 2]),
    "interp": lambda x: np.interp(x, [0.0, 1.0, 2.0], [5.0, 6.0, 9.0]),
    "choose": lambda x: np.choose((x > 0).astype(int), [x, -x]),
    "choose a number": lambda x: np.choose((x > 0).astype(int), [0, 10]),
    "reduceat": lambda x: np.add.reduceat(x, [0, 2]),
}
OF_DTYPES: dict[str, Callable[[Any], Any]] = {
    "clip from": lambda x: np.clip(x, 0, None),
    "clip to": lambda x: np.clip(x, None, x[0]),
    "clip": lambda x: np.clip(x, 0, 1),
    "clip between": lambda x: np.clip(x, x[0], x[1]),
    "where": lambda x: np.where(x > 0, x, 0),
    "where of floats": lambda x: np.where(x > 0, 0.1, x),
    "select": lambda x: np.select([x > 1, x > 0], [x, x + x], 0),
    "round": lambda x: np.round(x),
    "square": lambda x: x**2,
    "var": lambda x: np.var(x, 0, ddof=1),
    "std": lambda x: np.std(x),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_go_with_arrays_on_a_gpu(library: Library, name: str) -> None:
    x = np.random.default_rng(4).normal(size=(2, 4, 3))
    expected, run = gpusim.vmap(LISTS[name])(x), gpusim.vmap(LISTS[name])
    with names_on_the_route() as names:
        found = run(library.to_device(x))
    assert not names
    for part, other in zip(trees.flatten(found)[0], trees.flatten(expected)[0], strict=True):
        alike(library.to_host(part), other, library.exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "f4", "?", "F", "u1"])
@pytest.mark.parametrize("name", OF_DTYPES)
def test_results_have_numpys_dtypes(library: Library, name: str, dtype: str) -> None:
    x = abs(np.random.default_rng(5).normal(size=(2, 4, 3)) * 2).astype(dtype)
    if (name, dtype) in (("round", "?"), ("select", "?")):
        return  # NumPy's result is float16, CuPy's is bool; x + x is another function in CuPy
    expected = gpusim.vmap(OF_DTYPES[name])(x)
    alike(library.to_host(gpusim.vmap(OF_DTYPES[name])(library.to_device(x))), expected, False)


LACKING: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a function": (lambda x: np.insert(x, 1, 0, 0), r"lacks numpy.insert; cupy.asnumpy moves"),
    "a ufunc": (lambda x: np.spacing(x), "lacks numpy.spacing"),
    "a method": (lambda x: np.bitwise_or.reduce(x > 0), "lacks numpy.bitwise_or.reduce"),
    "an argument": (lambda x: np.sum(x, where=np.True_), "numpy.sum lacks one of .* where"),
    "a dtype": (lambda x: np.sort(x.astype(FLOAT8[0])), "lacks numpy.sort of float8_e5m2"),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_cupy_lacks_is_named(library: Library, name: str) -> None:
    function, message = LACKING[name]
    with pytest.raises((TypeError, NotImplementedError), match=f"CuPy .*{message}"):
        gpusim.vmap(function)(library.to_device(np.ones((2, 4, 3), np.float32)))


TESTS = {name: value for name, value in list(globals().items()) if name.startswith("test_")}
