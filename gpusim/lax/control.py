"""JAX's structured control flow, on plain arrays and inside every map.

A predicate that is the same on all replicas chooses in Python: only the branch taken runs. Where it
differs between the replicas of a vmap or shard_map, both branches run on all replicas and each
replica keeps its own result; a loop runs until every replica has finished, and those that have
keep their values. Under pmap each replica decides for itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any

import numpy as np

from .. import trees
from ..collectives import pmax
from ..libraries import (
    call_on_bits,
    copy_array,
    lacks_kernels,
    on_device,
    owner,
    to_library_of,
    zeros_like,
)
from ..maps.arguments import PYTHON_SCALARS, as_array
from ..maps.axis_environment import (
    Axes,
    axis_environment,
    diverging,
    diverging_where,
    resolve,
)
from ..maps.bind import bind
from ..maps.mapped_array.align import common_axes, visible_shape
from ..maps.mapped_array.array import MappedArray, lift, read_only, unpack, wrap
from ..maps.mapped_array.memory import writes_so_far
from ..maps.records import NOBODY, called_by

MISSING: Any = object()
"""The default of an argument that may be anything, None included."""


def select(pred: Any, on_true: Any, on_false: Any) -> Any:
    """The elements of `on_true` where `pred` holds, those of `on_false` elsewhere.

    Nothing is broadcast or promoted; np.where does both.

    **Arguments**:

    - `pred`: a bool or an integer, a scalar or of the shape of the cases.
    - `on_true`, `on_false`: arrays of one shape and dtype.

    **Returns**: a new array of that shape and dtype.

    **Raises**: TypeError: if shapes or dtypes do not fit.

    >>> import numpy as np
    >>> from gpusim import lax
    >>> lax.select(np.array([True, False]), np.array([1, 2]), np.array([3, 4]))
    array([1, 4])
    """
    pred = as_array(pred, "select's pred")
    if pred.dtype.kind not in "biu":
        raise TypeError(f"select's pred must be bool or integer, but got {_type_of(pred)}")
    cases = [
        as_array(on_true, "select's on_true"),
        as_array(on_false, "select's on_false"),
    ]
    if cases[0].shape != cases[1].shape or cases[0].dtype != cases[1].dtype:
        raise TypeError(
            "select's cases must have one shape and dtype, but got "
            f"{_type_of(cases[0])} and {_type_of(cases[1])} (np.where broadcasts and promotes)"
        )
    if pred.shape not in ((), cases[0].shape):
        raise TypeError(
            f"select's pred must be a scalar or have the cases' shape {cases[0].shape}, but has "
            f"shape {pred.shape}"
        )
    return _where(pred.astype(bool), *cases)


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    operand: Any = MISSING,
) -> Any:
    """``true_fun(*operands)`` where `pred` holds, ``false_fun(*operands)`` elsewhere.

    If `pred` differs between replicas of a vmap or shard_map, both functions run on all replicas
    and each replica keeps the result of its own, as in JAX. Collectives in them are then computed
    from all replicas, also from those that discard the result. On the devices of a shard_map such
    a collective would wait for ever, if `pred` differs along its axis: it is refused.

    **Arguments**:

    - `pred`: a scalar, bool or number.
    - `true_fun`, `false_fun`: functions of the operands that return trees of one structure, with
      arrays of the same shapes and dtypes. They have no side
      effects, except writes into mapped arrays.
    - `operands`: pytrees.
    - `operand`: one operand, by keyword.

    **Returns**: the tree; its arrays are read-only.

    **Raises**:

    - TypeError: if `pred` is not a scalar, or the results of both functions, where both run,
      differ in structure, shape or dtype.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> f = lambda x: lax.cond(x > 0, lambda x: 2 * x, lambda x: 0 * x, x)
    >>> gpusim.vmap(f)(np.array([-1.0, 3.0]))
    array([-0.,  6.])
    """
    if operand is not MISSING:
        if operands:
            raise TypeError("cond takes operands by position or operand= by keyword, not both")
        operands = (operand,)
    if not (callable(true_fun) and callable(false_fun)):
        raise TypeError("cond's true_fun and false_fun must be callable")
    pred = _scalar(pred, "cond's pred", "biufc")
    holds = pred != 0
    operands = _enter_all(operands)
    if not _differs(holds):
        return _leave(true_fun(*operands) if holds else false_fun(*operands), "cond's result")
    return _select_result(
        [(holds, "true_fun", true_fun), (True, "false_fun", false_fun)], operands, "cond"
    )


def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    operand: Any = MISSING,
) -> Any:
    """``branches[index](*operands)``, with `index` clamped to the branches.

    If `index` differs between replicas of a vmap or shard_map, all branches run; see `cond`.

    **Arguments**:

    - `index`: an integer scalar.
    - `branches`: functions as in `cond`.
    - `operands`, `operand`: as in `cond`.

    **Returns**: the branch's tree; its arrays are read-only.

    **Raises**:

    - TypeError: if `index` is not an integer scalar, and as `cond`.
    - ValueError: if there are no branches.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> branches = [lambda x: x, lambda x: -x, lambda x: 10 * x]
    >>> f = lambda i, x: lax.switch(i, branches, x)
    >>> gpusim.vmap(f, in_axes=(0, None))(np.array([-1, 1, 5]), 7.0)
    array([ 7., -7., 70.])
    """
    if operand is not MISSING:
        if operands:
            raise TypeError("switch takes operands by position or operand= by keyword, not both")
        operands = (operand,)
    if not all(callable(branch) for branch in branches):
        raise TypeError("switch's branches must be callable")
    if not len(branches):
        raise ValueError("switch needs at least one branch")
    index = _scalar(index, "switch's index", "iu")
    operands = _enter_all(operands)
    last = len(branches) - 1
    if not _differs(index):
        chosen = branches[min(max(int(index), 0), last)]
        return _leave(chosen(*operands), "switch's result")
    if not last:
        return _leave(branches[0](*operands), "switch's result")
    cases = [
        (index <= number if number < last else True, f"branch {number}", branch)
        for number, branch in enumerate(branches)
    ]
    return _select_result(cases, operands, "switch")


def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any
) -> Any:
    """The first of `init_val`, ``body_fun(init_val)``, ... for which `cond_fun` does not hold.

    If `cond_fun` differs between replicas of a vmap or shard_map, the loop runs until it holds
    nowhere, and a replica that has finished keeps its value, as in JAX. `body_fun` still sees the
    values of finished replicas: its collectives take them, and an index that is in range only while
    `cond_fun` holds is an IndexError (`dynamic_index_in_dim` clamps it). On the devices of a
    shard_map a collective would wait for ever, if `cond_fun` differs along its axis: it is
    refused.

    **Arguments**:

    - `cond_fun`: a function of the carry that returns a bool scalar.
    - `body_fun`: a function of the carry that returns the next one. It has no side effects,
      except writes into mapped arrays.
    - `init_val`: the first carry, a pytree of arrays and numbers. A Python number takes the dtype
      that `body_fun` gives it.

    **Returns**: the last carry; its arrays are read-only, as they are in `body_fun`.

    **Raises**:

    - TypeError: if the carry changes its structure, a shape or a dtype, or `cond_fun` does not
      return a bool scalar.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> halve = lambda x: lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)
    >>> gpusim.vmap(halve)(np.array([8.0, 0.3, 5.0]))
    array([1.   , 0.3  , 0.625])
    """
    if not (callable(cond_fun) and callable(body_fun)):
        raise TypeError("while_loop's cond_fun and body_fun must be callable")
    return _while(cond_fun, body_fun, _carry(init_val, "while_loop"), "while_loop")


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """The carry after ``val = body_fun(i, val)`` for i from `lower` to `upper` - 1.

    `i` is a Python int, which promotes nothing, as in JAX. Bounds may differ between replicas: `i`
    then is a MappedArray, and the loop a `while_loop`.

    **Arguments**:

    - `lower`, `upper`: integer scalars.
    - `body_fun`: a function of `i` and the carry that returns the next carry.
    - `init_val`: the first carry, as in `while_loop`.
    - `unroll`: accepted as in JAX; nothing is compiled here, and it changes nothing.

    **Returns**: the last carry; its arrays are read-only, as they are in `body_fun`.

    **Raises**: TypeError: if a bound is not an integer scalar, the bounds' dtypes differ, or the
    carry changes its structure, a shape or a dtype.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> power = lambda x, n: lax.fori_loop(0, n, lambda i, y: y * x, 1.0)
    >>> power(3.0, 4)
    81.0
    >>> gpusim.vmap(power)(np.array([2.0, 3.0]), np.array([5, 2]))
    array([32.,  9.])
    """
    if not callable(body_fun):
        raise TypeError("fori_loop's body_fun must be callable")
    _check_unroll(unroll, "fori_loop")
    first, end = (
        _scalar(bound, f"fori_loop's {name}", "iu")
        for name, bound in (("lower", lower), ("upper", upper))
    )
    dtypes = {b.dtype for b in (first, end) if not isinstance(b, int)}
    if len(dtypes) > 1:
        raise TypeError(
            f"fori_loop's lower and upper must have one dtype, but got {first.dtype} and "
            f"{end.dtype}"
        )
    carry = _carry(init_val, "fori_loop")
    if not (_differs(first) or _differs(end)):
        for i in range(int(first), int(end)):
            carry = _next(carry, body_fun(i, carry), "fori_loop")
        return _leave(carry, "fori_loop's result")
    (dtype,) = dtypes
    start = np.zeros_like(end if isinstance(end, MappedArray) else first) + first
    start = start.astype(dtype, copy=False)
    _, carry = _while(
        lambda state: state[0] < end,
        lambda state: (state[0] + 1, body_fun(*state)),
        (start, carry),
        "fori_loop",
    )
    return carry


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """``carry, y = f(carry, x)`` for each x along the leading axis of `xs`, the ys stacked.

    **Arguments**:

    - `f`: a function of the carry and one x that returns the next carry and a y, both pytrees.
    - `init`: the first carry, as in `while_loop`.
    - `xs`: a pytree of arrays with one leading length, or None.
    - `length`: the number of steps, needed if `xs` has no leaves.
    - `reverse`: go from the last x to the first; ys keep the order of xs.
    - `unroll`: accepted as in JAX; nothing is compiled here, and it changes nothing.

    **Returns**: the last carry, whose arrays are read-only as they are in `f`, and the stacked ys.
    Without steps, `f` runs once on zeros, to learn the shapes of the ys.

    **Raises**:

    - ValueError: if lengths differ, or there is none.
    - TypeError: if `f` does not return a pair, or the carry changes its structure, a shape or a
      dtype.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> cumsum = lambda x: lax.scan(lambda total, x: (total + x, total + x), 0.0, x)[1]
    >>> gpusim.vmap(cumsum)(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    array([[ 1.,  3.,  6.],
           [ 4.,  9., 15.]])
    """
    if not callable(f):
        raise TypeError("scan's f must be callable")
    _check_unroll(unroll, "scan")
    leaves, structure = trees.flatten(xs)
    arrays = [as_array(leaf, "a leaf of scan's xs") for leaf in leaves]
    steps = _steps(arrays, length)
    carry = _carry(init, "scan")
    rows: list[Any] = [None] * steps
    arrays = [_enter(array) for array in arrays]

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        result = f(carry, x)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise TypeError(
                f"scan's f must return a pair (carry, y), but returned {trees.flatten(result)[1]}"
            )
        return _next(carry, result[0], "scan"), result[1]

    for i in range(steps - 1, -1, -1) if reverse else range(steps):
        x = trees.unflatten(structure, [array[i] for array in arrays])
        carry, rows[i] = step(carry, x)
    if rows:
        return _leave(carry, "scan's result"), _stack(rows)
    zeros = [_enter(zeros_like(unpack(array)[0], array.shape[1:])) for array in arrays]
    with np.errstate(all="ignore"):
        _, y = step(carry, trees.unflatten(structure, zeros))
    empty = trees.map(lambda leaf: leaf[:0], _stack([y]))
    return _leave(carry, "scan's result"), empty


def map(f: Callable[[Any], Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """``f(x)`` for each x along the leading axis of `xs`, one after the other, the results stacked.

    **Arguments**:

    - `f`: a function of a pytree that returns a pytree.
    - `xs`: a pytree of arrays with one leading length.
    - `batch_size`: accepted as in JAX; it changes nothing.

    **Returns**: the stacked results.

    **Raises**: ValueError: if lengths differ, or `xs` has no leaves.

    >>> import numpy as np
    >>> from gpusim import lax
    >>> lax.map(lambda x: x @ x, np.array([[1, 2], [3, 4]]))
    array([ 5, 25])
    """
    return scan(lambda carry, x: (carry, f(x)), (), xs)[1]


# Values


def _differs(value: Any) -> bool:
    """Whether a value may differ between the replicas of a lockstep axis."""
    return bool(unpack(value)[1])


def _enter(leaf: Any) -> Any:
    """A leaf as the function sees it, as a map's arguments: read-only, a MappedArray in vmap.

    0-d arrays become scalars, which do not change in place, under every map.
    """
    data, axes = unpack(leaf)
    if isinstance(leaf, MappedArray):
        return wrap(read_only(data), axes)
    if isinstance(data, np.ndarray) or on_device(data):
        data = lift(read_only(data))
        return data[()] if isinstance(data, np.ndarray) and data.ndim == 0 else data
    return leaf


def _enter_all(tree: Any) -> Any:
    return trees.map(_enter, tree)


def _carry(tree: Any, what: str) -> Any:
    leaves, structure = trees.flatten(tree)
    for number, leaf in enumerate(leaves):
        as_array(leaf, f"{what}: leaf {number} of the first carry")  # a TypeError
    return trees.unflatten(structure, [_keep(leaf) for leaf in leaves])


def _leave(tree: Any, what: str) -> Any:
    """Results, read-only under every map, which later writes into operands do not change."""
    leaves, structure = trees.flatten(tree)
    for leaf in leaves:
        as_array(leaf, f"a leaf of {what}")  # a TypeError
    return trees.unflatten(structure, [_keep(leaf) for leaf in leaves])


def _keep(leaf: Any) -> Any:
    """`_enter(leaf)`, in memory that is not written: a copy if it is writable."""
    data, axes = unpack(leaf)
    if on_device(data) or (isinstance(data, np.ndarray) and owner(data).flags.writeable):
        data = copy_array(data, "K")
        if isinstance(data, np.ndarray):
            data.flags.writeable = False
        leaf = wrap(data, axes) if isinstance(leaf, MappedArray) else data
    return _enter(leaf)


def _scalar(value: Any, what: str, kinds: str) -> Any:
    """A Python int, float or bool, a NumPy scalar or a MappedArray without axes.

    Values that are the same on all replicas are not MappedArrays.
    """
    if isinstance(value, MappedArray) and not _differs(value):
        value = unpack(value)[0]
    array = as_array(value, what)
    if array.shape:
        raise TypeError(f"{what} must be a scalar, but has shape {array.shape}")
    if array.dtype.kind not in kinds:
        needed = "an integer" if kinds == "iu" else "a bool" if kinds == "b" else "a number"
        raise TypeError(f"{what} must be {needed}, but got {array.dtype}")
    if isinstance(value, (MappedArray, *PYTHON_SCALARS)):
        return value
    return array[()]


def _type_of(value: Any) -> str:
    array = as_array(value, "a value")
    return f"{array.dtype}[{','.join(str(length) for length in array.shape)}]"


def _is_weak(leaf: Any) -> bool:
    """Whether a leaf is a Python number, whose dtype gives way to that of an array."""
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, (bool, np.generic))


def _common_dtype(first: Any, second: Any) -> np.dtype[Any] | None:
    """The dtype of two leaves, of which Python numbers give way; None if types do not fit."""
    if visible_shape(first) != visible_shape(second):
        return None
    a, b = (
        leaf if _is_weak(leaf) else as_array(leaf, "a result").dtype for leaf in (first, second)
    )
    dtype = np.result_type(a, b)
    strong = {leaf for leaf in (a, b) if isinstance(leaf, np.dtype)}
    return dtype if strong <= {dtype} else None


def _as_dtype(leaf: Any, dtype: np.dtype[Any]) -> Any:
    return leaf if not _is_weak(leaf) else lift(np.asarray(leaf, dtype))


def _where(choice: Any, first: Any, second: Any) -> Any:
    """np.where of arrays of one dtype, of any that a GPU's library holds."""
    dtype = first.dtype
    if lacks_kernels(dtype) and any(on_device(unpack(x)[0]) for x in (first, second)):
        bits = np.dtype(f"u{dtype.itemsize}")
        return np.where(choice, first.view(bits), second.view(bits)).view(dtype)
    return np.where(choice, first, second)


def _next(carry: Any, following: Any, what: str, running: Any = True) -> Any:
    """The following carry: where a replica still runs, what the body returned for it.

    **Raises**: TypeError: if the two differ in structure, shape or dtype.
    """
    before, structure = trees.flatten(carry)
    after, found = trees.flatten(following)
    if structure != found:
        raise TypeError(
            f"{what}: the carry must keep its structure, but the body took {structure} and "
            f"returned {found}"
        )
    leaves = []
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        dtype = _common_dtype(old, new)
        if dtype is None or (_is_weak(new) and np.asarray(new).dtype.kind != dtype.kind):
            which = f" (leaf {number} of {structure})" if len(before) > 1 else ""
            raise TypeError(
                f"{what}: the carry must keep its types, but the body took {_type_of(old)} and "
                f"returned {_type_of(new)}{which}; convert what the body returns (astype), or the "
                "first carry"
            )
        if running is not True:
            new = _where(running, *(as_array(_as_dtype(leaf, dtype), what) for leaf in (new, old)))
        elif not (_is_weak(old) and _is_weak(new)):
            new = _as_dtype(new, dtype)
        leaves.append(_enter(new))
    return trees.unflatten(structure, leaves)


def _while(
    cond_fun: Callable[..., Any], body_fun: Callable[..., Any], carry: Any, what: str
) -> Any:
    running: Any = True
    axes: Axes = ()
    around, before = diverging_where(), writes_so_far()
    while True:
        with _diverged(axes, running):
            holds = _holds(cond_fun(carry))
        if axes or _differs(holds):
            running = holds if running is True else running & holds
            axes = unpack(running)[1]
            # Replicas that discard the loop also keep what it writes: they may never end.
            wrote = around is not None and writes_so_far() != before
            if not _anywhere(running & around if wrote else running):
                return _leave(carry, f"{what}'s result")
        elif not holds:
            return _leave(carry, f"{what}'s result")
        with _diverged(axes, running):
            carry = _next(carry, body_fun(carry), what, running)


def _holds(value: Any) -> Any:
    leaves, structure = trees.flatten(value)
    if len(leaves) != 1 or leaves[0] is not value:
        raise TypeError(
            f"while_loop's cond_fun must return a bool scalar, but returned {structure}"
        )
    return _scalar(value, "what while_loop's cond_fun returns", "b")


def _anywhere(running: Any) -> bool:
    """Whether a value holds on any replica, on all instances."""
    data, axes = unpack(running)
    answer: Any = bool(data.any())
    for entry in axes:
        # An axis that no name reaches has no collectives in which instances could meet.
        named = any(entry.name == e.name for e in axis_environment() if entry.name is not None)
        if entry.sharding is not None and named and resolve(entry.name) is entry:
            here = wrap(np.full(entry.size, answer), (entry,))
            with called_by(NOBODY):
                answer = bool(bind(pmax.call(here, entry.name)))
    return bool(answer)


def _diverged(axes: Axes, where: Any) -> Any:
    """A block for code that runs on all replicas, also on those for which `where` does not hold:
    they make no warnings, and write nothing in place."""
    return _Diverged(axes, where) if axes else nullcontext()


class _Diverged:
    def __init__(self, axes: Axes, where: Any) -> None:
        self.blocks = diverging(axes, where), np.errstate(all="ignore")

    def __enter__(self) -> None:
        for block in self.blocks:
            block.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for block in reversed(self.blocks):
            block.__exit__(*exception)


def _select_result(
    cases: Sequence[tuple[Any, str, Callable[..., Any]]], operands: Any, what: str
) -> Any:
    """The results of all functions, of which each replica keeps the first whose choice holds."""
    axes = common_axes(choice for choice, _, _ in cases)
    results = []
    rest: Any = True  # the replicas whose function is one of those that follow
    for choice, _, function in cases:
        with _diverged(axes, choice & rest):
            results.append(trees.flatten(function(*operands)))
        rest = rest & np.logical_not(choice)
    (_, first, _), structure = cases[0], results[0][1]
    for (_, name, _), (_, other) in zip(cases, results, strict=True):
        if other != structure:
            raise TypeError(
                f"{what}: {first} and {name} must return the same structure, but returned "
                f"{structure} and {other}"
            )
    columns = zip(*(leaves for leaves, _ in results), strict=True)
    names = [name for _, name, _ in cases]
    choices = [choice for choice, _, _ in cases]
    found = []
    for column in columns:
        arrays = _alike(column, names, what)
        found.append(
            reduce(
                lambda rest, case: _where(case[0], case[1], rest),
                zip(reversed(choices[:-1]), reversed(arrays[:-1]), strict=True),
                arrays[-1],
            )
        )
    return _enter_all(trees.unflatten(structure, found))


def _alike(column: Sequence[Any], names: Sequence[str], what: str) -> list[Any]:
    """One leaf of all branches as arrays of one shape and dtype."""
    strong = next((leaf for leaf in column if not _is_weak(leaf)), None)
    like = sum(column) if strong is None else strong
    arrays = []
    for leaf in column:
        dtype = _common_dtype(like, leaf)
        if dtype is None:
            shown = ", ".join(
                f"{name} {_type_of(leaf)}" for name, leaf in zip(names, column, strict=True)
            )
            raise TypeError(f"{what}: the functions must return the same types, but got {shown}")
        arrays.append(as_array(_as_dtype(leaf, dtype), what))
    return arrays


# Scan


def _check_unroll(unroll: Any, what: str) -> None:
    if unroll is not None and not isinstance(unroll, bool) and operator.index(unroll) < 1:
        raise ValueError(f"{what}'s unroll must be a positive int or a bool, but got {unroll!r}")


def _steps(arrays: list[Any], length: int | None) -> int:
    lengths = set()
    for array in arrays:
        if not array.shape:
            raise ValueError("scan's xs must have a leading axis, but a leaf is a scalar")
        lengths.add(array.shape[0])
    if len(lengths) > 1:
        raise ValueError(f"scan's xs have different leading lengths: {sorted(lengths)}")
    if length is None:
        if not lengths:
            raise ValueError("scan needs length=, as its xs have no arrays")
        return int(lengths.pop())
    steps = operator.index(length)
    if lengths and lengths != {steps}:
        raise ValueError(f"scan's length is {steps}, but its xs have length {lengths.pop()}")
    if steps < 0:
        raise ValueError(f"scan's length must not be negative, but is {steps}")
    return steps


def _stack(rows: list[Any]) -> Any:
    """The ys of all steps, each leaf stacked along a new leading axis."""
    first, structure = trees.flatten(rows[0])
    columns: list[list[Any]] = [[] for _ in first]
    for row in rows:
        leaves, found = trees.flatten(row)
        if found != structure:
            raise TypeError(
                f"scan's ys must have one structure, but steps gave {structure} and {found}"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    return trees.unflatten(structure, [_stack_column(column) for column in columns])


def _stack_column(column: list[Any]) -> Any:
    """One leaf of all steps; a Python number takes the dtype of the arrays beside it."""
    like = next((leaf for leaf in column if not _is_weak(leaf)), column[0])
    arrays = []
    for leaf in column:
        dtype = _common_dtype(like, leaf)
        if dtype is None:
            raise TypeError(
                f"scan's ys must have one type, but steps gave {_type_of(like)} and "
                f"{_type_of(leaf)}"
            )
        arrays.append(as_array(_as_dtype(leaf, dtype), "a leaf of scan's ys"))
    gpus = (array for array in (unpack(array)[0] for array in arrays) if on_device(array))
    if (on_a_gpu := next(gpus, None)) is not None:
        arrays = [
            array if on_device(unpack(array)[0]) else to_library_of(on_a_gpu, unpack(array)[0])
            for array in arrays
        ]
    if any(isinstance(array, MappedArray) for array in arrays):
        return np.stack(arrays)
    return lift(call_on_bits(np.stack, arrays))
