"""Compiled kernels: how they are chosen, built, kept and given up, and what studies take from them.
The contract's tests run on them too."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gpusim import compiled
from gpusim.compiled import build, run
from gpusim.cuda.device import Kernel
from gpusim.fallback import fold, kernels, limits, ragged_copy, round_to
from gpusim.fallback.copies import copy
from gpusim.fallback.kernels import chosen
from gpusim.fallback.philox import Lanes
from gpusim.fallback.quantile import normal_quantile
from gpusim.fallback.wires import INTEGERS, WireInfo, round_to_wire
from gpusim.tools.study.reference import exact_sum
from gpusim.tools.study.synthetic import Synthetic
from tests.contract.kernel_sets import on_every_set
from tests.oracles.budget import budget
from tests.oracles.machine_time import PATIENCE

FOLD = """
import numpy as np, gpusim
from gpusim.fallback import fold
x = np.arange(65536.0, dtype=np.float16).reshape(8, -1) / 1024
print(fold(x).view(np.uint16).sum())
"""


def python(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a process that has compiled nothing."""
    monkeypatch.setenv("GPUSIM_CACHE_DIR", str(tmp_path))
    for results in (build.library, run.function, run.instance):
        monkeypatch.setattr(results, "_results", {})
    return tmp_path


def test_the_environment_asks_for_them_also_for_small_arrays(
    monkeypatch: pytest.MonkeyPatch, nothing_built: Path
) -> None:
    for name, built in (("auto", 0), ("compiled", 1)):
        monkeypatch.setenv("GPUSIM_KERNELS", name)
        monkeypatch.setattr(kernels, "_choice", kernels._Choice())
        kernels._forget_plans()
        fold(np.ones((3, 5), np.float16))
        assert len([*nothing_built.glob("**/*.so")]) == built
    kernels._forget_plans()


def test_they_are_compiled_once_and_found_by_other_processes(tmp_path: Path) -> None:
    first = python(FOLD, GPUSIM_CACHE_DIR=str(tmp_path))
    assert first.returncode == 0, first.stderr
    (made,) = tmp_path.glob("*.so")
    before = made.stat().st_mtime_ns
    second = python(FOLD, GPUSIM_CACHE_DIR=str(tmp_path), GPUSIM_KERNELS="compiled")
    plain = python(FOLD, GPUSIM_CACHE_DIR=str(tmp_path), GPUSIM_KERNELS="numpy")
    assert first.stdout == second.stdout == plain.stdout
    assert [*tmp_path.glob("*.so")] == [made] and made.stat().st_mtime_ns == before


def test_processes_and_threads_may_compile_at_once(nothing_built: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(python, FOLD) for _ in range(3)]
        x = np.ones((3, 5000), np.float16)
        with chosen("compiled"), ThreadPoolExecutor(4) as folding:
            found = [*folding.map(lambda _: fold(x)[0], range(8))]
    assert found == [3.0] * 8
    assert {other.result().returncode for other in others} == {0}
    assert not [path for path in nothing_built.iterdir() if path.suffix != ".so"]


def test_a_damaged_library_is_made_anew(tmp_path: Path) -> None:
    python(FOLD, GPUSIM_CACHE_DIR=str(tmp_path))
    (made,) = tmp_path.glob("*.so")
    damaged = made.read_bytes()[:-1000]
    made.write_bytes(damaged)
    again = python(FOLD, GPUSIM_CACHE_DIR=str(tmp_path), GPUSIM_KERNELS="compiled")
    assert again.returncode == 0, again.stderr
    assert made.stat().st_size > len(damaged)


@pytest.mark.parametrize(("name", "expected"), [("numpy", None), ("compiled", "gpusim.compiled")])
def test_the_environment_chooses(name: str, expected: str | None) -> None:
    text = (
        "import gpusim\nfrom fallback import kernels\n"
        "print(getattr(kernels.compiled(), '__name__', None))"
    )
    assert python(text, GPUSIM_KERNELS=name).stdout.strip() == str(expected)


def test_a_wrong_choice_is_an_error() -> None:
    failed = python(FOLD, GPUSIM_KERNELS="fast")
    assert "GPUSIM_KERNELS='fast': expected one of auto, numpy, compiled" in failed.stderr
    with pytest.raises(ValueError, match="kernels 'fast': expected one of"), chosen("fast"):
        pass


