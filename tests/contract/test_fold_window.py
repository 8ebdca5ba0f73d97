"""A fold of a window of a value has the bits of that part of the whole value's fold."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.fallback import fold, limits
from tests.contract.fold_limits import fold_limits

ORDERS = ["linear", "reverse", "tree", "ring", "exact"]
ROUNDINGS = ["nearest", "stochastic"]
CUTS = {
    "by member": {"BLOCK": 5, "ROW_WIDTH": 0, "CAST_WIDTH": 0},
    "by rows": {"BLOCK": 24, "ROW_WIDTH": 1 << 40, "ROW_MEMBERS": 1, "ACCUMULATE_WIDTH": 0},
    "as shipped": {"BLOCK": limits.BLOCK},
}


def values(members: int, total: int, dtype: Any, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    reals = draw.normal(size=(members, total)) * 8
    if np.dtype(dtype).kind == "c":
        return (reals + 1j * draw.normal(size=reals.shape)).astype(dtype)
    return reals.astype(np.float32).astype(dtype)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@settings(max_examples=150, deadline=None)
@given(
    members=st.integers(1, 11),
    total=st.integers(1, 60),
    ends=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    order=st.sampled_from(ORDERS),
    rounding=st.sampled_from(ROUNDINGS),
    dtype=st.sampled_from([np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float64]),
    accumulate=st.sampled_from([None, np.float16, np.float32]),
    cut=st.sampled_from(list(CUTS)),
    listed=st.booleans(),
)
def test_a_window_has_the_bits_of_its_part(
    members: int,
    total: int,
    ends: tuple[int, int],
    order: str,
    rounding: str,
    dtype: Any,
    accumulate: Any,
    cut: str,
    listed: bool,
) -> None:
    x = values(members, total, dtype)
    first, last = sorted(min(end, total) for end in ends)
    options: dict[str, Any] = {
        "order": order,
        "rounding": rounding,
        "accumulate": accumulate,
        "seed": 3,
        "call": 2,
        "places": 5,
    }
    part = list(x[:, first:last]) if listed else x[:, first:last]
    with fold_limits(**CUTS[cut]):
        found = fold(part, window=(first, total), **options)
    assert same(found, fold(x, **options)[first:last])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_windows_of_many_members_and_long_values_fit_together(order: str, rounding: str) -> None:
    for members, total, width in ((300, 701, 64), (9, 30000, 9001)):
        x = values(members, total, np.float16)
        options: dict[str, Any] = {"order": order, "rounding": rounding, "seed": 1}
        parts = [
            fold(x[:, first : first + width], window=(first, total), **options)
            for first in range(0, total, width)
        ]
        assert same(np.concatenate(parts), fold(x, **options))


@pytest.mark.parametrize("order", ORDERS)
def test_the_members_may_have_any_shape(order: str) -> None:
    x = values(5, 48, np.float16)
    whole = fold(x, order=order, rounding="stochastic", seed=9)
    shaped = x[:, 12:36].reshape(5, 2, 3, 4)
    found = fold(shaped, order=order, rounding="stochastic", seed=9, window=(12, 48))
    assert found.shape == (2, 3, 4)
    assert same(found.reshape(-1), whole[12:36])


@pytest.mark.parametrize("order", ORDERS)
def test_complex_values_are_counted_whole(order: str) -> None:
    x = values(4, 21, np.complex64)
    whole = fold(x, order=order)
    assert same(fold(x[:, 5:16], order=order, window=(5, 21)), whole[5:16])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("cut", CUTS)
def test_a_window_is_the_same_part_of_every_batch_entry(
    order: str, rounding: str, cut: str
) -> None:
    x = values(5, 6 * 31, np.float16).reshape(5, 3, 2, 31)
    options: dict[str, Any] = {"order": order, "rounding": rounding, "batch_ndim": 2, "seed": 4}
    options["places"] = np.arange(6).reshape(3, 2) + 11
    whole = fold(x, **options)
    for first, last in ((0, 31), (1, 30), (9, 10), (20, 31), (8, 8)):
        part = x[..., first:last]
        with fold_limits(**CUTS[cut]):
            for members in (part, np.ascontiguousarray(part), list(part)):
                found = fold(members, window=(first, 31), **options)
                assert same(found, whole[..., first:last])


def test_elements_beyond_32_bits_are_numbered() -> None:
    """The window lies where an index no longer fits into 32 bits, in the ring's last block."""
    x = values(2, 16, np.float16)
    far = 2**33
    ring = fold(x, order="ring", rounding="stochastic", window=(far - 16, far))
    turned = fold(x[::-1], order="linear", rounding="stochastic", window=(far - 16, 2 * far))
    assert same(ring, turned)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"window": (-1, 9)}, r"window=\(-1, 9\): the members' 4 elements do not fit into 9"),
        ({"window": (6, 9)}, "do not fit into 9 from 6"),
        ({"window": (-1, 9), "batch_ndim": 1}, "the members' 1 elements do not fit into 9 from -1"),
        ({"window": (0, 4), "order": "ring", "cut_axis": 0}, "expected no cut_axis beside it"),
    ],
)
def test_a_window_outside_its_value_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        fold(np.ones((4, 4), np.float16), **options)


def test_an_empty_window_is_empty() -> None:
    assert fold(np.ones((3, 0), np.float16), order="ring", window=(7, 7)).shape == (0,)
