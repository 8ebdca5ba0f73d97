"""Arrays that are not plain ones, in maps and in collectives: refused, or the same everywhere."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpusim
from gpusim import collectives, lax


def shard_map(f: Any, axis_name: str = "i") -> Any:
    def mapped(x: Any) -> Any:
        """With the axis that vmap hides."""
        mesh, spec = gpusim.Mesh((len(x),), (axis_name,)), gpusim.P(axis_name)
        g = gpusim.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
        return g(x)

    return mapped


RUNS = {
    "vmap": lambda f: gpusim.vmap(f, axis_name="i"),
    "pmap": lambda f: gpusim.pmap(f, "i"),
    "shard_map": shard_map,
}
EVERYWHERE = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmean": lambda x: lax.pmean(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "pargmax": lambda x: lax.pargmax(x, "i"),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "pbroadcast": lambda x: lax.pbroadcast(x, "i", 1),
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)]),
    "psum_scatter": lambda x: lax.psum_scatter(x * np.ones(3, x.dtype), "i"),
    "all_to_all": lambda x: lax.all_to_all(x * np.ones(3, x.dtype), "i", 0, 0),
    "as it is": lambda x: x,
}
MASKED = np.ma.masked_array([1.0, 2.0, 3.0], [0, 1, 0])
MATRIX = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).view(np.matrix)
REFUSED = {
    "masked array": (MASKED, r"masked array.*x\.filled\(value\).*getmaskarray"),
    "matrix": (MATRIX, r"np\.matrix.*np\.asarray"),
}


@EVERYWHERE
@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_masked_arrays_and_matrices_are_refused_with_the_cure(run, given, message):
    with pytest.raises(ValueError, match=message):
        run(lambda x: x)(given)
    for call in (*list(COLLECTIVES.values())[:-3], lambda x: x):  # operands and results
        with pytest.raises(ValueError, match=message):
            run(lambda x, call=call: call(given))(np.arange(3.0))
    for stacked in (given, [given, given]):
        with pytest.raises(ValueError, match=message):
            collectives.psum(stacked)
    for f in (gpusim.vmap, gpusim.pmap):
        with pytest.raises(ValueError, match=message):
            f(lambda x, same: x, in_axes=(0, None))(np.arange(3.0), given)
    assert (run(lambda x: lax.psum(x, "i"))(np.asarray(MATRIX)) == [9, 12]).all()  # the cure
    assert (run(lambda x: lax.psum(x, "i"))(MASKED.filled(0)) == 4).all()


@EVERYWHERE
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in COLLECTIVES
        for dtype in (">f4", ">i2", ">f8", ">c8")
        if dtype != ">c8" or name not in ("pmax", "pargmax")  # complex numbers have no order
    ],
)
def test_any_byte_order_gives_the_machines(run, dtype, name):
    call = COLLECTIVES[name]
    x = np.array([3, 1, 2], dtype)
    expected = run(call)(x.astype(x.dtype.newbyteorder("=")))
    for found in (run(call)(x), run(lambda v: call(v.astype(dtype)))(x)):
        assert found.dtype == expected.dtype and found.dtype.isnative
        assert (found == expected).all()
    assert run(lambda v: v.astype(dtype))(x).dtype.isnative  # results too
    seen: list[bool] = []
    run(lambda v: (seen.append(v.dtype.isnative), v)[1])(x)
    assert all(seen)


def test_stacked_calls_take_any_byte_order():
    x = np.array([[3, 1], [1, 2]], ">f4")
    for stacked in (x, list(x)):
        for value in (collectives.psum(stacked).value, collectives.all_gather(stacked).value):
            assert value.dtype == np.float32 and value.dtype.isnative
    assert collectives.psum(x).value.tolist() == [4, 3]


@EVERYWHERE
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_nans_win_in_pargmax_and_pargmin_as_in_numpy(run, dtype):
    rng = np.random.default_rng(0)
    x = rng.choice([np.nan, -0.0, 0.0, 1.0, -2.0, 3.0], size=(6, 300)).astype(dtype)
    x[:, 0] = np.nan
    wide = x.astype("f8")
    for ours, theirs in ((lax.pargmax, np.argmax), (lax.pargmin, np.argmin)):
        found = run(lambda x, ours=ours: ours(x, "i"))(x)
        assert found.dtype == np.int32
        assert (found == theirs(wide, axis=0)).all()


LONG = [np.longdouble, np.clongdouble]


@EVERYWHERE
def test_all_numeric_types_of_numpy_but_long_double_reduce(run):
    for letter in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?":
        x = np.array([1, 0, 1], letter)
        if x.dtype in LONG and x.dtype not in (np.float64, np.complex128):  # as on Windows
            with pytest.raises(TypeError, match=f"dtype {x.dtype} is not supported; expected one"):
                run(lambda x: lax.psum(x, "i"))(x)
        else:
            assert (run(lambda x: lax.psum(x, "i"))(x) == 2).all()
        assert (run(lambda x: lax.all_gather(x, "i")[2])(x) == x[2]).all()  # all can be moved
