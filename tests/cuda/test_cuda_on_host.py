"""The CUDA sources, compiled for the host and run over real grids, have the bits of fallback.
Every instance of every template runs here; that they compile for GPUs is another file's claim."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import fallback
from gpusim.cuda import folding, scatter, targets, templates
from gpusim.cuda.device import Kernel, Launch
from gpusim.fallback.formats import FormatInfo
from tests.contract.test_exact import SUMS, adversarial
from tests.contract.test_fold_contract import (
    COMPLEXES,
    INTS,
    LAYOUTS,
    ORDERS,
    REALS,
    arranged,
    cut_somewhere,
    numbers,
    place_somewhere,
)
from tests.contract.test_fold_passed_on import cases as shares
from tests.contract.test_fold_passed_on import passed_on, subtrees
from tests.contract.test_ragged_copy import random_segments, row_by_row
from tests.cuda.host_cuda.device import HostDevice, has_compiler, library
from tests.cuda.host_cuda.values import any_bits, moderate, same
from tests.oracles.budget import budget, slow

assert has_compiler(), "these tests compile the CUDA sources for the host: install g++, or set CXX"

DEVICE = HostDevice()
BOOL = np.dtype(bool)
ROUNDINGS = ["nearest", "stochastic"]
E3M2 = gpusim.Format(3, 2, has_infinities=False, high_nans=0).info
NO_SUBNORMALS = gpusim.Format(4, 3, has_subnormals=False).info
NO_FRACTION = gpusim.Format(8, 0, has_infinities=False).info
UNSIGNED = gpusim.Format(5, 2, is_signed=False, has_negative_zero=False).info
WIDE = gpusim.Format(9, 20).info  # float32 does not hold its values
GRIDS = [E3M2, NO_SUBNORMALS, NO_FRACTION, UNSIGNED, WIDE]


def _arrays(members: Any) -> Any:
    """A list's scalars as arrays without axes, since no device holds scalars."""
    return [np.asarray(m) for m in members] if isinstance(members, list) else members


