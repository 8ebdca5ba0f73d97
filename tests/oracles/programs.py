"""Random replicated programs, and every way to run one.

A `Program` is data. It prints as the calls that it makes, and runs with gpusim or with JAX.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import optree
from hypothesis import strategies as st

Shape = tuple[int, ...]
Axes = tuple[tuple[str, int], ...]
Leaf = tuple[Shape, str]

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*INTEGERS, "bool", *FLOATS, "complex64")
# 1, 2, 3, 4, 6 and 8 replicas, on one axis and on two.
AXES: tuple[Axes, ...] = tuple((("i", size),) for size in (1, 2, 3, 4, 6, 8)) + tuple(
    (("x", x), ("y", y)) for x, y in ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 3), (2, 1))
)
CUBE: Axes = (("x", 2), ("y", 2), ("z", 2))
LARGEST = 2048  # elements of a leaf on one replica: gathers stop growing here

ONE_ARRAY = ("pargmax", "pargmin")  # defined for an array, not for a tree
SUMS = ("psum", "pmean", "psum_scatter")
EXTREMES = ("pmax", "pmin", "pargmax", "pargmin")


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


# --- programs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One call on every leaf: a function of lax, or one of `LOCAL`."""

    function: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        given = [repr(arg) for arg in self.args] + [f"{k}={v!r}" for k, v in self.kwargs]
        return f"{self.function}(x{''.join(', ' + text for text in given)})"

    def __call__(self, dialect: Any, tree: Any) -> Any:
        if self.function in WHOLE:
            return WHOLE[self.function](dialect, tree, *self.args)
        if self.function in LOCAL:
            local = LOCAL[self.function]
            return dialect.tree_map(lambda leaf: local(dialect, leaf, *self.args), tree)
        collective = partial(getattr(dialect.lax, self.function), **dict(self.kwargs))
        if self.function in ONE_ARRAY:
            return dialect.tree_map(lambda leaf: collective(leaf, *self.args), tree)
        return collective(tree, *self.args)


def _is_bool(x: Any) -> bool:
    return x.dtype == np.bool_


# Local steps are exact in every dtype, or only rearrange, so that libraries agree on the bits.
LOCAL: dict[str, Callable[..., Any]] = {
    "negative": lambda d, x: ~x if _is_bool(x) else -x,
    "twice": lambda d, x: x if _is_bool(x) else x * 2,
    "flip": lambda d, x: d.xp.flip(x),
    "swapaxes": lambda d, x: d.xp.swapaxes(x, 0, -1) if x.ndim else x,
    "ravel": lambda d, x: d.xp.reshape(x, (-1,)),
    "roll": lambda d, x: d.xp.roll(x, 1),
    "tail": lambda d, x: x[..., 1:] if x.ndim else x,
    "pair": lambda d, x: d.xp.stack([x, x]),
    "on_even": lambda d, x, name: d.xp.where(
        d.lax.axis_index(name) % 2 == 0, x, d.xp.zeros_like(x)
    ),
}
# Steps that take the tree as a whole.
WHOLE: dict[str, Callable[..., Any]] = {
    "number": lambda d, tree, names: {"number": d.lax.axis_index(names), "tree": tree},
    "constants": lambda d, tree, names: (tree, d.lax.psum((3, 1.5), names)),
    "size": lambda d, tree, names: [tree, d.lax.axis_size(names)],
}


def _local_shape(step: Step, shape: Shape) -> Shape:
    probe = np.empty(shape, np.int32)
    quiet = SimpleNamespace(xp=np, lax=SimpleNamespace(axis_index=lambda name: 0))
    return LOCAL[step.function](quiet, probe, *step.args).shape


