"""Every transpose is the adjoint: its matrix is the transposed matrix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim import collectives
from gpusim.collectives import Result
from gpusim.reduction import Reduction

Shape = tuple[int, ...]
Linear = Callable[..., Result]
GROUPS = [None, [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0], [1, 2]], [[2, 0, 3, 1]]]
UNEVEN = [[[1], [3, 0, 2]]]

# name: (shapes of a replica's value for group size n, arguments, whether groups are taken)
PROGRAMS: dict[str, tuple[Callable[[int], Shape], list[tuple], list[dict], bool]] = {
    "psum": (lambda n: (3,), [()], [{}], True),
    "pmean": (lambda n: (3,), [()], [{}], True),
    "all_gather": (
        lambda n: (2, 3),
        [()],
        [{"axis": a} for a in (0, 1, 2, -1)] + [{"axis": a, "tiled": True} for a in (0, 1, -2)],
        True,
    ),
    "psum_scatter": (
        lambda n: (n, 2 * n),
        [()],
        [{"scatter_dimension": a} for a in (0, -2)]
        + [{"scatter_dimension": a, "tiled": True} for a in (0, 1, -1)],
        True,
    ),
    "all_to_all": (
        lambda n: (n, 2, n),
        [(0, 0), (0, 1), (0, 2), (2, 0), (-1, 1), (2, 2), (0, -1)],
        [{}, {"tiled": True}],
        True,
    ),
    "pswapaxes": (lambda n: (n, 2), [(0,), (-2,)], [{}], True),
    "ppermute": (
        lambda n: (2,),
        [([(0, 1), (1, 0)],), ([(0, 3), (1, 2), (2, 0)],), ([],), ([(-1, 0), (2, -1)],)],
        [{}],
        False,
    ),
    "pshuffle": (lambda n: (2,), [([1, 2, 3, 0],), ([3, 0, 2, 1],)], [{}], False),
    "pbroadcast": (lambda n: (2,), [(0,), (3,)], [{}], False),
}

CASES = [
    pytest.param(name, args, {**keywords, **grouping}, shape, id=f"{name}-{args}-{keywords}-{g}")
    for name, (shape, arguments, options, grouped) in PROGRAMS.items()
    for args in arguments
    for keywords in options
    for g in ([*GROUPS, *(UNEVEN if name in ("psum", "pmean") else [])] if grouped else [None])
    for grouping in [{"groups": g} if grouped else {}]
]


def spread(result: Result, size: int) -> np.ndarray:
    """A result as R values: one that is not mapped counts R times."""
    if result.mapped:
        return np.stack(list(result.value))
    return np.stack([result.value] * size)


def matrix(function: Linear, shape: Shape, *args, **keywords) -> tuple[np.ndarray, Shape]:
    """The dense matrix of a linear map of (R, *batch, *s), and its result's shape."""
    columns = []
    for k in range(int(np.prod(shape))):
        basis = np.zeros(shape)
        basis.flat[k] = 1
        column = spread(function(basis, *args, **keywords), shape[0])
        columns.append(column.ravel())
    return np.stack(columns, axis=1), column.shape


@pytest.mark.parametrize(("name", "args", "keywords", "value_shape"), CASES)
def test_the_transposes_matrix_is_the_transposed_matrix(name, args, keywords, value_shape):
    collective = getattr(collectives, name)
    groups = keywords.get("groups")
    shape = (4, *value_shape(len(groups[0]) if groups else 4))
    forward, result_shape = matrix(collective, shape, *args, **keywords)
    backward, back_shape = matrix(collective.transpose, result_shape, *args, **keywords)
    assert back_shape == shape
    np.testing.assert_array_equal(backward, forward.T)


# The collective that does what the transpose does, and its arguments
COUNTERPART: dict[str, Callable[..., tuple[str, tuple, dict]]] = {
    "psum": lambda *a, **k: ("psum", a, k),
    "pmean": lambda *a, **k: ("pmean", a, k),
    "all_gather": lambda axis=0, **k: ("psum_scatter", (), {"scatter_dimension": axis, **k}),
    "psum_scatter": lambda scatter_dimension=0, **k: (
        "all_gather",
        (),
        {"axis": scatter_dimension, **k},
    ),
    "all_to_all": lambda split, concat, **k: ("all_to_all", (concat, split), k),
    "pswapaxes": lambda *a, **k: ("pswapaxes", a, k),
    "ppermute": lambda perm: ("ppermute", ([(d, s) for s, d in perm],), {}),
    "pshuffle": lambda perm: ("pshuffle", (np.argsort(perm).tolist(),), {}),
}


@pytest.mark.parametrize(
    ("name", "args", "keywords", "value_shape"), [c for c in CASES if c.values[0] != "pbroadcast"]
)
@pytest.mark.parametrize("form", ["stacked", "list"])
def test_transposing_twice_is_the_original(name, args, keywords, value_shape, form):
    groups = keywords.get("groups")
    shape = (4, *value_shape(len(groups[0]) if groups else 4))
    x = np.random.default_rng(0).integers(-9, 9, shape).astype(float)
    given_in = x if form == "stacked" else list(x)
    other, other_args, other_keywords = COUNTERPART[name](*args, **keywords)
    once = getattr(collectives, name)(given_in, *args, **keywords)
    twice = getattr(collectives, other).transpose(given_in, *other_args, **other_keywords)
    assert once.mapped == twice.mapped
    np.testing.assert_array_equal(spread(once, 4), spread(twice, 4))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([c.values for c in CASES]),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(0, 2**32),
    st.booleans(),
    st.booleans(),
)
def test_inner_products_are_equal_with_batch_axes_and_lists(case, batch, seed, listed, ct_listed):
    name, args, keywords, value_shape = case
    collective, groups = getattr(collectives, name), keywords.get("groups")
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 9, (4, *batch, *value_shape(len(groups[0]) if groups else 4))) * 12.0
    keywords = {**keywords, "batch_ndim": len(batch)}
    result = spread(collective(list(x) if listed else x, *args, **keywords), 4)
    y = rng.integers(-9, 9, result.shape) * 12.0  # 12: means over 1 to 4 replicas stay integers
    back = collective.transpose(list(y) if ct_listed else y, *args, **keywords)
    assert np.vdot(result, y) == np.vdot(x, spread(back, 4))


def test_a_cotangent_that_is_the_same_everywhere_counts_on_every_replica():
    ct = np.broadcast_to(np.arange(3.0), (4, 3))
    assert collectives.psum.transpose(ct).value.tolist() == [0, 4, 8]
    source = collectives.pbroadcast.transpose(ct, 2)
    assert source.mapped and source.value.tolist() == [[0] * 3, [0] * 3, [0, 4, 8], [0] * 3]
    # One for each element of the gathered value, which every replica holds.
    gathered = collectives.all_gather.transpose(np.broadcast_to(np.eye(4), (4, 4, 4)))
    np.testing.assert_array_equal(gathered.value, 4 * np.eye(4))


@pytest.mark.parametrize("order", ["linear", "reverse", "tree", "ring"])
def test_transposes_that_sum_take_a_reduction(order):
    reduction = Reduction(order=order)
    ct = (np.random.default_rng(1).standard_normal((4, 4, 6)) * 5).astype(np.float16)
    np.testing.assert_array_equal(
        collectives.all_gather.transpose(ct, reduction=reduction).value,
        collectives.psum_scatter(ct, reduction=reduction).value,
    )
    np.testing.assert_array_equal(
        collectives.pbroadcast.transpose(ct, 1, reduction=reduction).value[1],
        collectives.psum(ct, reduction=reduction).value,
    )