def check(members: Any, device: HostDevice = DEVICE, **options: Any) -> None:
    same(device.fold(members, **options), fallback.fold(members, **options))


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, str, dict[str, Any], int]:
    dtype = draw(st.sampled_from(REALS + REALS + COMPLEXES + INTS))
    floating = dtype in REALS
    members = draw(st.integers(1, 40))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 33]), max_size=3)))
    selects = ["max", "min"] * (dtype.kind != "c") + ["logical_and", "logical_or"]
    accumulators = INTS if dtype in INTS else REALS + GRIDS * floating
    outs = COMPLEXES if dtype.kind == "c" else INTS if dtype in INTS else REALS
    options: dict[str, Any] = {
        "op": draw(st.sampled_from(["sum", "sum", "sum", "prod", *selects])),
        "accumulate": draw(st.none() | st.sampled_from(accumulators)),
        "out_dtype": draw(st.none() | st.sampled_from(outs)),
        "batch_ndim": draw(st.integers(0, len(shape))),
        "rounding": draw(st.sampled_from(ROUNDINGS)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "call": draw(st.integers(0, 2**64 - 1)),
    }
    if dtype not in INTS and not options["op"].startswith("logical"):
        options["divisor"] = draw(st.none() | st.integers(1, 300))
    others = ["exact"] * (options["op"] != "prod")
    others += ["kahan", "neumaier"] * (options["op"] != "prod" and options["rounding"] == "nearest")
    options["order"] = draw(st.sampled_from([*ORDERS, *others]))
    shape = cut_somewhere(draw, options, shape, members)
    place_somewhere(draw, options, shape)
    seed = draw(st.integers(0, 2**30))
    if dtype in INTS:
        values = moderate((members, *shape), dtype, seed)
    else:
        values = numbers(seed, (members, *shape), dtype)
    return values, draw(st.sampled_from(LAYOUTS)), options, draw(st.sampled_from([0, 1 << 30]))


@settings(max_examples=budget(250), deadline=None)
@given(cases())
def test_fold_has_the_bits_of_fallback(case: Any) -> None:
    values, layout, options, busy_threads = case
    check(_arrays(arranged(values, layout)), HostDevice(busy_threads), **options)


def instances(unit: str) -> list[dict[str, Any]]:
    """Options that, together, launch every instance of a fold's translation unit."""
    dtype = next(d for d, name in targets.NAMES.items() if f"fold {name}" == unit)
    wide = [np.dtype(np.int64)] if dtype in INTS else [np.dtype(np.float64), np.float16]
    accumulators = [dtype, *wide] if dtype in INTS else [np.float32, "bfloat16", E3M2, WIDE, *wide]
    return [
        {"op": op, "order": order, "accumulate": accumulate, "rounding": rounding}
        for op, order, accumulate, rounding in product(
            ("sum", "prod", "max", "min"), ORDERS, accumulators, ROUNDINGS
        )
    ]


@pytest.mark.parametrize("unit", [unit for unit in templates.units() if unit.startswith("fold")])
def test_every_instance_of_the_fold_runs_and_has_the_bits(unit: str) -> None:
    device = HostDevice()
    dtype = next(d for d, name in targets.NAMES.items() if f"fold {name}" == unit)
    launched: set[Kernel] = set()
    for members, length in ((11, 83), (3, 16)):
        x = moderate((members, length), dtype)
        for device.busy_threads in (0, 1 << 30):
            for options in instances(unit):
                check(x, device, seed=7, **options)
    launched |= {launch.kernel for launch in device.launches}
    assert launched == set(templates.units()[unit])


def test_every_instance_of_exact_sums_runs_and_has_the_bits() -> None:
    device = HostDevice()
    every = templates.units()["exact"]
    for dtype in REALS:
        for members, accumulate in product((1, 4, 9), (None, np.float16, np.float64, NO_FRACTION)):
            x = adversarial(dtype, members, 300, seed=members)
            for rounding in ROUNDINGS:
                how = {"rounding": rounding, "accumulate": accumulate, "seed": 2}
                check(x, device, order="exact", **how)
                check(x, device, order="exact", divisor=7, out_dtype=np.float32, **how)
    assert {launch.kernel for launch in device.launches} == set(every)


@pytest.mark.parametrize("order", ["kahan", "neumaier"])
def test_every_instance_of_compensated_sums_runs_and_has_the_bits(order: str) -> None:
    device = HostDevice()
    accumulators = (None, np.float16, "bfloat16", np.float32, np.float64, NO_FRACTION, E3M2)
    for dtype, members, accumulate in product(REALS, (1, 2, 9), accumulators):
        x = numbers(members, (members, 83), dtype)
        how = {"order": order, "accumulate": accumulate}
        check(x, device, **how)
        check(list(x), device, divisor=7, out_dtype=np.float32, **how)
        check(np.repeat(x, 2, axis=1)[:, ::2], device, window=(3, 99), **how)
    for dtype in COMPLEXES:
        check(numbers(1, (5, 30), dtype), device, order=order)
    launched = {launch.kernel for launch in device.launches}
    assert launched >= set(templates.units()["compensated"])


@pytest.mark.parametrize("name", SUMS)
def test_exact_sums_at_the_edges(name: str) -> None:
    values, expected = SUMS[name]
    for turned in (values, values[::-1]):
        same(DEVICE.fold(np.reshape(turned, (-1, 1)), order="exact"), np.array([expected]))


@settings(max_examples=budget(250), deadline=None)
@given(shares(), st.sampled_from(["linear", "reverse"]), st.sampled_from([0, 1 << 30]))
def test_a_fold_passed_on_has_the_bits_of_fallbacks_whole(
    case: Any, order: str, busy_threads: int
) -> None:
    values, layout, cuts, options, _ = case
    members, device = arranged(values, layout), HostDevice(busy_threads)
    found = passed_on(_arrays(members), cuts, order, device.fold, **options)
    same(found, fallback.fold(values, order=order, **options))


@settings(max_examples=120, deadline=None)
@given(shares(), st.integers(0, 3), st.sampled_from([0, 1 << 30]))
def test_a_tree_over_subtrees_has_the_bits_of_fallbacks_whole(
    case: Any, level: int, busy_threads: int
) -> None:
    values, layout, _, options, _ = case
    members, device = arranged(values, layout), HostDevice(busy_threads)
    found = subtrees(_arrays(members), 1 << level, device.fold, **options)
    same(found, fallback.fold(values, order="tree", **options))


@pytest.mark.parametrize("unit", [unit for unit in templates.units() if unit.startswith("fold")])
def test_every_instance_takes_and_gives_partial_results(unit: str) -> None:
    """In whole chunks, at their edges, and where the partial result is not aligned to them."""
    device = HostDevice()
    dtype = next(d for d, name in targets.NAMES.items() if f"fold {name}" == unit)
    for length, device.busy_threads in product((83, 96), (0, 1 << 30)):
        x = moderate((12, length), dtype)
        for options in instances(unit):
            order = options.pop("order")
            if order in ("linear", "reverse"):
                found = passed_on(x, [2], order, device.fold, seed=7, **options)
            elif order == "tree":
                found = subtrees(x, 4, device.fold, seed=7, **options)
            else:
                found = device.fold(x, order=order, seed=7, **options)
            same(found, fallback.fold(x, order=order, seed=7, **options))
    # Trees over subtrees launch those of the partial results' dtype too.
    launched = {launch.kernel for launch in device.launches}
    assert launched >= set(templates.units()[unit])


def test_partial_results_may_lie_anywhere_on_the_device() -> None:
    x = moderate((5, 6, 40), np.float16)
    partial, expected = fallback.fold(x[:2], final=False), fallback.fold(x)
    odd = np.empty(partial.size + 1, partial.dtype)[1:].reshape(partial.shape)
    odd[...] = partial
    for given_partial in (odd, np.asfortranarray(partial), np.repeat(partial, 2, 1)[:, ::2]):
        same(DEVICE.fold(x[2:], partial=given_partial, before=2), expected)
        same(DEVICE.fold(x[2:, :, 1:], partial=given_partial[:, 1:], before=2), expected[:, 1:])


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("order", [*ORDERS, "exact"])
def test_batches_have_windows_of_their_own(order: str, rounding: str) -> None:
    for dtype in (np.float16, np.float32, np.complex64):
        x = moderate((5, 3, 2, 41), dtype)
        options: dict[str, Any] = {"order": order, "rounding": rounding, "batch_ndim": 2}
        options["places"] = np.arange(6).reshape(3, 2)
        for first, last in ((0, 41), (3, 30), (17, 18), (24, 41)):
            check(x[..., first:last], window=(first, 41), **options)
            check(x[..., first:last], window=(2**33, 2**33 + 41), **options)


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_every_output_and_accumulator_goes_with_every_input(dtype: np.dtype[Any]) -> None:
    x = numbers(9, (5, 40), dtype)
    for out, accumulate, rounding in product(REALS, [*REALS, *GRIDS], ROUNDINGS):
        check(x, out_dtype=out, accumulate=accumulate, rounding=rounding, seed=5)


@pytest.mark.parametrize("dtype", COMPLEXES, ids=str)
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_complex_values_are_two_reals(dtype: np.dtype[Any], op: str) -> None:
    x = numbers(3, (7, 5, 9), dtype)
    for order, accumulate, batch in product(ORDERS, [None, np.float16, np.float64], (0, 1)):
        check(x, op=op, order=order, accumulate=accumulate, batch_ndim=batch, divisor=3)
        check(x[:, :, ::2], op=op, order=order, accumulate=accumulate, batch_ndim=batch)


@pytest.mark.parametrize("source", INTS, ids=str)
def test_integers_wrap_in_the_accumulator(source: np.dtype[Any]) -> None:
    x = moderate((9, 37), source)
    for accumulate, out, op in product([None, *INTS], INTS, ("sum", "prod", "max", "min")):
        check(x, op=op, accumulate=accumulate, out_dtype=out)


@pytest.mark.parametrize("dtype", [*REALS, *COMPLEXES, *INTS, BOOL], ids=str)
def test_logical_operators_see_zeros_of_every_dtype(dtype: np.dtype[Any]) -> None:
    random = np.random.default_rng(1)
    x = random.integers(0, 2, (3, 90)).astype(dtype)
    if dtype.kind == "c":
        x = x * 1j
    if dtype not in INTS and dtype != BOOL:
        x[:, ::7] = -x[:, ::7]
        x[1, ::11] = np.nan
    ops = ["logical_and", "logical_or"] + ["max", "min"] * (dtype == BOOL)
    outs = [BOOL, *INTS] if dtype == BOOL else [None, *REALS, *COMPLEXES, *INTS]
    for op, out in product(ops, outs):
        check(x, op=op, out_dtype=out)
        check(x[:, 1::2], op=op, out_dtype=out)
    device = HostDevice()
    check(x, device, op="logical_or", out_dtype=bool)
    assert device.launches[0].kernel in templates.units()["logical"]


MANY = [3, 4, 5, 6, 10, 15, 31, 32, 33, 34, 47, 48, 49, 66, 127, 128, 129, 255, 256, 257, 258]


@pytest.mark.parametrize("order", [*ORDERS, "exact"])
@pytest.mark.parametrize("members", [1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 1000, 4097, *slow(*MANY)])
def test_any_number_of_members(order: str, members: int) -> None:
    for busy_threads in (0, 1 << 30):
        x = moderate((members, 19), np.float16, members)
        device = HostDevice(busy_threads)
        for rounding in ROUNDINGS:
            check(x, device, order=order, rounding=rounding, seed=members)
        check(x.astype(np.float32), device, order=order)


def staged(device: HostDevice) -> list[Launch]:
    return [each for each in device.launches if each.kernel.name.endswith(", 16>")]


# 2, 16 and very many multiprocessors: stages are shallow, and deep.
@pytest.mark.parametrize("busy_threads", [1 << 10, 1 << 13, 1 << 30])
@pytest.mark.parametrize("order", ["linear", "reverse", "ring"])
def test_few_elements_are_copied_ahead_in_stages(order: str, busy_threads: int) -> None:
    device = HostDevice(busy_threads)
    batches = set()
    for dtype, members in product(
        (np.float32, np.float16, "bfloat16", "float8_e4m3fn", np.float64), (9, 48, 50, 97, 301)
    ):
        x = moderate((members, 80), dtype, members)
        before = library(f"fold {np.dtype(dtype)}").count_copies()
        for given_members in (x, list(x), x[:, 1:], x[:, :64], list(x[:, 3:]), x[:, ::2]):
            check(given_members, device, order=order)
        copied = library(f"fold {np.dtype(dtype)}").count_copies() > before
        assert copied or (order == "ring" and members > 9)  # whose blocks are shorter than chunks
        for launch in staged(device):
            assert launch.block == 32 and launch.shared <= folding.SHARED_BYTES
            batches.add(int(launch.arguments["batches"].item()))
    if busy_threads == 1 << 30 and order == "linear":
        assert {1, 2, 7} <= batches  # as many as 9, 97 and 301 members fill


def test_up_to_eight_members_need_no_stages() -> None:
    device = HostDevice(1 << 30)
    for members in range(1, 9):
        check(moderate((members, 72), np.float32, members), device)
        check(moderate((members, 72), np.float16, members), device, order="ring")
    assert not staged(device)


def test_elements_of_two_bytes_are_staged_four_bytes_at_a_time() -> None:
    """Also where rows begin anywhere, and the members' addresses agree modulo 4 only."""
    flat = moderate((20000,), np.float16)
    device = HostDevice(1 << 30)
    for start, length, pitch in product(range(4), (1, 2, 63, 64), (66, 67)):
        x = flat[start : start + 40 * pitch].reshape(40, pitch)[:, :length]
        for order in ("linear", "ring"):
            check(x, device, order=order)
        check(x, device, accumulate=np.float32, divisor=40)
    before = library("fold float16").count_copies()
    check(flat[: 40 * 66].reshape(40, 66), device)
    assert library("fold float16").count_copies() - before == 40 * 33


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small folds are split over blocks too."""
    monkeypatch.setattr(folding, "SPLIT_BYTES", 0)
    folding.plan_launch.cache_clear()
    yield
    folding.plan_launch.cache_clear()


def split(device: HostDevice) -> list[Launch]:
    return [each for each in device.launches if each.arguments["share"].item()]


SPLIT: list[dict[str, Any]] = [
    {"order": "tree"},
    {"order": "tree", "rounding": "stochastic", "seed": 3, "divisor": 7},
    {"order": "tree", "accumulate": E3M2, "rounding": "stochastic"},
    {"order": "tree", "op": "prod", "accumulate": np.float32},
    {"op": "max"},
    {"op": "min", "order": "ring", "out_dtype": "float8_e5m2", "rounding": "stochastic"},
    {"op": "logical_or", "order": "reverse"},
    {"op": "logical_and"},
]


@pytest.mark.usefixtures("splitting")
@pytest.mark.parametrize("options", SPLIT, ids=str)
@pytest.mark.parametrize("members", [128, 257, 1000, *slow(127, 129, 255, 256, 258, 4097, 65536)])
def test_members_of_many_replicas_are_split_over_blocks(
    options: dict[str, Any], members: int
) -> None:
    for dtype, length in product((np.float16, np.float32), (1, 9, 64, 100)):
        x = moderate((members, length), dtype, members)
        for busy_threads in (1 << 8, 1 << 11, 1 << 30):
            device = HostDevice(busy_threads)
            given_members = list(x) if busy_threads == 1 << 11 and members < 5000 else x
            check(given_members, device, **options)
            if busy_threads == 1 << 30 and members >= 128:
                assert len(split(device)) == len(device.launches) - 1 >= 1


@pytest.mark.usefixtures("splitting")
def test_every_dtype_whose_order_is_free_is_split() -> None:
    device = HostDevice(1 << 30)
    for dtype, op in product(INTS, ("sum", "prod", "max", "min")):
        x = moderate((131, 33), dtype)
        for order, accumulate in (("linear", None), ("ring", np.int64), ("tree", np.uint8)):
            check(x, device, op=op, order=order, accumulate=accumulate)
        check(x, device, op=op, order="reverse")
        check(x[::-1], device, op=op, order="reverse")
    for dtype in (*REALS, BOOL):
        x = moderate((131, 33), np.float32).astype(dtype)
        for op in ("max", "min", "logical_or", "logical_and"):
            check(x, device, op=op)
    assert len(split(device)) * 2 == len(device.launches)


def test_folds_of_little_are_not_split() -> None:
    device = HostDevice(1 << 30)
    check(moderate((4096, 2), np.float32), device, op="max")
    assert not split(device) and len(device.launches) == 1
    check(moderate((4096, 9), np.float32), device, op="max")
    assert len(split(device)) == 1 and len(device.launches) == 3


@pytest.mark.usefixtures("splitting")
def test_a_split_fold_has_the_windows_batches_and_nodes_of_the_whole() -> None:
    x = moderate((300, 3, 41), np.float16)
    device = HostDevice(1 << 30)
    options: dict[str, Any] = {"order": "tree", "rounding": "stochastic", "seed": 5}
    for batch, places in ((0, 4), (1, np.array([5, 0, 7]))):
        check(x, device, batch_ndim=batch, places=places, call=9, **options)
    whole = x[:, 0]
    for first, last in ((0, 41), (3, 30), (17, 18)):
        check(whole[:, first:last], device, window=(first, 41), **options)
    found = subtrees(whole, 128, device.fold, rounding="stochastic", seed=5)
    same(found, fallback.fold(whole, **options))
    check(whole, device, order="tree", final=False)
    out = np.empty((3, 41), np.float32)
    assert device.fold(x, op="max", out_dtype=np.float32, out=out) is out
    same(out, fallback.fold(x, op="max", out_dtype=np.float32))
    assert len(split(device)) == 9  # two of the three subtrees, which have 128 members
    check(x[:, :, :0], device, order="tree")
    check(x[:, 0, 0], device, order="tree")


@pytest.mark.parametrize("order", ORDERS)
def test_as_many_members_as_promised(order: str) -> None:
    x = moderate((1, 3), np.float32)
    same_member = np.broadcast_to(x, (65536, 3))
    check(same_member, order=order)
    check(same_member.astype(np.float16), order=order, rounding="stochastic")
    if order == "tree":
        with pytest.raises(ValueError, match="at most 65536"):
            DEVICE.fold(np.broadcast_to(x, (65537, 3)), order=order)


@pytest.mark.parametrize("order", [*ORDERS, "exact"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_windows_have_the_whole_values_bits(order: str, rounding: str) -> None:
    for dtype in (np.float16, np.float32, ml_dtypes.float8_e4m3fn, np.complex64):
        x = moderate((5, 97), dtype)
        for first, last in ((0, 97), (1, 97), (8, 40), (13, 14), (30, 71), (96, 97)):
            part = np.ascontiguousarray(x[:, first:last])
            options: dict[str, Any] = {"order": order, "rounding": rounding, "seed": 1}
            for members in (part, x[:, first:last], list(part)):
                check(members, window=(first, 97), **options)


@pytest.mark.parametrize("members", [2, 3, 5, 7, 9])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_blocks_of_a_cut_ring_may_return_within_a_chunk(members: int, rounding: str) -> None:
    """A chunk of 4, 8 or 16 elements may begin and end in one block, with others between."""
    random = np.random.default_rng(members)
    for dtype, slice_length in product((np.float32, np.float16, "float8_e5m2"), (1, 2, 3)):
        x = random.normal(size=(members, 16, members * slice_length)).astype(dtype)
        for shape in (x.shape, (members, 16, members, slice_length)):
            cut = {"order": "ring", "cut_axis": 1, "rounding": rounding, "seed": 3}
            check(x.reshape(shape), **cut)
            check(x.reshape(shape), batch_ndim=1, **{**cut, "cut_axis": 0})


def test_windows_beyond_32_bits_have_their_bits() -> None:
    x, far = moderate((3, 24), np.float16), 2**33
    for order, rounding in product(("linear", "ring"), ROUNDINGS):
        check(x, window=(far - 24, far), order=order, rounding=rounding)
        check(x, window=(far - 5, 2 * far + 1), order=order, rounding=rounding)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.float8_e5m2])
def test_members_may_lie_anywhere(dtype: Any) -> None:
    """For any addresses modulo 16 bytes, no access is misaligned (run() checks)."""
    flat = moderate((4000,), dtype)
    for offset, length, pitch in product(range(9), (1, 15, 40), (48, 49)):
        x = flat[offset : offset + 5 * pitch].reshape(5, pitch)[:, :length]
        for order, rounding in product([*ORDERS, "exact"], ROUNDINGS):
            check(x, order=order, rounding=rounding)
        check(list(x), order="tree")
        check([flat[i : i + length] for i in (3, 8, 200, 77)], order="ring")


def test_contiguous_members_are_read_by_16_bytes() -> None:
    for dtype, unit in ((np.float32, "fold float32"), (np.float16, "fold float16")):
        x = np.ones((9, 1024), dtype)
        before = library(unit).count_wide_loads()
        DEVICE.fold(x)
        assert library(unit).count_wide_loads() - before == x.nbytes // 16


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_axes_of_any_strides_and_batches(rounding: str) -> None:
    x = moderate((4, 3, 6, 5, 2, 7), np.float16)
    views = [x, x.transpose(0, 5, 3, 1, 2, 4), x[:, ::-1, 1::2], x[:, :, :, ::2], x.T]
    for view, order in product(views, [*ORDERS, "exact"]):
        for batch in range(view.ndim):
            entries = view.shape[1 : 1 + batch]
            places = np.arange(np.prod(entries, dtype=int)).reshape(entries) * 3 + 1
            check(view, order=order, rounding=rounding, batch_ndim=batch, places=places)
    many = moderate((2, *[2] * 11), np.float32).transpose(0, *range(11, 0, -1))
    check(many[:, ::2], rounding=rounding, accumulate=np.float16)


def test_errors_are_those_of_fallback() -> None:
    from tests.contract.test_fold_contract import test_what_does_not_fit_is_named as named
    from tests.contract.test_fold_passed_on import test_what_cannot_be_passed_on_is_named as shared

    (mark,) = [mark for mark in named.pytestmark if mark.name == "parametrize"]
    (other,) = [mark for mark in shared.pytestmark if mark.name == "parametrize"]
    cases = [*mark.args[1], *((np.zeros((2, 3)), *row) for row in other.args[1])]
    for members, options, error, message in cases:
        given = members if isinstance(members, list) else np.asarray(members)
        with pytest.raises(error, match=message):
            DEVICE.fold(given, **options)
    with pytest.raises(TypeError, match="partial is a list: expected an array of the device"):
        DEVICE.fold(np.zeros((2, 3)), partial=[0.0] * 3, before=1)


@pytest.mark.parametrize("source", REALS, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_round_has_the_bits_of_fallback(source: np.dtype[Any], rounding: str) -> None:
    device = HostDevice()
    for target, shape in product([*REALS, *GRIDS], [(), (0,), (1,), (3, 5), (70,)]):
        x = numbers(3, shape, source)
        options: dict[str, Any] = {"rounding": rounding, "seed": 2**63, "step": 5, "call": 4}
        for batch in range(len(shape) + 1):
            for place in (9, np.arange(math.prod(shape[:batch])).reshape(shape[:batch]) + 2**40):
                options |= {"batch_ndim": batch, "place": place}
                same(device.round_to(x, target, **options), fallback.round_to(x, target, **options))
    turned = numbers(6, (6, 7, 5), source).T[::2]
    for target in (*REALS, E3M2):
        found = device.round_to(turned, target, rounding=rounding)
        same(found, fallback.round_to(turned, target, rounding=rounding))
    mine = f"round_to<{targets.NAMES[source]},"
    expected = {k for k in templates.units()["round"] if k.name.startswith(mine)}
    assert {launch.kernel for launch in device.launches} == expected


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("target", [d for d in REALS if d.itemsize < 4], ids=str)
def test_round_is_right_at_every_midpoint(target: np.dtype[Any], source: str) -> None:
    from tests.contract.test_round_to import hard_values

    with np.errstate(all="ignore"):
        x = hard_values(target, source)
    for rounding in ROUNDINGS:
        same(
            DEVICE.round_to(x, target, rounding=rounding),
            fallback.round_to(x, target, rounding=rounding),
        )


@pytest.mark.parametrize("grid", GRIDS, ids=range(len(GRIDS)))
def test_any_format_is_rounded_to_as_fallback_does(grid: FormatInfo) -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 4000, np.uint32).view(np.float32)
    near = (random.normal(size=4000) * 2.0 ** random.integers(-12, 9, 4000)).astype(np.float32)
    steps = np.arange(4000) * np.float32(grid.smallest / 4)
    with np.errstate(all="ignore"):
        doubles = random.integers(0, 2**64, 4000, np.uint64).view(np.float64)
        for x in (bits, near, steps, -steps, steps.astype(float) * (1 + 2.0**-45), doubles):
            for rounding in ROUNDINGS:
                same(
                    DEVICE.round_to(x, grid, rounding=rounding),
                    fallback.round_to(x, grid, rounding=rounding),
                )


@pytest.mark.parametrize("row", [(), (1,), (3,), (2, 0), (4, 4), (5, 16)])
@pytest.mark.parametrize("dtype", [bool, np.float16, np.float32, np.float64, np.complex128])
def test_segments_arrive_where_they_are_sent(row: Any, dtype: Any) -> None:
    random = np.random.default_rng(1)
    device = HostDevice()
    for most in (2, 400):
        sources = random.integers(0, 100, (3, 400, *row)).astype(dtype)
        output = random.integers(0, 100, (3, 400, *row)).astype(dtype)
        segments = random_segments(random, 3, 400, most)
        expected = output.copy()
        row_by_row(sources, expected, segments)
        for rows in (sources, list(sources), np.asfortranarray(sources), sources[:, ::1]):
            for copies in (output.copy(), list(output.copy())):
                device.ragged_copy(rows, copies, segments)
                assert np.array_equal(np.asarray(copies), expected)


def test_every_access_width_of_the_ragged_copy_is_used() -> None:
    device = HostDevice()
    memory = np.arange(8192, dtype=np.uint8)
    start = -memory.ctypes.data % 16
    aligned = memory[start : start + 4096]
    for width in (1, 2, 4, 8, 16):
        rows = aligned[: 10 * 3 * width].reshape(1, 10, 3 * width)
        output = memory[start + 4096 : start + 4096 + 10 * 3 * width].reshape(rows.shape)
        device.ragged_copy(rows, output, np.array([[0, 2, 0, 0, 8]]))
        assert np.array_equal(output[0, :8], rows[0, 2:])
    names = {launch.kernel for launch in device.launches}
    assert names == set(templates.units()["ragged"])


def test_rows_of_very_different_numbers_share_the_threads() -> None:
    sources = np.arange(70000.0).reshape(2, 35000)
    output = np.zeros((2, 35000))
    lengths = [30000, *[1] * 500, *[0] * 50, 700]
    starts = np.cumsum([0, *lengths[:-1]])
    segments = np.array([[1, 3, 0, s, n] for s, n in zip(starts, lengths, strict=True)])
    expected = output.copy()
    fallback.ragged_copy(sources, expected, segments)
    DEVICE.ragged_copy(sources, output, segments)
    assert np.array_equal(output, expected)


@pytest.mark.parametrize(
    ("segment", "complaint"),
    [
        ([0, 0, 0, 0, 11], r"segment of 11 rows from row 0 of source 0 .*leaves its arrays"),
        ([0, 8, 1, 0, 3], "leaves its arrays"),
        ([0, -1, 1, 0, 3], "leaves its arrays"),
        ([2, 0, 1, 0, 3], "leaves its arrays"),
        ([0, 0, -1, 0, 3], "leaves its arrays"),
        ([0, 0, 1, 2**63 - 2, 3], "leaves its arrays"),
        ([0, 0, 1, 0, -3], "leaves its arrays"),
        ([0, 0, 1, 4, 3], r"segments overlap: segment of .* destination 1, and one"),
    ],
)
def test_segments_are_checked_before_anything_is_written(segment: Any, complaint: str) -> None:
    sources, output = np.ones((2, 10)), np.zeros((2, 10))
    segments = np.array([[0, 0, 0, 0, 2], [1, 0, 1, 6, 4], segment])
    with pytest.raises(ValueError, match=complaint):
        DEVICE.ragged_copy(sources, output, segments)
    assert not output.any()


@pytest.mark.parametrize("ufunc", scatter.OPERATIONS, ids=lambda ufunc: ufunc.__name__)
@np.errstate(all="ignore")
def test_updates_in_turn_have_numpys_bits(ufunc: np.ufunc) -> None:
    launched: set[Kernel] = set()
    for dtype in (*targets.NAMES, *map(np.dtype, "FD?")):
        if not scatter.has_update(ufunc, dtype):
            continue
        x, values = any_bits((200,), dtype, 1), any_bits((700,), dtype, 2)
        places = np.random.default_rng(3).integers(0, 200, 700)
        expected, device = x.copy(), HostDevice()
        ufunc.at(expected, places, values)
        scatter.update_at(device, ufunc, x, places, values)
        same(x, expected)
        launched |= {launch.kernel for launch in device.launches}
    if ufunc is np.add:
        assert launched == set(templates.units()["scatter"])
