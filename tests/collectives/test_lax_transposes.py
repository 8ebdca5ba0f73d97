"""The transpose of every linear collective is its adjoint: <f(x), y> = <x, f^T(y)>.

The numbers are small integers in float64, so both sides are exact, and equal to the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import lax

Function = Callable[[Any], Any]


def integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-9, 10, shape).astype(np.float64)


def inner(a: Any, b: Any) -> float:
    """The inner product over all replicas and elements."""
    assert a.shape == b.shape
    return float(np.sum(np.asarray(a) * np.asarray(b)))


def serial_pmap(f: Function, **options: Any) -> Function:
    return gpusim.pmap(f, schedule="one", **options)


MAPS = {"vmap": gpusim.vmap, "pmap": gpusim.pmap, "pmap-one": serial_pmap}
MEAN = 12.0  # a multiple of every group's size, so that means of multiples of it are integers


@dataclass(frozen=True)
class Linear:
    """A linear collective, its transpose, and the transpose of that, over an axis of replicas."""

    replicas: int
    shape: tuple[int, ...]
    apply: Function
    transposed: Function
    twice: Function
    scale: float = 1.0

    def check(self, map_: Any, seed: int = 0, names: tuple[str, ...] = ("i",)) -> None:
        def mapped(f: Function) -> Function:
            for name in names:
                f = map_(f, axis_name=name)
            return f

        rng = np.random.default_rng(seed)
        x = integers(rng, (self.replicas, *self.shape)) * self.scale
        result = mapped(self.apply)(x)
        y = integers(rng, result.shape) * self.scale
        cotangent = mapped(self.transposed)(y)
        assert cotangent.shape == x.shape
        assert cotangent.dtype == x.dtype
        assert inner(result, y) == inner(x, cotangent)
        np.testing.assert_array_equal(mapped(self.twice)(x), result)


def groupings(replicas: int, *, uneven: bool = False) -> list[Any]:
    """None, and the replicas reversed in groups of every size; unequal groups on demand."""
    backwards = list(range(replicas))[::-1]
    found: list[Any] = [None]
    for count in (k for k in range(1, replicas + 1) if replicas % k == 0):
        found.append([backwards[k::count] for k in range(count)])
    if uneven and replicas > 2:
        found.append([[1], [k for k in backwards if k != 1]])
    return found


def members(replicas: int, groups: Any) -> int:
    return len(groups[0]) if groups else replicas


def psum(replicas: int) -> list[Linear]:
    found = []
    for groups in groupings(replicas, uneven=True):

        def apply(x: Any, groups: Any = groups) -> Any:
            return lax.psum(x, "i", axis_index_groups=groups)

        def transposed(x: Any, groups: Any = groups) -> Any:
            return lax.psum.transpose(x, "i", axis_index_groups=groups)

        found.append(Linear(replicas, (2, 3), apply, transposed, transposed))
    return found


def pmean(replicas: int) -> list[Linear]:
    found = []
    for groups in groupings(replicas):

        def apply(x: Any, groups: Any = groups) -> Any:
            return lax.pmean(x, "i", axis_index_groups=groups)

        def transposed(x: Any, groups: Any = groups) -> Any:
            return lax.pmean.transpose(x, "i", axis_index_groups=groups)

        found.append(Linear(replicas, (2, 3), apply, transposed, transposed, scale=MEAN))
    return found


def all_gather(replicas: int) -> list[Linear]:
    found = []
    for groups, axis, tiled in itertools.product(groupings(replicas), (0, 1, -1), (False, True)):
        options: dict[str, Any] = {"axis_index_groups": groups, "tiled": tiled}

        def apply(x: Any, axis: int = axis, options: Any = options) -> Any:
            return lax.all_gather(x, "i", axis=axis, **options)

        def transposed(x: Any, axis: int = axis, options: Any = options) -> Any:
            return lax.all_gather.transpose(x, "i", axis=axis, **options)

        def twice(x: Any, axis: int = axis, options: Any = options) -> Any:
            return lax.psum_scatter.transpose(x, "i", scatter_dimension=axis, **options)

        found.append(Linear(replicas, (2, 3), apply, transposed, twice))
    return found


def psum_scatter(replicas: int) -> list[Linear]:
    found = []
    for groups, axis, tiled in itertools.product(groupings(replicas), (0, 1, -1), (False, True)):
        options: dict[str, Any] = {"axis_index_groups": groups, "tiled": tiled}

        def apply(x: Any, axis: int = axis, options: Any = options) -> Any:
            return lax.psum_scatter(x, "i", scatter_dimension=axis, **options)

        def transposed(x: Any, axis: int = axis, options: Any = options) -> Any:
            return lax.psum_scatter.transpose(x, "i", scatter_dimension=axis, **options)

        def twice(x: Any, axis: int = axis, options: Any = options) -> Any:
            return lax.all_gather.transpose(x, "i", axis=axis, **options)

        shape = [2, 3, 2]
        shape[axis] = members(replicas, groups) * (2 if tiled else 1)
        found.append(Linear(replicas, tuple(shape), apply, transposed, twice))
    return found


def all_to_all(replicas: int) -> list[Linear]:
    found = []
    axes = itertools.product((0, 1, 2, -1), (0, 1, 2, -2))
    for (split, concat), tiled, groups in itertools.product(
        axes, (False, True), groupings(replicas)
    ):
        options: dict[str, Any] = {"axis_index_groups": groups, "tiled": tiled}
        arguments = (split, concat)

        def apply(x: Any, arguments: Any = arguments, options: Any = options) -> Any:
            return lax.all_to_all(x, "i", *arguments, **options)

        def transposed(x: Any, arguments: Any = arguments, options: Any = options) -> Any:
            return lax.all_to_all.transpose(x, "i", *arguments, **options)

        def twice(x: Any, arguments: Any = arguments, options: Any = options) -> Any:
            return lax.all_to_all.transpose(x, "i", *arguments[::-1], **options)

        shape = [2, 3, 2]
        shape[split] = members(replicas, groups) * (2 if tiled else 1)
        found.append(Linear(replicas, tuple(shape), apply, transposed, twice))
    return found


def pswapaxes(replicas: int) -> list[Linear]:
    found = []
    for groups, axis in itertools.product(groupings(replicas), (0, 1, -1)):

        def apply(x: Any, axis: int = axis, groups: Any = groups) -> Any:
            return lax.pswapaxes(x, "i", axis, axis_index_groups=groups)

        def transposed(x: Any, axis: int = axis, groups: Any = groups) -> Any:
            return lax.pswapaxes.transpose(x, "i", axis, axis_index_groups=groups)

        shape = [2, 3, 2]
        shape[axis] = members(replicas, groups)
        found.append(Linear(replicas, tuple(shape), apply, transposed, transposed))
    return found


def ppermute(replicas: int) -> list[Linear]:
    rng = np.random.default_rng(replicas)
    found = []
    for kept in range(replicas + 1):
        sources = rng.permutation(replicas)[:kept].tolist()
        destinations = rng.permutation(replicas)[:kept].tolist()
        perm = list(zip(sources, destinations, strict=True))
        inverse = [(destination, source) for source, destination in perm]

        def apply(x: Any, perm: Any = perm) -> Any:
            return lax.ppermute(x, "i", perm)

        def transposed(x: Any, perm: Any = perm) -> Any:
            return lax.ppermute.transpose(x, "i", perm)

        def twice(x: Any, inverse: Any = inverse) -> Any:
            return lax.ppermute.transpose(x, "i", inverse)

        found.append(Linear(replicas, (2, 3), apply, transposed, twice))
    return found


def pshuffle(replicas: int) -> list[Linear]:
    perm = np.random.default_rng(replicas).permutation(replicas).tolist()
    inverse = np.argsort(perm).tolist()
    return [
        Linear(
            replicas,
            (2, 3),
            lambda x: lax.pshuffle(x, "i", perm),
            lambda x: lax.pshuffle.transpose(x, "i", perm),
            lambda x: lax.pshuffle.transpose(x, "i", inverse),
        )
    ]


def pbroadcast(replicas: int) -> list[Linear]:
    found = []
    for source in range(replicas):

        def apply(x: Any, source: int = source) -> Any:
            return lax.pbroadcast(x, "i", source)

        def transposed(x: Any, source: int = source) -> Any:
            return lax.pbroadcast.transpose(x, "i", source)

        def twice(x: Any, source: int = source) -> Any:
            # The transpose is the sum, kept at the source alone; that of the two, in turn, takes
            # the source's value (its own transpose is the mask) and sums what one replica holds.
            held = np.where(lax.axis_index("i") == source, x, np.zeros_like(x))
            return lax.psum.transpose(held, "i")

        found.append(Linear(replicas, (2, 3), apply, transposed, twice))
    return found


COLLECTIVES = (
    psum,
    pmean,
    all_gather,
    psum_scatter,
    all_to_all,
    pswapaxes,
    ppermute,
    pshuffle,
    pbroadcast,
)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_transpose_is_the_adjoint(collective: Any, replicas: int) -> None:
    for seed, linear in enumerate(collective(replicas)):
        linear.check(gpusim.vmap, seed)


@pytest.mark.parametrize("map_", ["pmap", "pmap-one"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_transpose_is_the_adjoint_in_threads_too(collective: Any, map_: str) -> None:
    for seed, linear in enumerate(collective(3)):
        linear.check(MAPS[map_], seed)


@pytest.mark.parametrize("names", ["x", "y", ("x", "y"), ("y", "x")], ids=str)
def test_a_transpose_over_nested_axes_is_the_adjoint(names: Any) -> None:
    rng = np.random.default_rng(0)
    n = {"x": 2, "y": 3}.get(names, 6) if isinstance(names, str) else 6
    perm = [(k, n - 1 - k) for k in range(1, n)]
    pairs: list[tuple[Function, Function]] = [
        (lambda x: lax.psum(x, names), lambda y: lax.psum.transpose(y, names)),
        (
            lambda x: lax.all_gather(x, names, axis=1),
            lambda y: lax.all_gather.transpose(y, names, axis=1),
        ),
        (
            lambda x: lax.psum_scatter(x, names, tiled=True),
            lambda y: lax.psum_scatter.transpose(y, names, tiled=True),
        ),
        (
            lambda x: lax.all_to_all(x, names, 0, 1, tiled=True),
            lambda y: lax.all_to_all.transpose(y, names, 0, 1, tiled=True),
        ),
        (
            lambda x: lax.ppermute(x, names, perm),
            lambda y: lax.ppermute.transpose(y, names, perm),
        ),
        (
            lambda x: lax.pbroadcast(x, names, n - 1),
            lambda y: lax.pbroadcast.transpose(y, names, n - 1),
        ),
    ]
    for outer, inner_ in itertools.product(MAPS.values(), repeat=2):
        for apply, transposed in pairs:

            def mapped(f: Function, outer: Any = outer, inner_: Any = inner_) -> Function:
                return outer(inner_(f, axis_name="y"), axis_name="x")

            x = integers(rng, (2, 3, 6, 2))
            result = mapped(apply)(x)
            y = integers(rng, result.shape)
            assert inner(result, y) == inner(x, mapped(transposed)(y))


def test_the_transpose_of_a_tree_is_the_tree_of_transposes() -> None:
    rng = np.random.default_rng(1)
    tree = {"w": integers(rng, (3, 2)), "b": [integers(rng, (3,))]}
    for transposed in (
        lambda ct: lax.psum.transpose(ct, "i"),
        lambda ct: lax.ppermute.transpose(ct, "i", [(0, 1)]),
        lambda ct: lax.pbroadcast.transpose(ct, "i", 1),
    ):
        together = gpusim.vmap(transposed, axis_name="i")(tree)
        alone = gpusim.vmap(transposed, axis_name="i")(tree["b"][0])
        np.testing.assert_array_equal(together["b"][0], alone)
        assert together["w"].shape == (3, 2)


# --- ragged_all_to_all -------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """A random exchange: offsets and sizes by replica and slice, and the sizes of the buffers."""

    replicas: int
    groups: Any
    offsets: tuple[np.ndarray, ...]  # input_offsets, send_sizes, output_offsets, recv_sizes
    sent_rows: int
    received_rows: int


def exchange(
    rng: np.random.Generator, replicas: int, slices: int, groups: Any, *, shared: bool
) -> Exchange:
    """Slices land in random order with gaps; ``shared`` rows are sent to several receivers."""
    partition = groups or [list(range(replicas))]
    n = len(partition[0])
    count = n * slices
    sizes = rng.integers(0, 4, (replicas, count))
    landing, received = np.zeros_like(sizes), np.zeros_like(sizes)
    for group in partition:
        for place, receiver in enumerate(group):
            incoming = [
                (sender, k) for sender in group for k in range(place * slices, (place + 1) * slices)
            ]
            start = 0
            for which in rng.permutation(len(incoming)):
                sender, k = incoming[which]
                start += rng.integers(0, 2)
                landing[sender, k] = start
                start += sizes[sender, k]
                sender_place = group.index(sender)
                received[receiver, sender_place * slices + k % slices] = sizes[sender, k]
    sent_rows = int(sizes.sum(axis=1).max()) + 4
    if shared:
        offsets = rng.integers(0, sent_rows - sizes + 1)
    else:
        offsets = np.cumsum(sizes, axis=1) - sizes
    received_rows = int((landing + sizes).max()) + 2
    arrays = (offsets, sizes, landing, received)
    return Exchange(
        replicas, groups, tuple(a.astype(np.int32) for a in arrays), sent_rows, received_rows
    )


RAGGED = [
    (1, 1, None),
    (1, 3, None),
    (2, 1, None),
    (3, 2, None),
    (4, 1, [[2, 0], [1, 3]]),
    (4, 2, [[3, 1, 0, 2]]),
    (4, 2, [[0], [2], [1], [3]]),
]


@pytest.mark.parametrize("map_", MAPS)
@pytest.mark.parametrize("row", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["disjoint", "shared"])
@pytest.mark.parametrize("replicas, slices, groups", RAGGED, ids=str)
def test_the_transpose_of_ragged_all_to_all_is_the_adjoint(
    replicas: int, slices: int, groups: Any, shared: bool, row: Any, map_: str
) -> None:
    rng = np.random.default_rng(replicas * 10 + slices)
    plan = exchange(rng, replicas, slices, groups, shared=shared)
    options: dict[str, Any] = {"axis_name": "i", "axis_index_groups": groups}
    operand = integers(rng, (replicas, plan.sent_rows, *row))
    output = integers(rng, (replicas, plan.received_rows, *row))
    ct = integers(rng, output.shape)

    def apply(*arguments: Any) -> Any:
        return lax.ragged_all_to_all(*arguments, **options)

    def transposed(*arguments: Any) -> Any:
        return lax.ragged_all_to_all.transpose(*arguments, **options)

    mapped = MAPS[map_]
    result = mapped(apply, axis_name="i")(operand, output, *plan.offsets)
    operand_ct, output_ct = mapped(transposed, axis_name="i")(ct, operand, output, *plan.offsets)
    assert (operand_ct.shape, output_ct.shape) == (operand.shape, output.shape)
    assert inner(result, ct) == inner(operand, operand_ct) + inner(output, output_ct)


@pytest.mark.parametrize("map_", MAPS)
def test_the_output_cotangent_is_zero_exactly_where_something_arrived(map_: str) -> None:
    rng = np.random.default_rng(5)
    plan = exchange(rng, 3, 2, None, shared=False)
    operand, output = np.ones((3, plan.sent_rows)), np.zeros((3, plan.received_rows))

    def both(ct: Any, *arguments: Any) -> Any:
        result = lax.ragged_all_to_all(*arguments, axis_name="i")
        return result, lax.ragged_all_to_all.transpose(ct, *arguments, axis_name="i")

    ct = np.full_like(output, 3.0)
    result, (_, output_ct) = MAPS[map_](both, axis_name="i")(ct, operand, output, *plan.offsets)
    assert 0 < result.sum() < result.size
    np.testing.assert_array_equal(output_ct, np.where(result == 1, 0.0, 3.0))


def test_sending_back_what_was_sent_back_is_the_exchange_itself() -> None:
    rng = np.random.default_rng(6)
    plan = exchange(rng, 4, 2, None, shared=False)
    operand = integers(rng, (4, plan.sent_rows, 3))
    output = np.zeros((4, plan.received_rows, 3))

    def twice(operand: Any, output: Any, *offsets: Any) -> Any:
        sent_from, sent, landing, received = offsets
        back = [lax.all_to_all(a, "i", 0, 0, tiled=True) for a in (landing, sent_from)]
        # The operand's cotangent is the exchange of the output's, with both ends swapped.
        operand_ct, _ = lax.ragged_all_to_all.transpose(
            operand, output, operand, back[0], received, back[1], sent, axis_name="i"
        )
        return lax.ragged_all_to_all(operand, output, *offsets, axis_name="i"), operand_ct

    once, again = gpusim.vmap(twice, axis_name="i")(operand, output, *plan.offsets)
    np.testing.assert_array_equal(again, once)
