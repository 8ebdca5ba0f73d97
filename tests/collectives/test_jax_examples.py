"""Every example in JAX's documentation of its collectives prints the documented result.

`jax.pmap` becomes `gpusim.pmap`, and `gpusim.vmap`; numbers have JAX's defaults, int32 and float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import lax

Map = Callable[..., Callable[..., Any]]

INTS = np.arange(4, dtype=np.int32)
REALS = np.arange(4, dtype=np.float32)
SQUARE = np.arange(16, dtype=np.int32).reshape(4, 4)


def serial_pmap(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return gpusim.pmap(f, schedule="one", **options)


@pytest.fixture(params=["pmap", "pmap-one", "vmap"])
def replicated(request: pytest.FixtureRequest) -> Map:
    return {"pmap": gpusim.pmap, "pmap-one": serial_pmap, "vmap": gpusim.vmap}[request.param]


def tokens(text: str) -> list[str]:
    """Return the printed text, with blanks between numbers and brackets removed."""
    return re.findall(r"[\[\]]|[^\s\[\]]+", text)


def assert_prints(array: Any, expected: str) -> None:
    assert tokens(str(array)) == tokens(expected)


def test_psum(replicated: Map) -> None:
    assert_prints(replicated(lambda x: lax.psum(x, "i"), axis_name="i")(INTS), "[6 6 6 6]")


def test_psum_divides(replicated: Map) -> None:
    y = replicated(lambda x: x / lax.psum(x, "i"), axis_name="i")(REALS)
    assert_prints(y, "[0. 0.16666667 0.33333334 0.5 ]")


def test_psum_in_groups(replicated: Map) -> None:
    groups = [[0, 1], [2, 3]]
    y = replicated(lambda x: lax.psum(x, "i", axis_index_groups=groups), axis_name="i")(INTS)
    assert_prints(y, "[1 1 5 5]")


def test_psum_of_rows(replicated: Map) -> None:
    y = replicated(lambda x: lax.psum(x, "i"), axis_name="i")(SQUARE)
    assert_prints(
        y,
        """[[24 28 32 36]
            [24 28 32 36]
            [24 28 32 36]
            [24 28 32 36]]""",
    )


def test_psum_of_rows_in_groups(replicated: Map) -> None:
    groups = [[0, 1], [2, 3]]
    y = replicated(lambda x: lax.psum(x, "i", axis_index_groups=groups), axis_name="i")(SQUARE)
    assert_prints(
        y,
        """[[ 4  6  8 10]
            [ 4  6  8 10]
            [20 22 24 26]
            [20 22 24 26]]""",
    )


def test_pmean(replicated: Map) -> None:
    y = replicated(lambda x: lax.pmean(x, "i"), axis_name="i")(INTS)
    assert_prints(y, "[1.5 1.5 1.5 1.5]")


def test_pmean_divides(replicated: Map) -> None:
    y = replicated(lambda x: x / lax.pmean(x, "i"), axis_name="i")(REALS)
    assert_prints(y, "[0. 0.6666667 1.3333334 2. ]")


@pytest.mark.parametrize("size", [4, 8])
def test_axis_index(replicated: Map, size: int) -> None:
    y = replicated(lambda _: lax.axis_index("i"), axis_name="i")(np.zeros(size))
    assert_prints(y, str(np.arange(size)))
    assert y.dtype == np.int32


def test_axis_index_of_nested_maps(replicated: Map) -> None:
    def f(_: Any) -> Any:
        return lax.axis_index("i"), lax.axis_index("j")

    x, y = replicated(replicated(f, axis_name="j"), axis_name="i")(np.zeros((4, 2)))
    assert_prints(
        x,
        """[[0 0]
            [1 1]
            [2 2]
            [3 3]]""",
    )
    assert_prints(
        y,
        """[[0 1]
            [0 1]
            [0 1]
            [0 1]]""",
    )


def test_all_gather(replicated: Map) -> None:
    y = replicated(lambda x: lax.all_gather(x, "i"), axis_name="i")(INTS)
    assert_prints(
        y,
        """[[0 1 2 3]
            [0 1 2 3]
            [0 1 2 3]
            [0 1 2 3]]""",
    )


def test_all_gather_in_groups(replicated: Map) -> None:
    def f(x: Any) -> Any:
        return lax.all_gather(x, "i", axis_index_groups=[[0, 2], [3, 1]])

    assert_prints(
        replicated(f, axis_name="i")(SQUARE),
        """[[[ 0  1  2  3]
             [ 8  9 10 11]]
            [[12 13 14 15]
             [ 4  5  6  7]]
            [[ 0  1  2  3]
             [ 8  9 10 11]]
            [[12 13 14 15]
             [ 4  5  6  7]]]""",
    )


def test_psum_scatter(replicated: Map) -> None:
    y = replicated(lambda x: lax.psum_scatter(x, "i"), axis_name="i")(SQUARE)
    assert_prints(y, "[24 28 32 36]")


def test_psum_scatter_tiled(replicated: Map) -> None:
    y = replicated(lambda x: lax.psum_scatter(x, "i", tiled=True), axis_name="i")(SQUARE)
    assert_prints(
        y,
        """[[24]
            [28]
            [32]
            [36]]""",
    )


def test_psum_scatter_in_groups(replicated: Map) -> None:
    def f(x: Any) -> Any:
        return lax.psum_scatter(x, "i", axis_index_groups=[[0, 2], [3, 1]], tiled=True)

    assert_prints(
        replicated(f, axis_name="i")(SQUARE),
        """[[ 8 10]
            [20 22]
            [12 14]
            [16 18]]""",
    )


def test_ragged_all_to_all(replicated: Map) -> None:
    arguments = [
        np.array([[1, 2, 2], [3, 4, 0]], np.int32),  # operand
        np.zeros((2, 4), np.int32),  # output
        np.array([[0, 1], [0, 1]], np.int32),  # input_offsets
        np.array([[1, 2], [1, 1]], np.int32),  # send_sizes
        np.array([[0, 0], [1, 2]], np.int32),  # output_offsets
        np.array([[1, 1], [2, 1]], np.int32),  # recv_sizes
    ]

    def f(*args: Any) -> Any:
        return lax.ragged_all_to_all(*args, axis_name="i")

    assert_prints(
        replicated(f, axis_name="i")(*arguments),
        """[[1 3 0 0]
            [2 2 4 0]]""",
    )


def test_pbroadcast_is_the_masked_sum(replicated: Map) -> None:
    def masked(x: Any) -> Any:
        return lax.psum(np.where(lax.axis_index("i") == 2, x, np.zeros_like(x)), "i")

    y = replicated(lambda x: (lax.pbroadcast(x, "i", 2), masked(x)), axis_name="i")(SQUARE)
    np.testing.assert_array_equal(*y)
    np.testing.assert_array_equal(y[0], SQUARE[[2, 2, 2, 2]])


def test_ppermute_fills_with_zeros_where_nothing_arrives(replicated: Map) -> None:
    perm = [(0, 1), (1, 2), (3, 0)]
    y = replicated(lambda x: lax.ppermute(x, "i", perm), axis_name="i")(SQUARE)
    assert_prints(
        y,
        """[[12 13 14 15]
            [ 0  1  2  3]
            [ 4  5  6  7]
            [ 0  0  0  0]]""",
    )


def test_pshuffle_takes_replica_i_from_perm_i(replicated: Map) -> None:
    y = replicated(lambda x: lax.pshuffle(x, "i", [2, 0, 3, 1]), axis_name="i")(INTS)
    assert_prints(y, "[2 0 3 1]")


def test_pswapaxes_swaps_the_mapped_axis_with_another(replicated: Map) -> None:
    x = np.arange(48, dtype=np.int32).reshape(4, 3, 4)
    y = replicated(lambda x: lax.pswapaxes(x, "i", 1), axis_name="i")(x)
    np.testing.assert_array_equal(y, np.swapaxes(x, 0, 2))


def test_pswapaxes_in_groups(replicated: Map) -> None:
    x = np.arange(8, dtype=np.int32).reshape(4, 2)
    groups = [[0, 2], [3, 1]]
    y = replicated(lambda x: lax.pswapaxes(x, "i", 0, axis_index_groups=groups), axis_name="i")(x)
    assert_prints(y, "[[0 4] [7 3] [1 5] [6 2]]")


@pytest.mark.parametrize("split_axis", [0, 1])
@pytest.mark.parametrize("concat_axis", [0, 1, 2])
def test_all_to_all_has_the_documented_shape(
    replicated: Map, split_axis: int, concat_axis: int
) -> None:
    x = np.arange(4 * 4 * 4 * 3, dtype=np.int32).reshape(4, 4, 4, 3)
    f = replicated(lambda x: lax.all_to_all(x, "i", split_axis, concat_axis), axis_name="i")
    y = f(x)
    expected = np.insert(np.delete((4, 4, 3), split_axis), concat_axis, 4)
    assert y.shape[1:] == tuple(expected)
    np.testing.assert_array_equal(
        y, np.moveaxis(np.moveaxis(x, split_axis + 1, 0), 1, concat_axis + 1)
    )


def test_all_to_all_tiled_cuts_and_joins(replicated: Map) -> None:
    x = np.arange(2 * 4 * 3, dtype=np.int32).reshape(2, 4, 3)
    y = replicated(lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True), axis_name="i")(x)
    for replica in range(2):
        rows = slice(2 * replica, 2 * replica + 2)
        np.testing.assert_array_equal(y[replica], np.concatenate([x[0, rows], x[1, rows]], axis=1))


def test_collectives_map_over_every_leaf_of_a_tree(replicated: Map) -> None:
    tree = {"w": SQUARE, "b": (INTS, None)}
    y = replicated(lambda tree: lax.psum(tree, "i"), axis_name="i")(tree)
    np.testing.assert_array_equal(y["w"], np.broadcast_to(SQUARE.sum(axis=0), (4, 4)))
    assert_prints(y["b"][0], "[6 6 6 6]")
    assert y["b"][1] is None


def test_booleans_are_summed_as_int32(replicated: Map) -> None:
    y = replicated(lambda x: lax.psum(x > 1, "i"), axis_name="i")(INTS)
    assert_prints(y, "[2 2 2 2]")
    assert y.dtype == np.int32


def test_psum_reduces_positional_axes_too(replicated: Map) -> None:
    y = replicated(lambda x: lax.psum(x, ("i", 0)), axis_name="i")(SQUARE)
    assert_prints(y, "[120 120 120 120]")


def test_the_sum_of_a_constant_is_the_size_times_it(replicated: Map) -> None:
    sums: list[Any] = []

    def f(x: Any) -> Any:
        sums.append((lax.psum(1, "i"), lax.psum(1.5, "i"), lax.axis_size("i")))
        return x

    replicated(f, axis_name="i")(INTS)
    assert set(sums) == {(4, 6.0, 4)}
    assert all(isinstance(size, int) for _, _, size in sums)
    assert all(type(total) is int and type(scaled) is float for total, scaled, _ in sums)
