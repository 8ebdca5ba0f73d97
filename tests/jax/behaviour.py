"""Errors of gpusim.jax, programs that end, and the way back to plain JAX."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src.interpreters import ad
from jax.sharding import PartitionSpec as P

import gpusim.jax
from gpusim import Reduction
from gpusim.jax import ffi
from gpusim.jax.installation import refuse_sums
from tests.jax.checks import folded, values
from tests.jax.devices import DEVICES, MESH, SPLIT, first, mapped, same
from tests.jax.ragged import ragged_call
from tests.oracles.machine_time import PATIENCE, until


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
            "device ", "lax.ragged_all_to_all over 'i' at ", "ragged.py:",
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
            "for 12 seconds", "[0] have not", "lax.psum over 'i'", "behaviour.py:",
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
    same(first(program(x)[0]), folded(x, reduction))
    with gpusim.jax.installed():
        same(program(x)[0], results[0])
    same(first(program(x)[0]), folded(x, reduction))
    gpusim.jax.uninstall()
    gpusim.jax.uninstall()
    assert state() == before
    for found, expected in zip(program(x), results, strict=True):
        same(found, expected)
    assert (first(results[0]) != folded(x, reduction)).any()
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
