"""fold against the numerics contract: a scalar implementation in exact arithmetic, bit for bit."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.fallback import fold, limits, round_to
from tests.contract.fold_limits import fold_limits
from tests.oracles.budget import budget
from tests.oracles.reference_fold import FLOATS, codes_of, philox, reference_fold

REALS = [np.dtype(getattr(ml_dtypes, name, name)) for name in FLOATS]
COMPLEXES = [np.dtype(np.complex64), np.dtype(np.complex128)]
INTS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
ORDERS = ["linear", "reverse", "tree", "ring"]

# Blocks of a few elements, and either way of folding: the bits may depend on none of these.
CUTS = {
    "by member": {"BLOCK": 5, "ROW_WIDTH": 0, "CAST_WIDTH": 0},
    "by rows": {
        "BLOCK": 24,
        "ROW_WIDTH": 1 << 40,
        "ROW_MEMBERS": 1,
        "ACCUMULATE_WIDTH": 0,
        "CAST_WIDTH": 0,
    },
    "accumulated": {"BLOCK": 7, "ROW_WIDTH": 1 << 40, "ROW_MEMBERS": 1, "ACCUMULATE_WIDTH": 99},
    "as shipped": {"BLOCK": limits.BLOCK},
}


@np.errstate(over="ignore")
def numbers(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Values of every sort: any bits, moderate ones, subnormal ones, and a few of the special."""
    random = np.random.default_rng(seed)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return numbers(seed, (*shape, 2), part).view(dtype)[..., 0]
    unsigned = np.dtype(f"u{dtype.itemsize}")
    bits = random.integers(0, 2 ** (8 * dtype.itemsize), shape, unsigned)
    moderate = random.normal(size=shape).astype(np.float32).astype(dtype)
    alike = (random.normal(size=shape) * 2.0 ** random.integers(-160, 130)).astype(np.float32)
    fmt = FLOATS[dtype.name]
    small = bits & unsigned.type(2 ** (fmt.fraction_bits + 2) - 1)
    small |= bits & unsigned.type(2 ** (fmt.bits - 1))
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1], np.float32).astype(dtype)
    sorts = np.array([bits.view(dtype), moderate, alike.astype(dtype), small.view(dtype)], dtype)
    mixed = np.take_along_axis(sorts, random.integers(0, 4, (1, *shape)), 0)[0]
    chosen = mixed if seed % 3 == 0 else sorts[seed % 4]
    rare = random.random(shape) < 0.06
    return np.where(rare, special[random.integers(0, 7, shape)], chosen)


def arranged(values: np.ndarray, layout: str) -> Any:
    """The same members in other memory."""
    if layout == "list":
        return [values[0], *(np.array(v, order="F") for v in values[1:])]
    if layout == "list of strided":
        return [np.repeat(v[..., None], 3, -1)[..., 1] for v in values]
    if layout == "fortran":
        return np.asfortranarray(values)
    if layout == "read-only, backwards":
        turned = values[::-1].copy()[::-1]
        turned.flags.writeable = False
        return turned
    return values


LAYOUTS = ["stacked", "list", "list of strided", "fortran", "read-only, backwards"]


def cut_somewhere(
    draw: st.DrawFn, options: dict[str, Any], shape: tuple[int, ...], members: int
) -> tuple[int, ...]:
    """Perhaps a `cut_axis` for a ring, which needs a length that the members divide."""
    axes = len(shape) - options["batch_ndim"]
    if options["order"] == "ring" and axes and draw(st.booleans()):
        cut = options["cut_axis"] = draw(st.integers(0, axes - 1))
        at = options["batch_ndim"] + cut
        shape = (*shape[:at], members * min(shape[at], 2), *shape[at + 1 :])
    return shape