def test_without_a_compiler_numpy_runs_or_the_extra_is_named() -> None:
    hide = "import sys; sys.modules['ziglang'] = None\n"
    absent = hide + FOLD
    assert python(absent).stdout == python(FOLD, GPUSIM_KERNELS="numpy").stdout
    asked = python(absent, GPUSIM_KERNELS="compiled")
    assert "GPUSIM_KERNELS=compiled: ziglang is not installed" in asked.stderr
    assert "pip install 'gpusim[fast]'" in asked.stderr


def test_a_compiler_that_fails_leaves_the_work_to_numpy(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "--no-such-option"))
    x = np.ones((3, 5000), np.float16)
    with chosen("auto"), pytest.warns(RuntimeWarning, match=r"compiling .*NumPy's kernels run"):
        assert fold(x)[0] == 3.0
    monkeypatch.setattr(run.instance, "_results", {})
    monkeypatch.setattr(run.function, "_results", {})
    with chosen("compiled"), pytest.raises(RuntimeError, match="compiling kernels"):
        fold(x)


def test_a_long_compilation_is_announced_and_bounded(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "ANNOUNCED", 0.0)
    build.compile_unit('#include "numbers.h"\n')
    assert "compiling kernels for this CPU, once" in capfd.readouterr().err
    monkeypatch.setattr(build, "BOUND", 0.001)
    with pytest.raises(RuntimeError, match="timed out"):
        build.compile_unit('#include "numbers.h"\n')