@dataclass(frozen=True)
class Program:
    """Steps over named axes, on a tree of leaves: each (shape on one replica, dtype)."""

    axes: Axes
    tree: Any
    mapped: Any
    steps: tuple[Step, ...]
    seed: int

    @property
    def sizes(self) -> Shape:
        return tuple(size for _, size in self.axes)

    @property
    def has_groups(self) -> bool:
        return any(dict(step.kwargs).get("axis_index_groups") for step in self.steps)

    @property
    def has_mean(self) -> bool:
        return any(step.function == "pmean" for step in self.steps)

    def __call__(self, dialect: Any, tree: Any) -> Any:
        for step in self.steps:
            tree = step(dialect, tree)
        return tree

    def argument(self) -> Any:
        """Return the tree of stacked arrays; mapped leaves have the mapped axes in front."""
        rng = np.random.default_rng(self.seed)
        return optree.tree_map(
            lambda leaf, mapped: values(rng, (self.sizes if mapped else ()) + leaf[0], leaf[1]),
            self.tree,
            self.mapped,
            is_leaf=is_leaf,
        )


def is_leaf(node: Any) -> bool:
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], str)


def values(rng: np.random.Generator, shape: Shape, dtype: str) -> np.ndarray:
    """Return values whose sums are normal numbers: JAX flushes subnormal ones to zero."""
    kind = dtype_of(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        info = np.iinfo(kind)
        return rng.integers(info.min, info.max, shape, dtype=kind, endpoint=True)
    if dtype == "complex64":
        real, imaginary = values(rng, (2, *shape), "float32")
        return (real + 1j * imaginary).astype(np.complex64)
    magnitude = (1 + rng.random(shape)) * 2.0 ** rng.integers(-3, 3, shape)
    signed = magnitude * rng.choice([-1.0, 1.0], shape)
    return np.where(rng.random(shape) < 0.05, 0.0, signed).astype(kind)


# --- shapes of results, by which the generator draws valid calls -------------------------------


def _size(step: Step, axes: Axes) -> int:
    groups = dict(step.kwargs).get("axis_index_groups")
    if groups:
        return len(groups[0])
    sizes = dict(axes)
    names = step.args[0] if isinstance(step.args[0], tuple) else (step.args[0],)
    return math.prod(sizes[name] for name in names if isinstance(name, str))


def _reduced(shape: Shape, n: int, names: Any, **_: Any) -> Shape | None:
    positions = (
        {name for name in names if isinstance(name, int)} if isinstance(names, tuple) else ()
    )
    if any(position >= len(shape) for position in positions):
        return None
    return tuple(size for axis, size in enumerate(shape) if axis not in positions)


def _gathered(
    shape: Shape, n: int, names: Any, axis: int = 0, tiled: bool = False, **_: Any
) -> Shape | None:
    ndim = len(shape) + (not tiled)
    if not -ndim <= axis < ndim or n * math.prod(shape) > LARGEST:
        return None
    axis %= ndim
    if tiled:
        return (*shape[:axis], shape[axis] * n, *shape[axis + 1 :])
    return (*shape[:axis], n, *shape[axis:])


def _scattered(
    shape: Shape, n: int, names: Any, scatter_dimension: int = 0, tiled: bool = False, **_: Any
) -> Shape | None:
    ndim, axis = len(shape), scatter_dimension
    if not -ndim <= axis < ndim:
        return None
    axis %= ndim
    if shape[axis] % n if tiled else shape[axis] != n:
        return None
    return (*shape[:axis], *((shape[axis] // n,) if tiled else ()), *shape[axis + 1 :])


def _exchanged(
    shape: Shape, n: int, names: Any, split: int, concat: int, tiled: bool = False, **_: Any
) -> Shape | None:
    ndim = len(shape)
    if not (-ndim <= split < ndim and -ndim <= concat < ndim):
        return None
    split, concat = split % ndim, concat % ndim
    if shape[split] % n if tiled else shape[split] != n:
        return None
    out = list(shape)
    if tiled:
        out[split] //= n
        out[concat] *= n
    else:
        del out[split]
        out.insert(concat, n)
    return tuple(out)


def _same(shape: Shape, n: int, *_: Any, **__: Any) -> Shape | None:
    return shape


SHAPES: dict[str, Callable[..., Shape | None]] = {
    "psum": _reduced,
    "pmean": _reduced,
    "pmax": _reduced,
    "pmin": _reduced,
    "pargmax": _same,
    "pargmin": _same,
    "pbroadcast": _same,
    "ppermute": _same,
    "pshuffle": _same,
    "pswapaxes": lambda shape, n, names, axis, **_: _exchanged(shape, n, names, axis, axis),
    "all_gather": _gathered,
    "all_to_all": _exchanged,
    "psum_scatter": _scattered,
}


def _dtype_after(step: Step, dtype: str) -> str:
    if step.function in ("psum", "pmean") and dtype == "bool":
        dtype = "int32"
    if step.function == "pmean" and dtype in INTEGERS:
        return "float64" if dtype.endswith("64") else "float32"
    return "int32" if step.function in ("pargmax", "pargmin") else dtype


def leaves_after(step: Step, leaves: list[Leaf], axes: Axes) -> list[Leaf] | None:
    """Return the leaves after the step, or None if the step is invalid for one of them."""
    if step.function in WHOLE:
        return leaves
    if step.function in LOCAL:
        return [(_local_shape(step, shape), dtype) for shape, dtype in leaves]
    n = _size(step, axes)
    results = []
    for shape, dtype in leaves:
        new = SHAPES[step.function](shape, n, *step.args, **dict(step.kwargs))
        if new is None or not _has_arithmetic(step, dtype):
            return None
        results.append((new, _dtype_after(step, dtype)))
    return results


def _has_arithmetic(step: Step, dtype: str) -> bool:
    if dtype == "complex64":
        return step.function not in EXTREMES  # complex numbers have no order
    if step.function == "psum_scatter":
        return dtype != "bool"
    positions = isinstance(step.args[0], tuple) and any(isinstance(a, int) for a in step.args[0])
    # The order of additions over positional axes is unspecified: integers only.
    return not (positions and step.function == "psum" and dtype in FLOATS)


# --- drawing -----------------------------------------------------------------------------------


def name_choices(axes: Axes) -> list[Any]:
    names = [name for name, _ in axes]
    counts = range(1, len(names) + 1)
    tuples = [some for count in counts for some in itertools.permutations(names, count)]
    return names + tuples


def _even_groups(draw: Callable[..., Any], size: int) -> list[list[int]]:
    members = draw(st.permutations(range(size)))
    per_group = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    return [list(members[k : k + per_group]) for k in range(0, size, per_group)]


def _uneven_groups(draw: Callable[..., Any], size: int) -> list[list[int]]:
    members = list(draw(st.permutations(range(size))))
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else []
    return [members[a:b] for a, b in itertools.pairwise([0, *cuts, size])]


def _permutation_pairs(draw: Callable[..., Any], size: int) -> list[tuple[int, int]]:
    destinations = draw(st.permutations(range(size)))
    pairs = list(enumerate(destinations))
    kept = pairs if draw(st.booleans()) else [p for p in pairs if draw(st.booleans())]
    return list(draw(st.permutations(kept)))


def _extras(draw: Callable[..., Any], size: int, *, uneven: bool) -> list[list[list[int]] | None]:
    choices: list[list[list[int]] | None] = [None, _even_groups(draw, size)]
    return [*choices, _uneven_groups(draw, size)] if uneven else choices


def _calls(draw: Callable[..., Any], function: str, names: Any, size: int, rank: int) -> Iterator:
    """Yield the calls of the function over these names: all axes, groups and tilings."""
    axes_ = range(-rank - 1, rank + 1)
    # JAX divides the sum over an uneven group by the first group's size, so pmean is left out.
    uneven = function in ("psum", "pmax", "pmin")
    groups = _extras(draw, size, uneven=uneven)
    if function in ("psum", "pmean", "pmax", "pmin"):
        yield from ((((names),), {"axis_index_groups": g}) for g in groups)
        if function != "pmean":
            named = names if isinstance(names, tuple) else (names,)
            yield from (((position,), {}) for position in ((0,), (*named, 0), (1, *named)))
    elif function in ("pargmax", "pargmin"):
        yield (names[0] if isinstance(names, tuple) else names,), {}
    elif function == "pbroadcast":
        yield (names, draw(st.integers(0, size - 1))), {}
    elif function == "ppermute":
        yield (names, _permutation_pairs(draw, size)), {}
    elif function == "pshuffle":
        yield (names, list(draw(st.permutations(range(size))))), {}
    elif function == "pswapaxes":
        yield from (((names, a), {"axis_index_groups": g}) for a in axes_ for g in groups)
    elif function == "all_to_all":
        for split, concat, g, tiled in itertools.product(axes_, axes_, groups, (False, True)):
            yield (names, split, concat), {"axis_index_groups": g, "tiled": tiled}
    else:
        keyword = "axis" if function == "all_gather" else "scatter_dimension"
        for a, g, tiled in itertools.product(axes_, groups, (False, True)):
            yield (names,), {keyword: a, "axis_index_groups": g, "tiled": tiled}


def _step(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    given = tuple((key, value) for key, value in kwargs.items() if value not in (None, False))
    return Step(function, args, given)


@st.composite
def _collective(
    draw: Callable[..., Any], function: str, leaves: list[Leaf], axes: Axes
) -> Step | None:
    names = draw(st.sampled_from(name_choices(axes)))
    size = _size(Step("", (names,)), axes)
    rank = max(len(shape) for shape, _ in leaves)
    calls = (_step(function, *call) for call in _calls(draw, function, names, size, rank))
    valid = [call for call in calls if leaves_after(call, leaves, axes) is not None]
    return draw(st.sampled_from(valid)) if valid else None


@st.composite
def _fault(draw: Callable[..., Any], leaves: list[Leaf], axes: Axes) -> Step:
    """Draw a call that JAX rejects with a ValueError or TypeError."""
    names = draw(st.sampled_from(name_choices(axes)))
    size = _size(Step("", (names,)), axes)
    rank = max(len(shape) for shape, _ in leaves)
    named = names if isinstance(names, tuple) else (names,)
    overlapping = [[0] * 2, *([k] for k in range(1, size))]
    dimension = draw(st.integers(0, max(rank - 1, 0)))
    reduction = draw(st.sampled_from(("psum", "pmean", "pmax", "pmin")))
    return draw(
        st.sampled_from(
            (
                Step(reduction, (names,), (("axis_index_groups", overlapping),)),
                Step("pmax", ((*named, rank + 1),)),
                Step("psum", ((*named, 0),), (("axis_index_groups", [list(range(size))]),)),
                Step("all_gather", (names,), (("axis", rank + 1),)),
                Step("all_gather", (names,), (("axis", rank), ("tiled", True))),
                Step("ppermute", (names, [(0, 0), (0, size - 1)])),
                Step("pshuffle", (names, [0, *range(size)])),
                Step("psum_scatter", (names,), (("scatter_dimension", dimension),)),
                Step("psum_scatter", (names,), (("scatter_dimension", dimension), ("tiled", True))),
                Step("all_to_all", (names, dimension, 0)),
                Step("all_to_all", (names, dimension, 0), (("tiled", True),)),
                Step("pswapaxes", (names, dimension)),
                Step("pargmax", (named,)),
            )
        )
    )


def _tree(draw: Callable[..., Any], leaves: list[Leaf]) -> Any:
    first, *rest = leaves
    if not rest:
        return draw(st.sampled_from((first, [first], {"a": first, "b": None})))
    if len(rest) == 1:
        return draw(st.sampled_from((leaves, tuple(leaves), {"w": first, "b": rest})))
    nested = (first, {"u": rest[0], "v": tuple(rest[1:])})
    return draw(st.sampled_from((nested, dict(zip("cab", leaves, strict=True)))))


def _leaves(draw: Callable[..., Any], sizes: list[int]) -> list[Leaf]:
    """Draw one to three leaves of any dtypes; their shapes are equal, or have one axis more."""
    n = math.prod(sizes)
    dimensions = st.sampled_from(sorted({0, 1, 2, 3, n, 2 * n, *sizes}))
    shape = tuple(draw(st.lists(dimensions, max_size=3)))
    count = draw(st.sampled_from((1, 1, 1, 2, 3)))
    more = [(2,) if draw(st.integers(0, 3)) == 0 else () for _ in range(count)]
    while 2 * math.prod(shape) > LARGEST:
        shape = shape[1:]
    return [(shape + axis, draw(st.sampled_from(DTYPES))) for axis in more]


def _local(draw: Callable[..., Any], leaves: list[Leaf], axes: Axes) -> Step | None:
    function = draw(st.sampled_from(sorted(LOCAL)))
    names = (draw(st.sampled_from(name_choices(axes))),) if function == "on_even" else ()
    step = Step(function, names)
    after = leaves_after(step, leaves, axes) or []
    return None if any(math.prod(shape) > LARGEST for shape, _ in after) else step


def _steps(
    draw: Callable[..., Any], first: tuple[str, ...], leaves: list[Leaf], axes: Axes, faults: bool
) -> Iterator[Step]:
    functions, averaged = list(first), False
    for _ in range(draw(st.integers(1, 4))):
        function = draw(st.sampled_from(functions))
        local = _local(draw, leaves, axes) if draw(st.booleans()) else None
        if local is not None:
            leaves = leaves_after(local, leaves, axes) or leaves
            yield local
        collective = draw(_collective(function, leaves, axes))
        if collective is not None:
            leaves = leaves_after(collective, leaves, axes) or leaves
            yield collective
        # After a mean the last bits differ from JAX's: only rearrangements may follow.
        averaged = averaged or function == "pmean"
        functions = [f for f in SHAPES if not (averaged and f in (*SUMS, *EXTREMES))]
    ending = draw(st.integers(0, 9))
    if faults and ending == 9:
        yield draw(_fault(leaves, axes))
    elif ending > 5:
        whole = draw(st.sampled_from(sorted(WHOLE)))
        yield Step(whole, (draw(st.sampled_from(name_choices(axes))),))


@st.composite
def programs(
    draw: Callable[..., Any],
    first: tuple[str, ...] = tuple(SHAPES),
    *,
    axes: tuple[Axes, ...] = AXES,
    faults: bool = True,
) -> Program:
    """Draw one to four collectives with local steps between them; the first is one of `first`.

    With `faults` some programs end in an invalid call.
    """
    axes_ = draw(st.sampled_from(axes))
    leaves = _leaves(draw, [size for _, size in axes_])
    tree = _tree(draw, leaves)
    # An unmapped leaf is the same on all replicas; one leaf at least is mapped.
    flags = [True] + [draw(st.integers(0, 3)) > 0 for _ in leaves[1:]]
    mapped = optree.tree_unflatten(optree.tree_structure(tree, is_leaf=is_leaf), flags)
    steps = tuple(_steps(draw, first, leaves, axes_, faults))
    return Program(axes_, tree, mapped, steps, draw(st.integers(0, 2**32 - 1)))


class Body:
    """A function of (lax, x) with the interface of `Program`; its argument is an array of zeros."""

    has_groups = has_mean = False

    def __init__(self, body: Callable[[Any, Any], Any], axes: Axes, mapped: Any = True) -> None:
        self.body, self.axes, self.mapped = body, axes, mapped
        self.sizes = tuple(size for _, size in axes)

    def __call__(self, dialect: Any, tree: Any) -> Any:
        return self.body(dialect.lax, tree)

    def argument(self) -> np.ndarray:
        return np.zeros((*self.sizes, 2), np.float32)


# --- running -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The results of a run, or the exception that it raised."""

    results: Any = None
    error: BaseException | None = None


def outcome(run: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(results=run())
    except Exception as error:
        return Outcome(error=error)


def _dialect() -> SimpleNamespace:
    from gpusim import lax

    return SimpleNamespace(lax=lax, xp=np, tree_map=optree.tree_map)


def nest(maps: tuple[Callable[..., Any], ...]) -> Callable[[Any, Any], Any]:
    """Return a function that runs a program with one map for each of its axes, outermost first."""

    def run(program: Program | Body, x: Any) -> Any:
        dialect = _dialect()
        in_axes = optree.tree_map(lambda mapped: 0 if mapped else None, program.mapped)

        def body(tree: Any) -> Any:
            return program(dialect, tree)

        mapped_body = body
        for map_, (name, _) in zip(reversed(maps), reversed(program.axes), strict=True):
            mapped_body = map_(mapped_body, axis_name=name, in_axes=(in_axes,))
        return mapped_body(x)

    return run


def sharded(program: Program | Body, x: Any) -> Any:
    """Run a program on a mesh, with one replica for each shard."""
    import gpusim

    dialect = _dialect()
    names, lead = tuple(name for name, _ in program.axes), tuple(range(len(program.axes)))
    mesh = gpusim.Mesh(program.sizes, names)

    def shard(tree: Any) -> Any:
        own = optree.tree_map(
            lambda leaf, mapped: leaf.reshape(leaf.shape[len(lead) :]) if mapped else leaf,
            tree,
            program.mapped,
        )
        results = program(dialect, own)
        return optree.tree_map(lambda leaf: np.expand_dims(leaf, lead), results)

    specs = optree.tree_map(
        lambda mapped: gpusim.P(*names) if mapped else gpusim.P(), program.mapped
    )
    return gpusim.shard_map(shard, mesh=mesh, in_specs=(specs,), out_specs=gpusim.P(*names))(x)


def _vmap(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    import gpusim

    return gpusim.vmap(f, **options)


def _pmap(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    import gpusim

    return gpusim.pmap(f, **options)


def _pmap_one(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    import gpusim

    return gpusim.pmap(f, schedule="one", **options)


MAPS = {"vmap": _vmap, "pmap": _pmap, "pmap-one": _pmap_one}


def executors(
    program: Program | Body, *, mixed: bool = True
) -> dict[str, Callable[[Any, Any], Any]]:
    """Return every way to run the program in gpusim, by name: nested maps, and shard_map."""
    found = {
        " of ".join(names): nest(tuple(MAPS[name] for name in names))
        for names in itertools.product(MAPS, repeat=len(program.axes))
        if mixed or len(set(names)) == 1
    }
    return {**found, "shard_map": sharded}


# --- comparing ---------------------------------------------------------------------------------


def assert_same_form(ours: Any, theirs: Any, who: str) -> None:
    """Assert that the trees, shapes and dtypes are equal."""
    assert optree.tree_structure(ours) == optree.tree_structure(theirs), who
    forms = [
        [(leaf.shape, leaf.dtype.name) for leaf in optree.tree_leaves(tree)]
        for tree in (ours, theirs)
    ]
    assert forms[0] == forms[1], f"{who}: {forms[0]} instead of {forms[1]}"


def assert_same_values(ours: Any, theirs: Any, who: str) -> None:
    """Assert that the values are equal: all bits, except signs of zeros and NaNs."""
    assert_same_form(ours, theirs, who)
    for mine, other in zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True):
        np.testing.assert_array_equal(mine, other, err_msg=who)


def assert_same_bits(ours: Any, theirs: Any, who: str) -> None:
    """Assert that the bits are equal, signs of zeros included; all NaNs are equal."""
    assert_same_values(ours, theirs, who)
    for mine, other in zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True):
        if np.issubdtype(mine.dtype, np.inexact) or mine.dtype == ml_dtypes.bfloat16:
            for part in ("real", "imag"):
                mine_sign = np.signbit(_part(mine, part))
                np.testing.assert_array_equal(
                    mine_sign & ~np.isnan(mine), np.signbit(_part(other, part)) & ~np.isnan(other)
                )


def _part(array: np.ndarray, part: str) -> np.ndarray:
    return getattr(array, part) if array.dtype.kind == "c" else array


def assert_near(ours: Any, theirs: Any, who: str) -> None:
    """Assert that all but the last two bits are equal: JAX's mean multiplies by a rounded 1/R."""
    assert_same_form(ours, theirs, who)
    for mine, other in zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True):
        if mine.dtype.kind in "biu":
            np.testing.assert_array_equal(mine, other, err_msg=who)
            continue
        tolerance = 4 * float(ml_dtypes.finfo(mine.dtype).eps)
        wide = np.complex128 if mine.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(
            mine.astype(wide), other.astype(wide), rtol=tolerance, atol=0, err_msg=who
        )
