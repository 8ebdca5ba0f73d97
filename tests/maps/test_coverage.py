"""NumPy functions whose arguments a new user maps: each has the results of a loop over replicas."""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import trees
from gpusim.maps import dispatch
from tests.oracles.budget import SEED, budget
from tests.oracles.replicated import bits_of, names_on_the_route, normal

Call = Callable[..., Any]
Draw = Callable[[np.random.Generator], tuple[Any, ...]]
REPLICAS = (1, 3, 5, 7)
FLOATS = ("f2", "f4", "f8")
REALS = (*FLOATS, "i1", "u1", "i4", "i8")
NUMBERS = (*REALS, "F", "D")


def one_of(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values of one replica: coarse ones, so that some are equal, with some NaNs and infinities."""
    found = np.array(normal(rng, shape, None, dtype).data)
    if found.dtype.kind in "fc" and rng.integers(2):
        found = np.round(found, 1)
    if found.dtype.kind in "fc" and rng.integers(4) == 0:
        found = np.where(rng.random(shape) < 0.1, one_of(rng, np.nan, np.inf, -np.inf), found)
    return found.astype(dtype)


def loop(call: Call, arguments: tuple[Any, ...], mapped: tuple[bool, ...], replicas: int) -> Any:
    """The stacked leaves of call(...) for one replica after the other, or the exception's type."""
    rows = []
    for replica in range(replicas):
        own = [
            part[replica, ...] if is_mapped else part
            for part, is_mapped in zip(arguments, mapped, strict=True)
        ]
        try:
            rows.append(trees.flatten(call(*own))[0])
        except Exception as error:
            return type(error)
    columns = [[np.asarray(leaf) for leaf in column] for column in zip(*rows, strict=True)]
    if any(len({(leaf.shape, leaf.dtype) for leaf in column}) > 1 for column in columns):
        return ValueError
    return [np.stack(column) for column in columns]


def agree(call: Call, arguments: tuple[Any, ...], mapped: tuple[bool, ...], replicas: int) -> bool:
    """Assert that vmap gives the bits of the loop; return whether all was batched."""
    expected = loop(call, arguments, mapped, replicas)
    axes = tuple(0 if is_mapped else None for is_mapped in mapped)
    with names_on_the_route() as names:
        try:
            found = trees.flatten(gpusim.vmap(call, in_axes=axes, axis_size=replicas)(*arguments))[
                0
            ]
        except Exception as error:
            assert type(error) is expected, (error, expected)
            return True
    assert isinstance(expected, list), f"{expected} was expected"
    for one, other in zip(found, expected, strict=True):
        one = np.asarray(one)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.dtype == object:
            assert one.tolist() == other.tolist()
        else:
            assert bits_of(one) == bits_of(other), (one, other)
    return not names


def drawn(rng: np.random.Generator, *parts: Any) -> tuple[tuple[Any, ...], tuple[bool, ...], int]:
    """Arguments of which some are mapped; each part is (shape, dtype) or a function of rng."""
    replicas = one_of(rng, *REPLICAS)
    mapped = tuple(bool(rng.integers(4)) for _ in parts)
    mapped = mapped if any(mapped) else (True,) * len(parts)
    arguments = []
    for part, is_mapped in zip(parts, mapped, strict=True):
        make = part if callable(part) else lambda rng, part=part: values(rng, *part)
        rows = [make(rng) for _ in range(replicas if is_mapped else 1)]
        arguments.append(np.stack(rows) if is_mapped else rows[0])
    return tuple(arguments), mapped, replicas


def shapes(rng: np.random.Generator) -> tuple[int, ...]:
    return one_of(rng, (), (0,), (1,), (7,), (1, 4), (3, 0), (2, 3, 5))


def integers(low: int, high: int, shape: tuple[int, ...] = ()) -> Callable[..., np.ndarray]:
    return lambda rng: np.asarray(rng.integers(low, high, shape))


def sorted_row(length: int, dtype: str) -> Callable[..., np.ndarray]:
    return lambda rng: np.sort(np.round(rng.standard_normal(length) * 2, 1)).astype(dtype)


Case = tuple[Call, tuple[Any, ...]]


def rolls(rng: np.random.Generator) -> Case:
    shape = shapes(rng)
    axis = one_of(rng, None, *range(-len(shape), len(shape)), 9)
    return lambda x, k: np.roll(x, k, axis), ((shape, one_of(rng, *NUMBERS)), integers(-9, 9))


def rolls_of_several_axes(rng: np.random.Generator) -> Case:
    several = one_of(rng, (0, -1), (1, 1), (0,), 1)
    shape = one_of(rng, (3, 4), (2, 0), (1, 5))
    if rng.integers(2):
        return (
            lambda x, k, m: np.roll(x, [k, m], several),
            ((shape, "f4"), integers(-9, 9), integers(-9, 9)),
        )
    return lambda x, k: np.roll(x, k, several), ((shape, "f4"), integers(-9, 9, (2,)))


def linspaces(rng: np.random.Generator) -> Case:
    num, axis = one_of(rng, 0, 1, 2, 7, 50), one_of(rng, 0, -1)
    options = {
        "endpoint": bool(rng.integers(2)),
        "retstep": bool(rng.integers(2)),
        "dtype": one_of(rng, None, None, "i4", "f4"),
        "axis": axis,
    }
    first, last = one_of(rng, (), (3,), (2, 1)), one_of(rng, (), (3,))
    dtypes = one_of(rng, *NUMBERS), one_of(rng, *NUMBERS)
    if rng.integers(3) == 0:  # a step of zero on some of the replicas
        return (lambda a, k: np.linspace(a, a + k, num, **options)), (
            (first, dtypes[0]),
            integers(0, 2),
        )
    if rng.integers(3) == 0:
        end = one_of(rng, 1, 2.5)
        return lambda a: np.linspace(a, end, num, **options), ((first, dtypes[0]),)
    return (
        lambda a, b: np.linspace(a, b, num, **options),
        ((first, dtypes[0]), (last, dtypes[1])),
    )


def logspaces(rng: np.random.Generator) -> Case:
    num = one_of(rng, 0, 2, 7)
    options = {"endpoint": bool(rng.integers(2)), "dtype": one_of(rng, None, "f4")}
    base = one_of(rng, 10, 2.0)
    return (
        lambda a, b: np.logspace(a, b, num, base=base, **options),
        ((one_of(rng, (), (3,)), one_of(rng, *FLOATS)), ((), "f8")),
    )


def interps(rng: np.random.Generator) -> Case:
    length = one_of(rng, 1, 2, 3, 9, 40)
    ends = one_of(rng, {}, {"left": -1}, {"left": 2.5, "right": np.nan}, {"period": 3.0})
    xp = sorted_row(length, one_of(rng, "f4", "f8", "i8"))
    if rng.integers(5) == 0:
        xp = lambda rng: values(rng, (length,), "f8")  # noqa: E731
    x, fp = (shapes(rng), one_of(rng, *REALS)), ((length,), one_of(rng, *NUMBERS))
    return lambda x, xp, fp: np.interp(x, xp, fp, **ends), (x, xp, fp)


def interps_to_mapped_ends(rng: np.random.Generator) -> Case:
    return (
        lambda x, xp, fp, a, b: np.interp(x, xp, fp, a, b),
        (((9,), "f8"), sorted_row(4, "f8"), ((4,), "f8"), ((), "f4"), ((), "f8")),
    )


def histograms(rng: np.random.Generator) -> Case:
    bins, density = one_of(rng, 1, 3, 10, 0, "auto"), one_of(rng, None, True)
    ends = one_of(rng, None, None, (-1, 1), (0.5, 0.5), (2, 1))
    data = (shapes(rng), one_of(rng, *REALS, "?"))
    if rng.integers(2):
        return lambda x: np.histogram(x, bins, ends, density), (data,)
    weight = (data[0], one_of(rng, "f4", "f8", "i4", "F"))
    return lambda x, w: np.histogram(x, bins, ends, density, w), (data, weight)


def histograms_between_mapped_edges(rng: np.random.Generator) -> Case:
    data = (shapes(rng), one_of(rng, *REALS))
    if rng.integers(2):
        ends = ((), one_of(rng, "f4", "f8", "i4"))
        return lambda x, a, b: np.histogram(x, 5, (a, b)), (data, ends, ends)
    edges, density = (
        sorted_row(one_of(rng, 1, 2, 6), one_of(rng, "f4", "f8", "i4")),
        one_of(rng, 0, 1),
    )
    return lambda x, edges: np.histogram(x, edges, density=density), (data, edges)


def meshgrids(rng: np.random.Generator) -> Case:
    options = {
        "copy": bool(rng.integers(2)),
        "sparse": bool(rng.integers(2)),
        "indexing": one_of(rng, "xy", "ij", "yx"),
    }
    parts = tuple((shapes(rng), one_of(rng, *NUMBERS)) for _ in range(rng.integers(1, 4)))
    return lambda *xs: np.meshgrid(*xs, **options), parts


def windows(rng: np.random.Generator) -> Case:
    window, axis = one_of(
        rng, (2, None), ((2, 1), None), (2, -1), ((2, 2), (0, 0)), (9, 0), (-1, 0)
    )
    shape = one_of(rng, (5,), (4, 3), (2, 0), (3, 3, 3))
    view = np.lib.stride_tricks.sliding_window_view
    return lambda x: view(x, window, axis), ((shape, one_of(rng, *NUMBERS)),)


def bits(rng: np.random.Generator) -> Case:
    axis, order = one_of(rng, None, 0, -1), one_of(rng, "big", "little")
    if rng.integers(2):
        data = (shapes(rng), one_of(rng, "?", "u1", "i8", "f4"))
        return lambda x: np.packbits(x, axis, order), (data,)
    shape, count = shapes(rng), one_of(rng, None, 3, -2, 11)
    count = count if 0 not in shape else None  # NumPy leaves what no bits fill unset
    return lambda x: np.unpackbits(x, axis, count, order), ((shape, "u1"),)


def roundings(rng: np.random.Generator) -> Case:
    digits = one_of(rng, (), (None,), (0,), (1,), (-1,), (2,))
    shape = one_of(rng, (), (), (2,))
    scale = one_of(rng, 1, 100, 1e30)
    return lambda x: round(x * scale, *digits), ((shape, one_of(rng, *NUMBERS)),)


def einsums_of_mixed_dtypes(rng: np.random.Generator) -> Case:
    terms = one_of(rng, "i,i", "ij,j->i", "ij,jk", "i,i->i", "i,i,i->", "ij,jk,k->i", "ij,ij->")
    size = {letter: int(one_of(rng, 1, 2, 5, 40, 300)) for letter in "ijk"}
    parts = tuple(
        (tuple(size[letter] for letter in term), one_of(rng, *NUMBERS))
        for term in terms.split("->")[0].split(",")
    )
    return lambda *xs: np.einsum(terms, *xs), parts


def products(rng: np.random.Generator) -> Case:
    call = one_of(rng, np.convolve, np.correlate)
    mode = one_of(rng, "full", "same", "valid")
    n, m = (one_of(rng, (0,), (1,), (5,), (11,), (12,), (60,)) for _ in range(2))
    parts = [(shape, one_of(rng, *NUMBERS)) for shape in (n, m)]
    # BLAS makes NaN or infinity of a complex infinity, depending on the address
    finite = [lambda rng, part=part: normal(rng, part[0], None, part[1]).data for part in parts]
    return lambda a, b: call(a, b, mode), tuple(finite)


def fits(rng: np.random.Generator) -> Case:
    n, degree = int(one_of(rng, 1, 3, 8)), int(one_of(rng, 0, 1, 2))
    if rng.integers(2):
        points = sorted_row(n, "f8")
        return lambda x, y: np.polyfit(x, y, degree), (points, (one_of(rng, (n,), (n, 2)), "f8"))
    right = one_of(rng, (n,), (n, 2), (n + 1,))
    return lambda a, b: np.linalg.lstsq(a, b), (((n, 2), "f8"), (right, one_of(rng, "f4", "D")))


def pieces(rng: np.random.Generator) -> Case:
    functions = one_of(rng, [1, 2], [1, 2, 3], [lambda t: t * t, np.sin, -1], [lambda t: t.max()])
    data = (shapes(rng), one_of(rng, *FLOATS, "i4"))
    return lambda x: np.piecewise(x, [x > 0, x < 0], functions), (data,)


def along_axes(rng: np.random.Generator) -> Case:
    functions: tuple[Call, ...] = (
        np.sort,
        np.sum,
        np.diag,
        lambda v: v[0] if v[0] > 0 else -v[0],
        lambda v: [v.min(), v.max()],
        lambda v, k=1: v * k,
    )
    call, axis = one_of(rng, *functions), one_of(rng, 0, -1, 1)
    return lambda x: np.apply_along_axis(call, axis, x), ((shapes(rng), one_of(rng, *REALS)),)


def fills(rng: np.random.Generator) -> Case:
    shape, dtype = one_of(rng, (), 3, (2, 3), (2, 0)), one_of(rng, None, None, "f4", "i4")
    data = (one_of(rng, (), (3,)), one_of(rng, *NUMBERS))

    def call(x: Any) -> Any:
        like = {"like": x} if isinstance(x, gpusim.MappedArray) else {}
        return np.full(shape, x, dtype, **like)

    return call, (data,)


def powers(rng: np.random.Generator) -> Case:
    """Arguments of a map are 0-d arrays, x[()] and sums of theirs are scalars."""
    exponent = one_of(rng, 0, 1, 2, 3, -1, 0.5, 2.5, -1.5, True, np.float32(2), np.int8(3), 2j)
    kinds = "?", *NUMBERS
    if rng.integers(2):
        call = one_of(rng, operator.pow, np.power, lambda x, y: x[()] ** y[()])
        one, other = one_of(rng, *kinds), one_of(rng, *kinds)
        same = other if rng.integers(2) else one
        fast = lambda rng: np.asarray(one_of(rng, -1, 0, 0.5, 1, 2)).astype(other)  # noqa: E731
        return call, (((), same), one_of(rng, fast, ((), other)))
    call = one_of(
        rng,
        lambda x: x**exponent,
        lambda x: exponent**x,
        lambda x: x[()] ** exponent,
        lambda x: exponent ** x[()],
    )
    return call, (((), one_of(rng, *kinds)),)


FAMILIES = {
    family.__name__: family
    for family in (
        rolls,
        rolls_of_several_axes,
        linspaces,
        logspaces,
        interps,
        interps_to_mapped_ends,
        histograms,
        histograms_between_mapped_edges,
        meshgrids,
        windows,
        bits,
        roundings,
        einsums_of_mixed_dtypes,
        products,
        fits,
        pieces,
        along_axes,
        fills,
        powers,
    )
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_any_call_has_the_bits_of_a_loop_over_the_replicas(family: str) -> None:
    rng = np.random.default_rng([SEED, sum(map(ord, family))])
    for number in range(budget(2000, most=150)):
        call, parts = FAMILIES[family](rng)
        arguments, mapped, replicas = drawn(rng, *parts)
        try:
            agree(call, arguments, mapped, replicas)
        except AssertionError as error:
            shown = [(part.dtype, part.shape) for part in arguments]
            raise AssertionError(f"number {number}: {shown} {mapped}") from error


X = np.random.default_rng(0).standard_normal((5, 4))
LABELS = np.array([0, 3, 2, 1, 3])
BATCHED: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "scalar ** 2": (lambda x: x[0] ** 2, (X,)),
    "scalar ** scalar": (lambda x: abs(x[0]) ** x[1], (X,)),
    "2 ** integer": (lambda k: 2**k, (LABELS,)),
    "roll": (np.roll, (X, LABELS)),
    "interp": (lambda x: np.interp(0.5, np.sort(x), x), (X,)),
    "interp with a period": (lambda x: np.interp(x, x, x, period=1.5), (X,)),
    "histogram": (np.histogram, (X,)),
    "weighted histogram": (lambda x: np.histogram(x, weights=x * x, density=True), (X,)),
    "histogram of mapped range": (lambda x: np.histogram(x, 3, (x[0] - 1, x[0] + 1)), (X,)),
    "histogram of mapped edges": (lambda x: np.histogram(x, np.sort(x[:3])), (X,)),
    "meshgrid": (lambda x: np.meshgrid(x, np.arange(3), x[:2]), (X,)),
    "sliding windows": (lambda x: np.lib.stride_tricks.sliding_window_view(x, 3), (X,)),
    "packbits": (lambda x: np.packbits(x > 0), (X,)),
    "unpackbits": (lambda k: np.unpackbits(k.astype("u1")[None], count=3), (LABELS,)),
    "linspace": (lambda x: np.linspace(x[0], x[1], 7), (X,)),
    "linspace to one": (lambda x: np.linspace(x, 1, 7, axis=-1, retstep=True), (X,)),
    "logspace": (lambda x: np.logspace(0, x[1], 7), (X,)),
    "einsum of dtypes": (lambda x: np.einsum("i,i", x, np.ones(4, "f4")), (X,)),
    "einsum of three": (lambda x: np.einsum("i,i,i", x, x, x), (X,)),
    "apply_along_axis": (lambda x: np.apply_along_axis(np.cumsum, 0, x[:, None]), (X,)),
    "full": (lambda x: np.full((2, 3), x[0], like=x), (X,)),
    "round": (lambda x: (round(x[0]), round(x[1], 1)), (X,)),
    "array like": (lambda x: np.array([[x[0], 1], [2, x[1]]], like=x), (X,)),
    "stack": (lambda x: np.stack([x[0], x[1]]), (X,)),
    "rows of a table": (lambda k: gpusim.at(np.eye(10))[k].get(), (LABELS,)),
}


@pytest.mark.parametrize("name", BATCHED)
def test_ordinary_calls_are_batched(name: str) -> None:
    call, arguments = BATCHED[name]
    if name in ("full", "array like", "rows of a table"):  # only vmap's arrays are like= these
        with names_on_the_route() as names:
            gpusim.vmap(call)(*arguments)
        assert not names
    else:
        assert agree(call, arguments, (True,) * len(arguments), 5)


@pytest.mark.filterwarnings("ignore")
def test_scalars_are_raised_to_powers_by_the_c_library_at_any_length() -> None:
    rng, replicas = np.random.default_rng(5), 1501
    for dtype in ("f2", "f4", "f8", "F", "D", "i8"):
        base = np.abs(normal(rng, (replicas,), None, dtype).data).astype(dtype)
        for exponent in (2, 3, *((0.5, -1.5, np.dtype(dtype).type(2.5)) if dtype != "i8" else ())):
            agree(lambda x, e=exponent: x**e, (base,), (True,), replicas)
            agree(lambda x, e=exponent: e**x, (base,), (True,), replicas)
        agree(operator.pow, (base, base[::-1] if dtype != "i8" else base), (True, True), replicas)


def test_windows_are_views_of_arrays_that_change() -> None:
    view = np.lib.stride_tricks.sliding_window_view

    def f(x: Any) -> Any:
        own, same = x.copy(), np.zeros(4, like=x)
        seen = view(own, 2), view(same, 3), view(own, 2, writeable=True)
        own[1] = 7
        same[2] = x[0]  # which now varies between replicas
        seen[2][0, 0] = -1
        with pytest.raises(ValueError, match="read-only"):
            seen[0][0] = 1
        return seen, own

    found, own = gpusim.vmap(f)(X)
    for number, row in enumerate(X):
        expected = np.array([-1, 7, *row[2:]])
        assert np.array_equal(own[number], expected)
        assert np.array_equal(found[0][number], view(expected, 2))
        assert np.array_equal(found[1][number], view(np.array([0, 0, row[0], 0]), 3))
        assert np.array_equal(found[2][number], view(expected, 2))


CURED: dict[str, tuple[Call, str, Call]] = {
    "np.array of scalars": (
        lambda x: np.array([x[0], x[1]]),
        "np.stack([a, b])",
        lambda x: np.stack([x[0], x[1]]),
    ),
    "np.array of a list": (
        lambda x: np.array([2 * row for row in x]),
        "np.array(..., like=x)",
        lambda x: np.array([2 * row for row in x], like=x),
    ),
    "np.asarray": (
        lambda x: np.asarray(x),
        "np.asarray(..., like=x)",
        lambda x: np.asarray(x, like=x),
    ),
    "np.full": (
        lambda x: np.full(3, x[0]),
        "np.full(..., like=x)",
        lambda x: np.full(3, x[0], like=x),
    ),
    "indexing a table": (
        lambda x: np.eye(10)[(x > 0).astype(int)],
        "gpusim.at(array)[index].get()",
        lambda x: gpusim.at(np.eye(10))[(x > 0).astype(int)].get(),
    ),
    "indexing a list": (
        lambda x: [1, 2][(x[0] > 0).astype(int)],
        "gpusim.at(array)[index].get()",
        lambda x: gpusim.at(np.array([1, 2]))[(x[0] > 0).astype(int)].get(),
    ),
    "np.vectorize": (
        lambda x: np.vectorize(lambda v: v if v > 0 else -v)(x),
        "gpusim.per_replica(np.vectorize(f))(...)",
        lambda x: gpusim.per_replica(np.vectorize(lambda v: v if v > 0 else -v))(x),
    ),
    "a list of arrays": (
        lambda x: np.mean([x[0], x[1]]),
        "give np.mean one MappedArray instead of a list (np.stack)",
        lambda x: np.mean(np.stack([x[0], x[1]])),
    ),
    "a plain array first": (
        lambda x: np.roll(np.arange(9), (x[0] > 0).astype(int)),
        "np.asarray(array, like=x)",
        lambda x: np.roll(np.asarray(np.arange(9), like=x), (x[0] > 0).astype(int)),
    ),
    "np.r_": (
        lambda x: np.r_[x, x],
        "np.concatenate",
        lambda x: np.concatenate([x, x]),
    ),
    "np.float32": (
        lambda x: np.float32(x[0]),
        "x.astype(np.float32)",
        lambda x: x[0].astype(np.float32),
    ),
    "float": (lambda x: float(x[0]), "x.astype(float)", lambda x: x[0].astype(float)),
    "math": (lambda x: math.exp(x[0]), "use np.exp", lambda x: np.exp(x[0])),
    "max": (lambda x: max(x[0], x[1]), "np.maximum", lambda x: np.maximum(x[0], x[1])),
    "a branch": (
        lambda x: x[0] if x[0] > 0 else x[1],
        "choose with np.where",
        lambda x: np.where(x[0] > 0, x[0], x[1]),
    ),
    "nditer": (
        lambda x: sum(v * v for v in np.nditer(x)),
        "iterate over x, or over x.flat",
        lambda x: sum(v * v for v in x.flat),
    ),
    "ndenumerate": (
        lambda x: sum(v for _, v in np.ndenumerate(x)),
        "iterate over x, or over x.flat",
        lambda x: sum(v for v in x.flat),
    ),
    "range": (
        lambda x: sum(range((x[0] > 0).astype(int))),
        "use one length for all replicas",
        lambda x: np.sum(np.where(np.arange(1) < (x[0] > 0), np.arange(1), 0)),
    ),
    "another library": (
        lambda x: statistics.geometric_mean(np.abs(x)),
        "gpusim.per_replica(statistics.geometric_mean)(...)",
        lambda x: gpusim.per_replica(statistics.geometric_mean)(np.abs(x)),
    ),
}


@pytest.mark.parametrize("name", CURED)
def test_what_cannot_work_names_a_cure_that_does(name: str) -> None:
    call, message, cure = CURED[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as raised:
        gpusim.vmap(call)(X)
    assert raised.type is (ValueError if name == "nditer" else TypeError)
    expected = np.stack([call(row) for row in X])
    assert np.array_equal(gpusim.vmap(cure)(X), expected)


def test_storing_into_a_plain_array_names_both_cures() -> None:
    def stores(x: Any) -> Any:
        array = np.zeros(3)
        array[1] = x
        return array

    for call in (stores, lambda x: np.zeros(3).fill(x)):
        with pytest.raises((TypeError, ValueError)) as raised:
            gpusim.vmap(call)(X[:, 0])
        text = f"{raised.value} {raised.value.__cause__}"
        assert "np.zeros(3, like=x)" in text and "gpusim.at(array)[index].set(x)" in text


def test_messages_know_the_function_that_a_map_was_given_and_need_no_source() -> None:
    with pytest.raises(TypeError, match=r"gpusim\.per_replica\(np\.vectorize\(f\)\)"):
        gpusim.vmap(np.vectorize(abs))(X)
    names: dict[str, Any] = {"np": np}
    exec("def no_source(x):\n    return np.eye(3)[x]", names)
    with pytest.raises(TypeError, match=r"gpusim\.at\(array\)\[index\]\.get\(\).*pmap"):
        gpusim.vmap(names["no_source"])(LABELS)


def test_formats_show_all_replicas() -> None:
    shown = []
    gpusim.vmap(lambda x: shown.append(f"{x[0]:.2f} {x[1]:+.0e}"))(np.array([[1.5, 20], [-2, 3]]))
    assert shown == ["[1.50, -2.00] [+2e+01, +3e+00]"]
    with pytest.raises(TypeError, match="unsupported format string"):
        gpusim.vmap(lambda x: f"{x:.2f}")(X)


def test_per_replica_calls_any_function_on_plain_read_only_arrays() -> None:
    seen = []

    def f(x: Any, scale: Any, offsets: dict[str, Any]) -> Any:
        seen.append((type(x), type(scale), x.flags.writeable))
        return {"sum": x.sum() * scale if x[0] > 0 else 0.0, "row": x + offsets["by"]}

    def call(x: Any, scale: Any) -> Any:
        return gpusim.per_replica(f)(x, scale, offsets={"by": scale})

    found = gpusim.vmap(call, in_axes=(0, None))(X, 2.0)
    assert seen == [(np.ndarray, float, False)] * 5
    rows = [f(row, 2.0, {"by": 2.0}) for row in X]
    for key in ("sum", "row"):
        assert np.array_equal(found[key], np.stack([row[key] for row in rows]))
    assert gpusim.per_replica(math.gamma)(5.0) == 24.0
    with pytest.raises(ValueError, match="different shape"):
        gpusim.vmap(gpusim.per_replica(lambda x: x[x > 0]))(X)
    with pytest.raises(TypeError, match="per_replica needs a function"):
        gpusim.per_replica(3)


def test_functions_of_scipy_run() -> None:
    special = pytest.importorskip("scipy.special")
    assert agree(special.expit, (X,), (True,), 5)
    calls: dict[str, Call] = {
        "softmax": lambda x: special.softmax(x),
        "log_softmax": lambda x: special.log_softmax(x),
        "logsumexp": lambda x: special.logsumexp(x),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"gpusim\.per_replica\(special\.{name}\)"):
            gpusim.vmap(call)(X)
        function = getattr(special, name)
        found = gpusim.vmap(gpusim.per_replica(function))(X)
        assert np.array_equal(found, np.stack([function(row) for row in X]))


PAGE = (Path(__file__).parents[2] / "docs" / "numpy.md").read_text()
MODULES = {
    "np.": np,
    "np.linalg.": np.linalg,
    "np.fft.": np.fft,
    "np.lib.stride_tricks.": np.lib.stride_tricks,
}


def functions_that_dispatch() -> dict[str, Any]:
    """NumPy's functions that ask their arguments for __array_function__, by the shortest name."""
    found: dict[Any, str] = {}
    for prefix, module in MODULES.items():
        for name, function in sorted(vars(module).items()):
            if type(function) is type(np.sum) and not name.startswith("_"):
                found.setdefault(function, prefix + name)
    return {name: function for function, name in found.items()}


def test_the_page_about_numpys_functions_lists_them_as_they_run() -> None:
    batched, _, rest = PAGE.partition("\n## Once per replica\n")
    listed = {
        True: set(re.findall(r"`(np\.[\w.]+)`[,\n]", batched.partition("\n## Batched\n")[2])),
        False: set(re.findall(r"`(np\.[\w.]+)`[,\n]", rest.strip().partition("\n\n")[0] + "\n")),
    }
    for name, function in functions_that_dispatch().items():
        has_rule = function in dispatch.RULES or function in dispatch.WRITERS
        assert name in listed[has_rule], f"{name} is batched: {has_rule}, and the page differs"
        assert name not in listed[False] or not has_rule, name
