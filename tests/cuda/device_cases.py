"""Claims about arrays on a GPU, of the stand-in (test_device_arrays.py) and of CuPy (tests/gpu).
Each module that imports these tests has a fixture `library`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import gpusim
from gpusim import collectives, lax
from gpusim.libraries import on_device
from tests.cuda.host_cuda.values import same
from tests.cuda.on_device import Library, run_on
from tests.oracles import programs

# Programs of collectives, in every map.

PROGRAMS = settings(
    max_examples=8,
    derandomize=True,
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
            ours = programs.outcome(lambda run=run: run_on(library, run)(program, x))
            assert type(ours.error) is type(theirs.error), (who, ours.error, theirs.error)
            if ours.error is None:
                programs.assert_same_bits(ours.results, theirs.results, who)

    agree()


@pytest.mark.parametrize("order", ["linear", "reverse", "tree", "ring"])
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
    assert gathered.base is x


def test_what_replicas_of_a_mesh_should_share_is_compared_on_the_device(library: Library) -> None:
    mesh = gpusim.Mesh((4,), ("x",))
    run = gpusim.shard_map(lambda x: x, mesh=mesh, in_specs=gpusim.P("x"), out_specs=gpusim.P())
    alike = library.to_device(np.array([1.0, np.nan] * 4))
    same(run(alike).get(), np.array([1.0, np.nan]))
    alike[5] = -0.0
    with pytest.raises(ValueError, match="replicas 0 and 2 hold different values"):
        run(alike)


TESTS = {name: value for name, value in list(globals().items()) if name.startswith("test_")}