def test_small_folds_compile_nothing(nothing_built: Path) -> None:
    with chosen("auto"):
        fold(np.ones((2, limits.COMPILED_WORK // 2 - 1), np.float16))
    assert not [*nothing_built.iterdir()]


def test_a_fold_in_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((5, 3, 4500)).astype(np.float16)
    with chosen("numpy"):
        expected = fold(x, rounding="stochastic", order="ring")
    monkeypatch.setattr(run, "PART", 1)
    with chosen("compiled"):
        found = fold(x, rounding="stochastic", order="ring")
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def test_members_at_any_address() -> None:
    """Of odd alignment, of negative strides, and in a list in any order of addresses."""
    raw = np.random.default_rng(0).integers(0, 30_000, (6, 4001), np.uint16)
    shifted = np.zeros(raw.nbytes + 1, np.uint8)[1:].view(np.uint16).reshape(raw.shape)
    shifted[...] = raw
    wide = raw.view(np.float16)
    cases = [shifted.view(np.float16), wide[::-1, ::-2], [*wide[[3, 1, 4]]], wide.T[:, :5]]
    for members in cases:
        results = []
        for name in ("numpy", "compiled"):
            with chosen(name):
                results.append([fold(members, order=order) for order in ("reverse", "tree")])
        np.testing.assert_array_equal(*results)


@given(
    arrays.arrays(np.uint64, st.integers(0, 5000), elements=st.integers(0, 2**64 - 1)),
    st.integers(0, 2**40),
    st.integers(1, 300),
)
@settings(max_examples=budget(200), deadline=None)
def test_random_numbers_and_normals(words: np.ndarray, first: int, count: int) -> None:
    source = Synthetic("normal", 2**41, 7)
    found = []
    for name in ("numpy", "compiled"):
        with chosen(name):
            large = np.resize(words, 5000) if words.size else np.arange(5000, dtype=np.uint64)
            drawn = source.words([0, 2**31, 5], 2, first, count)
            found.append((normal_quantile(large).view(np.uint64), drawn))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


@given(
    st.integers(0, 2**32),
    st.sampled_from([np.float64, np.float32, np.float16, ml_dtypes.bfloat16]),
    st.integers(1, 40),
    st.integers(1, 300),
    st.sampled_from([0, 3, 20, 100]),
)
@settings(max_examples=budget(400), deadline=None)
def test_exact_sums(seed: int, dtype: type, count: int, width: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    exact = rng.standard_normal((count, width)) * 2.0 ** rng.integers(
        -spread, spread + 1, (1, width)
    )
    with np.errstate(all="ignore"):
        rows = exact.astype(dtype)
    found = []
    for name in ("numpy", "compiled"):
        with chosen(name):
            exact = exact_sum(rows)
            found.append((exact.high, exact.low))
    np.testing.assert_array_equal(found[0], found[1])
    finite = np.isfinite(rows.astype(np.float64)).all(axis=0)
    for column in np.flatnonzero(finite)[:5]:
        assert found[1][0][column] == math.fsum(rows[:, column].astype(float).tolist())


@pytest.mark.parametrize("name", ["numpy", "compiled"])
def test_exact_sums_out_of_range_are_refused(name: str) -> None:
    largest = np.finfo(np.float64).max
    with chosen(name):
        for values in ([largest, 1e292], [1.7e308, 1.7e308], [1.7e308] * 100_000):
            with pytest.raises(OverflowError, match="leaves the range of float64"):
                exact_sum(np.array(values)[:, np.newaxis])
        exact = exact_sum(np.array([[largest], [-1.0]]))
        assert (exact.high.item(), exact.low.item()) == (largest, -1.0)
        assert exact_sum(np.array([[np.inf], [largest]])).high.item() == np.inf


@pytest.mark.parametrize("elements", [1, 31, 32, 2047, 2049, 5000])
@pytest.mark.parametrize("block", [1, 32, 33, 1500, 2500, None])
def test_messages_with_blocks_of_any_length(elements: int, block: int | None) -> None:
    rng = np.random.default_rng(elements)
    x = (rng.standard_normal((2, elements)) * 2.0 ** rng.integers(-140, 120, elements)).astype("f4")
    x[0, ::7] = 0
    x[1, elements // 2] = np.nan
    for form, scale in (("float8_e4m3fn", "floor"), ("int8", "amax"), ("float8_e5m2", "even")):
        kind = INTEGERS.get(form) or np.dtype(getattr(ml_dtypes, form, form))
        wire = WireInfo(kind, scale, block)
        found = []
        for name in ("numpy", "compiled"):
            with chosen(name):
                found.append(round_to_wire(x, wire, batch_ndim=1))
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_every_float16_and_its_neighbours_round_alike(target: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, target, target))
    exact = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    exact = np.concatenate([exact, exact * np.float32(2.0**-40), exact * np.float32(2.0**100)])
    bits = exact.view(np.uint32)
    x = np.concatenate([bits, bits + 1, bits - 1]).view(np.float32)
    for rounding in ("nearest", "stochastic"):
        found = []
        for name in ("numpy", "compiled"):
            with chosen(name), np.errstate(all="ignore"):
                found.append(round_to(x, dtype, rounding=rounding).astype(np.float32))
        np.testing.assert_array_equal(*found)


@settings(max_examples=budget(3000, most=150), deadline=None)
@given(
    name=st.sampled_from(
        ["float16", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz"]
    ),
    out=st.sampled_from([None, "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float32"]),
    members=st.integers(1, 11),
    width=st.sampled_from([1, 15, 64, 2049]),
    largest=st.integers(0, 8),
    strange=st.integers(0, 3),
    order=st.sampled_from(["linear", "reverse", "ring"]),
    seed=st.integers(0, 2**31),
)
def test_float16_sums_near_and_beyond_its_end(
    name: str,
    out: str | None,
    members: int,
    width: int,
    largest: int,
    strange: int,
    order: str,
    seed: int,
) -> None:
    """Where sums leave the range, and come back as infinity; and with a few infinities and NaNs."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    top = float(ml_dtypes.finfo(dtype).max) * 2.0**-largest
    x = (rng.uniform(-top, top, (members, width)) ** rng.choice([1, 3])).clip(-top, top)
    x = x.astype(dtype)
    x.flat[rng.integers(x.size, size=strange)] = rng.choice([np.inf, -np.inf, np.nan])
    to = None if out is None else np.dtype(getattr(ml_dtypes, out, out))
    on_every_set(lambda: fold(x, order=order, out_dtype=to, accumulate=np.float16))


@pytest.mark.parametrize("exponent", range(-24, 16))
def test_every_sum_of_float16_is_rounded_to_nearest(exponent: int) -> None:
    """All numbers of one exponent, each plus one that brings all last places and ties about."""
    ulp, count = 2.0 ** max(exponent - 10, -24), 1024
    first = np.arange(count) * ulp + (2.0**exponent if exponent > -15 else 0)
    for other in (ulp / 2, 3 * ulp / 4, 2.0**exponent, 1023 * ulp, 2.0 ** (exponent - 11)):
        x = np.stack([first, np.full(count, other), -first[::-1]]).astype(np.float16)
        on_every_set(lambda x=x: fold(x, accumulate=np.float16))
        expected = (x[0].astype(np.float64) + x[1]).astype(np.float16)
        with chosen("compiled"):
            assert fold(x[:2], accumulate=np.float16).tobytes() == expected.tobytes()


def test_segments_of_rows_of_any_length() -> None:
    rng = np.random.default_rng(0)
    sources = rng.integers(0, 255, (3, 50, 7), np.uint8)
    lengths = rng.integers(0, 4, 60)
    to = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    segments = np.stack(
        [rng.integers(0, 3, 60), rng.integers(0, 46, 60), to // 1000, to, lengths], axis=1
    )
    found = []
    for name in ("numpy", "compiled"):
        output = np.zeros((1, 200, 7), np.uint8)
        with chosen(name):
            ragged_copy(sources, output, segments)
        found.append(output)
    assert found[0].any()
    np.testing.assert_array_equal(*found)


@settings(max_examples=budget(1000), deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=3),
    st.integers(1, 700),
    st.sampled_from(["u1", "f2", "f8", "c16"]),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_copies_past_the_caches_of_arrays_of_any_strides(
    outer: list[int], inner: int, dtype: str, step: int, random: random.Random
) -> None:
    shape = (*outer, inner)

    def view(of: tuple[int, ...]) -> np.ndarray:
        """Zeros in this shape, with the axes in any order in memory, at any step."""
        order = random.sample(range(len(of)), len(of)) if random.random() < 0.5 else range(len(of))
        made = np.zeros([of[axis] * (step if axis == order[0] else 1) for axis in order], dtype)
        return made[:: random.choice([step, -step])].transpose(np.argsort(order))

    target, source = view(shape), view(tuple(random.choice([n, n, n, 1]) for n in shape))
    source[...] = np.arange(1, source.size + 1).reshape(source.shape)
    if compiled.copy(target, source):
        np.testing.assert_array_equal(target, np.broadcast_to(source, shape))
        around = target if target.base is None else target.base
        assert np.count_nonzero(around) == np.count_nonzero(target)
    else:
        assert not target.any()


def test_large_copies_go_past_the_caches() -> None:
    x = np.random.default_rng(0).integers(0, 255, (8, limits.STREAMED // 8 + 3), np.uint8)
    out = np.empty_like(x)
    with chosen("compiled"):
        copy([(out[7 - k], x[k]) for k in range(8)])
    np.testing.assert_array_equal(out, x[::-1])
    out.flags.writeable = False
    with chosen("compiled"), pytest.raises(ValueError, match="read-only"):
        copy([(out, x)])


@pytest.mark.slow
def test_every_instance_compiles() -> None:
    """Those of the GPU's folds and roundings that the CPU's kernels stand for."""
    from gpusim.cuda import templates

    wanted = {
        kernel
        for unit, instances in templates.units().items()
        for kernel in instances
        if unit == "round" or (unit.startswith("fold ") and "int" not in unit)
    }
    with chosen("compiled"):
        lacking = [kernel for kernel in wanted if run.function(Kernel(*kernel)) is None]
    assert not lacking and len(wanted) > 50


@pytest.mark.parametrize("kernel_set", ["numpy", "compiled"])
def test_a_random_number_that_equals_the_share_does_not_round_up(kernel_set: str) -> None:
    """Of bfloat16 the share has 16 bits: of 2**20 random numbers some 16 end in as many zeros."""
    lanes = Lanes(5, 0).draw(1 << 20, start=0, step=1, batch_offset=0)
    hits = np.flatnonzero((lanes & np.uint32(0xFFFF)) == 0)
    assert hits.size > 3
    x = np.ones(1 << 20, np.float32)
    bits = x.view(np.uint32)
    bits[hits] += lanes[hits] >> np.uint32(16)
    with chosen(kernel_set):
        equal = round_to(x, ml_dtypes.bfloat16, rounding="stochastic", seed=5)
        bits[hits] += np.uint32(1)
        above = round_to(x, ml_dtypes.bfloat16, rounding="stochastic", seed=5)
    assert (equal[hits] == 1).all() and (above[hits] > 1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_during_a_compilation_compiles_by_itself() -> None:
    text = """
import os, threading, time, numpy as np, gpusim
from gpusim.fallback import fold
from gpusim.compiled import build
begun, real = threading.Event(), build.compile_unit
def slowly(unit):
    begun.set()
    time.sleep(1)
    return real(unit)
build.compile_unit = slowly
x = np.ones((3, 5000), np.float16)
thread = threading.Thread(target=fold, args=(x,))
thread.start()
begun.wait()
if child := os.fork():
    thread.join()
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
build.compile_unit = real
os._exit(int(fold(x)[0] != 3))
"""
    done = python(text, GPUSIM_CACHE_DIR="")
    assert done.returncode == 0, done.stderr