def place_somewhere(draw: st.DrawFn, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """One place for all batch entries, or for each its own."""
    batch = shape[: options["batch_ndim"]]
    places = np.random.default_rng(options["seed"]).integers(0, 2**64, batch, np.uint64)
    options["places"] = draw(st.sampled_from([0, 2**64 - 1, places]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, str, dict[str, Any], str]:
    dtype = draw(st.sampled_from(REALS + COMPLEXES))
    members = draw(st.integers(1, 9))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    options: dict[str, Any] = {
        "op": draw(st.sampled_from(["sum", "sum", "prod"] + ["max", "min"] * (dtype.kind != "c"))),
        "accumulate": draw(st.none() | st.sampled_from(REALS)),
        "out_dtype": draw(st.none() | st.sampled_from(COMPLEXES if dtype.kind == "c" else REALS)),
        "divisor": draw(st.none() | st.integers(1, 300)),
        "batch_ndim": draw(st.integers(0, len(shape))),
        "rounding": draw(st.sampled_from(["nearest", "stochastic"])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "call": draw(st.integers(0, 2**64 - 1)),
    }
    exact = ["exact"] * (options["op"] != "prod")
    options["order"] = draw(st.sampled_from([*ORDERS, *exact]))
    shape = cut_somewhere(draw, options, shape, members)
    place_somewhere(draw, options, shape)
    values = numbers(draw(st.integers(0, 2**30)), (members, *shape), dtype)
    return values, draw(st.sampled_from(LAYOUTS)), options, draw(st.sampled_from(list(CUTS)))


@settings(max_examples=budget(700), deadline=None)
@given(cases())
def test_fold_has_the_bits_of_the_contract(case: Any) -> None:
    values, layout, options, cut = case
    with fold_limits(**CUTS[cut]):
        result = fold(arranged(values, layout), **options)
    assert result.shape == values.shape[1:]
    assert result.flags.c_contiguous
    assert codes_of(result) == reference_fold(list(values), **options)


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("accumulate", REALS, ids=str)
def test_every_accumulator_takes_every_input(
    dtype: np.dtype[Any], accumulate: np.dtype[Any]
) -> None:
    values = numbers(9, (5, 6), dtype)
    for rounding in ("nearest", "stochastic"):
        options = {"accumulate": accumulate, "rounding": rounding, "seed": 5, "order": "ring"}
        assert codes_of(fold(values, **options)) == reference_fold(list(values), **options)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("accumulate", ["float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("order", [*ORDERS, "ring cut at axis 0", "ring cut at the last axis"])
def test_every_rounding_has_a_lane_of_its_own(order: str, accumulate: str, cut: str) -> None:
    """Values of one scale, whose sums are all inexact in the accumulator."""
    dtype, random = np.dtype(accumulate), np.random.default_rng(5)
    for members, shape, batch_ndim in [(7, (2, 14, 7), 1), (6, (12, 6), 0), (1, (3, 9), 1)]:
        x = random.normal(size=(members, *shape)).astype(np.float32)
        axis = {"ring cut at axis 0": 0, "ring cut at the last axis": len(shape) - batch_ndim - 1}
        options: dict[str, Any] = {
            "order": order.split()[0],
            "cut_axis": axis.get(order),
            "accumulate": dtype,
            "out_dtype": dtype if members < 7 else np.dtype("float8_e5m2"),
            "divisor": members if members > 6 else None,
            "batch_ndim": batch_ndim,
            "rounding": "stochastic",
            "seed": 2**63 + 3,
            "call": 5,
            "places": np.arange(7, 7 + shape[0]) if batch_ndim else 3,
        }
        with fold_limits(**CUTS[cut]):
            result = fold(x, **options)
        assert codes_of(result) == reference_fold(list(x), **options)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_integers_wrap_in_every_order(data: st.DataObject) -> None:
    dtype, accumulate, out = (data.draw(st.sampled_from(INTS)) for _ in range(3))
    values = np.random.default_rng(data.draw(st.integers(0, 2**30))).integers(
        0, 2**64, (data.draw(st.integers(1, 9)), 3), np.uint64
    )
    values = values.astype(dtype)
    op = data.draw(st.sampled_from(["sum", "prod", "max", "min"]))
    order = data.draw(st.sampled_from(ORDERS))
    result = fold(values, op=op, order=order, accumulate=accumulate, out_dtype=out)
    expected = [python_fold(op, column, accumulate) for column in values.T.tolist()]
    assert result.tolist() == [wrap(x, out) for x in expected]


def wrap(x: int, dtype: np.dtype[Any]) -> int:
    low = np.iinfo(dtype).min
    return (x - low) % 2 ** (8 * dtype.itemsize) + low


def python_fold(op: str, xs: list[int], accumulate: np.dtype[Any]) -> int:
    if op in ("max", "min"):
        return (max if op == "max" else min)(xs)
    total = xs[0]
    for x in xs[1:]:
        total = total + x if op == "sum" else total * x
    return wrap(total, accumulate)


def test_integers_keep_their_dtype_under_a_floating_point_accumulator() -> None:
    x = np.array([[100], [100]], np.int8)
    assert fold(x, accumulate=np.float16, rounding="stochastic").tolist() == [-56]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [np.dtype(bool), *REALS, *INTS, *COMPLEXES], ids=str)
def test_logical_operators_ask_whether_values_are_zero(dtype: np.dtype[Any], order: str) -> None:
    x = np.array([[0, 0, 1, 1], [0, 1, 0, 1]]).astype(dtype)
    both = fold(x, op="logical_and", order=order)
    assert both.dtype == dtype and both.tolist() == [0, 0, 0, 1]
    either = fold(x, op="logical_or", order=order, out_dtype=np.float16)
    assert either.dtype == np.float16 and either.tolist() == [0, 1, 1, 1]


def test_logical_operators_take_nan_and_an_imaginary_part_as_nonzero() -> None:
    assert fold(np.array([np.nan, -0.0]), op="logical_or").tolist() == 1.0
    assert fold(np.array([1j, 1]), op="logical_and").tolist() == 1 + 0j


def test_bools_have_a_maximum_but_no_sum() -> None:
    x = np.array([[True, False], [False, False]])
    assert fold(x, op="max").tolist() == [True, False]
    assert fold(x, op="min").tolist() == [False, False]
    with pytest.raises(TypeError, match="op='sum' is not defined for bool"):
        fold(x)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("members", [1, 2, 3, 40])
def test_a_sum_of_negative_zeros_is_negative(order: str, members: int) -> None:
    assert np.signbit(fold(np.full((members, 50), -0.0), order=order)).all()


@pytest.mark.parametrize("members", [1, 8, 65, 300])
@pytest.mark.parametrize("order", ORDERS)
def test_many_members_have_the_bits_of_a_plain_loop(order: str, members: int) -> None:
    x = np.random.default_rng(members).normal(size=(members, 301)).astype(np.float32)
    expected = [float32_loop(x[:, i], order, i) for i in range(301)]
    for arrangement in (x, list(x), np.asfortranarray(x)):
        assert fold(arrangement, order=order).tolist() == expected


def float32_loop(column: np.ndarray, order: str, index: int) -> float:
    level = list(column)
    if order == "tree":
        while len(level) > 1:
            pairs = [a + b for a, b in zip(level[::2], level[1::2], strict=False)]
            level = pairs + level[len(pairs) * 2 :]
        return float(level[0])
    length, longer = divmod(301, len(level))
    start = index // (length + 1) if index < longer * (length + 1) else 0
    if index >= longer * (length + 1):
        start = longer + (index - longer * (length + 1)) // length
    turned = {"linear": level, "reverse": level[::-1], "ring": level[start:] + level[:start]}[order]
    total = turned[0]
    for x in turned[1:]:
        total = total + x
    return float(total)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("order", ORDERS)
def test_large_values_are_folded_as_small_ones_are(dtype: str, order: str) -> None:
    """Several blocks as shipped, against pieces folded on their own."""
    x = np.random.default_rng(1).normal(size=(4, 300_000)).astype(np.dtype(dtype))
    result = fold(x, order=order).astype(np.float32)
    for start in (0, 75_000 - 40, 131_072 - 40, 299_920):
        piece = slice(start, start + 80)
        loop = [
            fold(np.roll(x[:, i], -(i // 75_000)), order="linear")
            if order == "ring"
            else fold(x[:, i], order=order)
            for i in range(piece.start, piece.stop)
        ]
        assert result[piece].tolist() == np.array(loop, np.float32).tolist()


def test_ring_order_starts_block_b_at_member_b() -> None:
    x = np.zeros((3, 7), np.float16)
    x[:, :] = [[2048], [1], [1]]  # 2048 + 1 is 2048; 1 + 1 + 2048 is 2050
    assert fold(x, order="ring").tolist() == [2048, 2048, 2048, 2050, 2050, 2048, 2048]


def test_a_ring_may_have_more_members_than_elements() -> None:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    assert fold(x, order="ring").tolist() == [30, 36]


def test_a_ring_cut_along_an_axis_gives_each_member_a_slice() -> None:
    x = np.empty((2, 3, 4), np.float16)
    x[0], x[1] = 2048, 1
    x = np.concatenate([x, np.ones((1, 3, 4), np.float16)])[:, :, :3]
    assert fold(x, order="ring", cut_axis=1).tolist() == [[2048, 2050, 2048]] * 3


def test_batch_entries_are_cut_and_drawn_separately() -> None:
    x = numbers(4, (5, 3, 4, 7), np.dtype(np.float16))
    options: dict[str, Any] = {"order": "ring", "rounding": "stochastic", "seed": 3}
    together = fold(x, batch_ndim=2, places=np.arange(12).reshape(3, 4), **options)
    for entry in range(12):
        alone = fold(x.reshape(5, 12, 7)[:, entry], places=entry, **options)
        assert codes_of(together.reshape(12, 7)[entry]) == codes_of(alone)


@pytest.mark.parametrize("order", ORDERS)
def test_equal_members_need_no_memory_of_their_own(order: str) -> None:
    x = np.broadcast_to(np.float32(0.1), (1000, 5, 3))
    expected = fold(np.full((1000, 5, 3), np.float32(0.1)), order=order)
    assert fold(x, order=order).tolist() == expected.tolist()
    assert fold([x[0]] * 1000, order=order).tolist() == expected.tolist()


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
@pytest.mark.parametrize("order", ORDERS)
def test_empty_values_fold_to_empty_values(shape: tuple[int, ...], order: str) -> None:
    result = fold(np.zeros((4, *shape), np.float16), order=order, out_dtype=np.float32)
    assert result.shape == shape and result.dtype == np.float32


def test_single_numbers_fold_to_arrays_without_axes() -> None:
    result = fold([np.float32(1), np.float32(2)])
    assert isinstance(result, np.ndarray) and result.shape == () and result == 3


def test_the_result_never_shares_memory_with_a_member() -> None:
    x = np.ones((1, 4), np.float32)
    result = fold(x)
    result[:] = 7
    assert x.tolist() == [[1, 1, 1, 1]]


def test_division_is_by_the_divisor_and_not_by_its_reciprocal() -> None:
    x = np.array([[5], [0], [0]], np.float32)
    assert fold(x, divisor=3) == np.float32(5) / np.float32(3)
    assert fold(x, divisor=3) != np.float32(5) * (np.float32(1) / np.float32(3))


def test_lanes_follow_the_generator_as_published() -> None:
    """Known answers of Random123's philox4x64-10."""
    assert philox((0, 0), (0, 0, 0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


def test_stochastic_rounding_has_the_mean_of_what_it_rounds() -> None:
    """4096 replicas of one addition: mean within five standard errors."""
    n = 1 << 18
    x = np.stack([np.ones(n, np.float16), np.full(n, 2.0**-10 * 0.3, np.float16)])
    share = (float(x[1, 0]) / 2.0**-10) % 1
    result = fold(x, rounding="stochastic", seed=11).astype(float)
    error = abs(((result - 1) / 2.0**-10).mean() - share)
    assert error < 5 * (share * (1 - share) / n) ** 0.5


@pytest.mark.parametrize(
    ("members", "options", "error", "message"),
    [
        ([], {}, ValueError, "members is empty"),
        (np.zeros((0, 3)), {}, ValueError, "members is empty"),
        (np.array(1.0), {}, ValueError, "0-d"),
        ([np.zeros(2), np.zeros(3)], {}, ValueError, r"members\[1\] has shape \(3,\)"),
        ([np.zeros(2), np.zeros(2, "f4")], {}, TypeError, r"members\[1\] has dtype float32"),
        (np.zeros(2), {"op": "mean"}, ValueError, "op='mean'"),
        (np.zeros(2), {"order": "random"}, ValueError, "order='random'"),
        (np.zeros(2), {"rounding": "up"}, ValueError, "rounding='up'"),
        (np.zeros(2), {"accumulate": np.int32}, TypeError, "accumulate=int32"),
        (np.zeros(2), {"accumulate": np.complex64}, TypeError, "accumulate=complex64"),
        (np.zeros(2), {"out_dtype": np.int32}, TypeError, "out_dtype=int32"),
        (np.zeros(2, int), {"out_dtype": np.float32}, TypeError, "out_dtype=float32"),
        (np.zeros(2, int), {"divisor": 2}, TypeError, "divisor=2"),
        (np.zeros(2), {"divisor": 0}, ValueError, "divisor=0"),
        (np.zeros(2, "O"), {}, TypeError, "object is not supported"),
        (np.zeros(2, ">f8"), {}, TypeError, ">f8 is not supported"),
        (np.zeros(2, complex), {"op": "max"}, TypeError, "op='max' is not defined for complex"),
        (np.zeros(2), {"seed": -1}, ValueError, "seed=-1"),
        (np.zeros(2), {"call": 2**64}, ValueError, "call="),
        (np.zeros((2, 3)), {"places": [0, 1, 2]}, ValueError, "places"),
        (np.zeros(2), {"places": -1}, ValueError, "places=-1"),
        (np.zeros(2), {"places": 0.5}, ValueError, "places=0.5"),
        (np.zeros((2, 3)), {"batch_ndim": 2}, ValueError, "batch_ndim=2"),
        (np.zeros((2, 3)), {"order": "ring", "cut_axis": 0}, ValueError, "2 members do not divide"),
        (np.zeros((2, 4)), {"order": "ring", "cut_axis": 1}, ValueError, "cut_axis=1"),
    ],
)
def test_what_does_not_fit_is_named(
    members: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fold(members, **options)


# Where fenv_t keeps the control word, as (index of the 32-bit word, the bit that flushes).
CONTROL = {"x86_64": (7, 1 << 15), "AMD64": (7, 1 << 15), "aarch64": (0, 1 << 24)}


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in CONTROL,
    reason="sets the processor's control word through glibc's fenv_t",
)
@pytest.mark.parametrize("kernel", [lambda: fold(np.zeros(2)), lambda: round_to(1.0, "float16")])
def test_a_thread_that_flushes_subnormals_is_refused(kernel: Any) -> None:
    errors: list[Exception] = []

    def run() -> None:
        libm = ctypes.CDLL(ctypes.util.find_library("m"))
        environment = (ctypes.c_uint32 * 16)()
        libm.fegetenv(environment)
        word, bit = CONTROL[platform.machine()]
        environment[word] |= bit
        libm.fesetenv(environment)
        try:
            kernel()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)  # the control word is the thread's own
    thread.start()
    thread.join()
    assert [type(error) for error in errors] == [RuntimeError]
    kernel()
