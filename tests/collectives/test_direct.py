"""Sums over the only map around are folded directly, with the dispatcher's bits and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import Reduction, collectives, lax
from gpusim.fallback import kernels
from gpusim.maps import bind
from tests.oracles.budget import budget

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int64, np.complex64)
REDUCTIONS = (
    Reduction(),
    Reduction(order="reverse"),
    Reduction(order="tree", accumulate="float32"),
    Reduction(order="ring"),
    Reduction(order="exact"),
    Reduction(order="engine"),
    Reduction(rounding="stochastic", seed=5, order="tree"),
)
WIRES = (Reduction(wire="bfloat16"), Reduction(groups_of=2, across=Reduction(order="tree")))
SHAPES = ((), (1,), (2,), (5,), (64,), (3, 4), (2, 1, 3), (0,), (70, 90))


@contextmanager
def dispatched() -> Iterator[None]:
    """A block in which all calls go through the dispatcher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bind, "fold_directly", lambda call, operand: None)
        yield


@contextmanager
def counted() -> Iterator[list[bool]]:
    """A block's calls: whether each was folded directly."""
    made: list[bool] = []
    original = bind.fold_directly

    def note(call: Any, operand: Any) -> Any:
        found = original(call, operand)
        made.append(found is not None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bind, "fold_directly", note)
        yield made


@settings(max_examples=budget(3000, most=200), deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(SHAPES),
    st.sampled_from((1, 2, 3, 5, 8)),
    st.sampled_from((lax.psum, lax.pmean)),
    st.sampled_from((*REDUCTIONS, *WIRES)),
    st.booleans(),
    st.sampled_from((lambda x: x, np.transpose, lambda x: x[::-1] if np.ndim(x) else x)),
    st.integers(0, 2**32 - 1),
)
def test_bits_and_calls_are_the_dispatchers(
    dtype: Any,
    shape: tuple[int, ...],
    replicas: int,
    collective: Callable[..., Any],
    reduction: Reduction,
    argument: bool,
    view: Callable[[Any], Any],
    seed: int,
) -> None:
    if reduction in WIRES and dtype == np.complex64:
        dtype = np.float32  # wires take no complex numbers
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(replicas, *shape)) * 10).astype(dtype)

    def program(x: Any) -> Any:
        x = view(x)
        if argument:
            return collective(x, "i", reduction=reduction), collective(x + x, "i")
        return collective(x, "i"), collective(x + x, "i")

    def run() -> tuple[Any, int]:
        with gpusim.reduction(reduction) as state:
            return gpusim.vmap(program, out_axes=None, axis_name="i")(x), state.calls

    with counted() as made:
        found, calls = run()
    integers = collective is lax.pmean and np.dtype(dtype).kind == "i"  # divided in another type
    assert made == [not integers] * 2
    with dispatched():
        expected, expected_calls = run()
    assert calls == expected_calls == (1 if argument else 2)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
        assert one.flags.writeable and one.flags.c_contiguous


@pytest.mark.parametrize("kernel_set", ["numpy", "compiled"])
def test_plans_are_made_again_for_other_kernels(kernel_set: str) -> None:
    x = np.full((9, 5000), 2049 / 2048, np.float16)
    total = gpusim.vmap(lambda x: lax.psum(x, "i"), out_axes=None, axis_name="i")
    expected = total(x)
    with kernels.chosen(kernel_set):
        assert total(x).tobytes() == expected.tobytes()
        assert collectives.psum(x).value.tobytes() == expected.tobytes()


def test_calls_that_do_more_go_through_the_dispatcher(tmp_path: Path) -> None:
    x = np.arange(12.0).reshape(2, 2, 3)
    programs: list[Callable[[], Any]] = [
        lambda: gpusim.vmap(gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i"))(x),
        lambda: gpusim.vmap(
            lambda x: lax.psum(x, "i", axis_index_groups=[[1], [0]]), axis_name="i"
        )(x),
        lambda: gpusim.vmap(lambda x: lax.psum(x > 3, "i"), axis_name="i")(x),
        lambda: gpusim.vmap(lambda x: lax.psum(x, ("i", 0)), axis_name="i")(x),
        lambda: gpusim.pmap(lambda x: lax.psum(x, "i"), "i")(x),
        lambda: gpusim.vmap(lambda x, y: lax.psum(y, "i"), (0, None), axis_name="i", out_axes=None)(
            x, x
        ),
    ]
    for program in programs:
        with counted() as made:
            program()
        assert not any(made)
    with gpusim.record(tmp_path / "run"), counted() as made:
        gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)
    assert made == [False]


def test_errors_are_the_dispatchers() -> None:
    x = np.ones((4, 3), np.float32)

    def refused(f: Callable[[Any], Any]) -> str:
        with pytest.raises((NameError, TypeError, ValueError)) as caught:
            gpusim.vmap(f, axis_name="i")(x)
        return str(caught.value)

    largest = Reduction(op="max")
    assert "op='sum'" in refused(lambda x: lax.psum(x, "i", reduction=largest))
    for other in ("tre", {"order": "tre"}, {"oder": "tree"}, 3):
        with pytest.raises((TypeError, ValueError)) as caught:
            collectives.psum(x, reduction=other)
        assert str(caught.value) in refused(
            lambda x, other=other: lax.psum(x, "i", reduction=other)
        )
    assert "unbound axis name" in refused(lambda x: lax.psum(x, "j"))


def test_an_argument_that_ends_with_its_map_is_refused() -> None:
    kept: list[Any] = []
    gpusim.vmap(lambda x: kept.append(x) or x, axis_name="i")(np.ones(3))
    with pytest.raises(gpusim.GpusimError, match="after its map had ended"):
        gpusim.vmap(lambda x: lax.psum(kept[0], "i"), axis_name="i")(np.ones(3))


def test_names_that_are_not_strings_are_the_dispatchers() -> None:
    """An integer is an axis of the array itself, and a tuple several names."""
    x = np.arange(12.0).reshape(3, 4)
    found = gpusim.vmap(lambda x: lax.psum(x, 0), axis_name=0)(x)
    np.testing.assert_array_equal(found, x.sum(1))
    with pytest.raises(ValueError, match="over named axes only"):
        gpusim.vmap(lambda x: lax.pmean(x, 0), axis_name=0)(x)
    name: Any = ("i",)
    with pytest.raises(NameError, match="unbound axis name: 'i'"):
        gpusim.vmap(lambda x: lax.psum(x, name), axis_name=name)(x)
