"""JAX's parallel collectives, by their JAX names, inside vmap, pmap and shard_map.

Every function takes values inside a map and the name of a mapped axis (or a tuple of names,
row-major in the tuple's order). What each collective computes is defined in `gpusim.collectives`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from . import collectives, trees
from .collectives import LinearCollective
from .groups import Groups
from .maps import binding
from .maps.binding import Collective, bind
from .reduction import Reduction

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pargmax",
    "pargmin",
    "pbroadcast",
    "pgather",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "ragged_all_to_all",
]

AxisName = Hashable
AxisIndexGroups = Sequence[Sequence[int]] | None


def _groups(axis_name: AxisName, groups: AxisIndexGroups, *, uneven: bool = False) -> Groups | None:
    """The axis_index_groups argument as a partition of the replicas along the axes.

    Raises:
        ValueError: when it is no partition of them, or with positional axes.
    """
    if groups is None:
        return None
    if any(binding.is_positional(name) for name in binding.split_names(axis_name)):
        raise ValueError(
            f"axis_index_groups is for named axes only, but axis_name is {axis_name!r}; "
            "leave one of them out"
        )
    return Groups.from_axis_index_groups(groups, binding.axis_size(axis_name), uneven=uneven)


def _each_leaf(collective: Collective, tree: Any, axis_name: AxisName) -> Any:
    """Run a collective of one operand on each leaf of a tree."""
    leaves, structure = trees.flatten(tree)
    results = bind(collective, [(leaf,) for leaf in leaves], axis_name, structure)
    return trees.unflatten(structure, [result for (result,) in results])


def _named_only(name: str, axis_name: AxisName) -> AxisName:
    if any(binding.is_positional(part) for part in binding.split_names(axis_name)):
        raise ValueError(f"{name} works over named axes only, but axis_name is {axis_name!r}")
    return axis_name


# Folds.


def _fold(
    name: str,
    definition: Callable[..., Any],
    x: Any,
    axis_name: AxisName,
    groups: Groups | None,
    reduction: Reduction | None,
    scalar: Callable[[Any, int], Any],
    identity: Callable[[np.dtype[Any]], Any] | None = None,
) -> Any:
    if reduction is not None and not isinstance(reduction, Reduction):
        raise TypeError(
            f"{name} reduction must be a gpusim.Reduction or None, but got {reduction!r}"
        )
    options = {"groups": groups, "reduction": reduction}
    collective = Collective(name, definition, (), options, True, scalar, identity)
    return _each_leaf(collective, x, axis_name)


@LinearCollective
def psum(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    reduction: Reduction | None = None,
) -> Any:
    """The sum over the replicas, on every replica.

    Args:
        x: a pytree of arrays of any shape and dtype. bool is summed as int32; integers wrap. Of a
            Python number that is the same everywhere the result is size times the number.
        axis_name: a mapped axis, or a tuple of them; integers (from 0) are axes of ``x`` itself.
        axis_index_groups: lists of replica indices, each index once; sums within each group.
        reduction: order, accumulator and rounding; None is that of the `gpusim.reduction` context.

    Returns:
        The sums, in the shapes and dtypes of ``x`` (without its positional axes).

    Raises:
        NameError: for an axis that is not bound.
        ValueError: for groups that are no partition, or a name that comes twice.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.array([1, 2, 3, 4])
        >>> gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)
        array([10, 10, 10, 10])
        >>> pairs = [[0, 3], [1, 2]]
        >>> gpusim.vmap(lambda x: x * lax.psum(x, "i", axis_index_groups=pairs), axis_name="i")(x)
        array([ 5, 10, 15, 20])
    """
    groups = _groups(axis_name, axis_index_groups, uneven=True)
    return _fold(
        "psum", collectives.psum, x, axis_name, groups, reduction, operator.mul, lambda dtype: 0
    )


psum.transpose = psum


@LinearCollective
def pmean(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    reduction: Reduction | None = None,
) -> Any:
    """The mean over the replicas, on every replica: the sum, divided by the group's size.

    The division is done before the last rounding, in the computing type. Integers and bool are
    summed first and give float32 (64-bit integers float64).

    Args, errors: as `psum`, but for positional axes, which are a ValueError.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> gpusim.vmap(lambda x: x - lax.pmean(x, "i"), axis_name="i")(np.array([1.0, 2.0, 6.0]))
        array([-2., -1.,  3.])
    """
    _named_only("pmean", axis_name)
    groups = _groups(axis_name, axis_index_groups, uneven=True)
    return _fold("pmean", collectives.pmean, x, axis_name, groups, reduction, _mean_of_equal)


def _mean_of_equal(value: Any, size: int) -> Any:
    return value * size / size


pmean.transpose = pmean


def _same(value: Any, size: int) -> Any:
    return value


def _lowest(dtype: np.dtype[Any]) -> Any:
    """The number that no other is below: the maximum of no values."""
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _highest(dtype: np.dtype[Any]) -> Any:
    """The number that no other is above: the minimum of no values."""
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


def _extreme(
    name: str,
    definition: Callable[..., Any],
    x: Any,
    axis_name: AxisName,
    groups: AxisIndexGroups,
    identity: Callable[[np.dtype[Any]], Any],
) -> Any:
    options = {"groups": _groups(axis_name, groups, uneven=True)}
    collective = Collective(name, definition, (), options, scalar=_same, identity=identity)
    return _each_leaf(collective, x, axis_name)


def pmax(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Any:
    """The elementwise maximum over the replicas, on every replica. NaN wins, and -0 is below +0.

    Args, errors: as `psum`; complex values are a TypeError.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.array([[1, 8], [5, 2]])
        >>> gpusim.vmap(lambda x: lax.pmax(x, "i"), axis_name="i", out_axes=None)(x)
        array([5, 8])
    """
    return _extreme("pmax", collectives.pmax, x, axis_name, axis_index_groups, _lowest)


def pmin(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Any:
    """The elementwise minimum over the replicas, on every replica. NaN wins, and -0 is below +0.

    Args, errors: as `psum`; complex values are a TypeError.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.array([[1, 8], [5, 2]])
        >>> gpusim.vmap(lambda x: lax.pmin(x, "i"), axis_name="i", out_axes=None)(x)
        array([1, 2])
    """
    return _extreme("pmin", collectives.pmin, x, axis_name, axis_index_groups, _highest)


def _holder(name: str, definition: Callable[..., Any], x: Any, axis_name: AxisName) -> Any:
    if isinstance(axis_name, (tuple, list)):
        raise TypeError(f"{name} takes a single axis name, but got {axis_name!r}")
    return _each_leaf(Collective(name, definition), x, _named_only(name, axis_name))


def pargmax(x: Any, axis_name: AxisName) -> Any:
    """The index (int32) of the first replica that holds the maximum, for each element.

    Args:
        x: a pytree of arrays.
        axis_name: one mapped axis.

    Raises:
        TypeError: for a tuple of axes.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.array([3.0, 7.0, 7.0])
        >>> gpusim.vmap(lambda x: lax.pargmax(x, "i"), axis_name="i", out_axes=None)(x)
        array(1, dtype=int32)
    """
    return _holder("pargmax", collectives.pargmax, x, axis_name)


def pargmin(x: Any, axis_name: AxisName) -> Any:
    """The index (int32) of the first replica that holds the minimum, for each element.

    Args, errors: as `pargmax`.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.array([3.0, 7.0, 1.0])
        >>> gpusim.vmap(lambda x: lax.pargmin(x, "i"), axis_name="i", out_axes=None)(x)
        array(2, dtype=int32)
    """
    return _holder("pargmin", collectives.pargmin, x, axis_name)


@LinearCollective
def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
    reduction: Reduction | None = None,
) -> Any:
    """The sum over the replicas, of which each replica keeps its own slice.

    Args:
        x: a pytree of arrays.
        axis_name: a mapped axis, or a tuple of them.
        scatter_dimension: the axis of ``x`` that is cut into a slice for each replica of the group;
            negative ones count from the end.
        axis_index_groups: groups of one size, as in `psum`.
        tiled: False: the axis has as many elements as the group has replicas, and is removed. True:
            its size is a multiple of that, and it stays.
        reduction: as in `psum`.

    Raises:
        ValueError: when the axis does not divide so.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.arange(8).reshape(2, 4)
        >>> gpusim.vmap(lambda x: lax.psum_scatter(x, "i", tiled=True), axis_name="i")(x)
        array([[ 4,  6],
               [ 8, 10]])
    """
    return _scatter("psum_scatter", collectives.psum_scatter, x, axis_name, scatter_dimension,
                    axis_index_groups, tiled, reduction)  # fmt: skip


def _scatter(
    name: str,
    definition: Callable[..., Any],
    x: Any,
    axis_name: AxisName,
    dimension_: int,
    groups: AxisIndexGroups,
    tiled: bool,
    reduction: Reduction | None,
    dimension: str = "scatter_dimension",
) -> Any:
    if reduction is not None and not isinstance(reduction, Reduction):
        raise TypeError(
            f"{name} reduction must be a gpusim.Reduction or None, but got {reduction!r}"
        )
    _named_only(name, axis_name)
    options = {
        dimension: dimension_,
        "tiled": bool(tiled),
        "groups": _groups(axis_name, groups),
        "reduction": reduction,
    }
    return _each_leaf(Collective(name, definition, (), options, True), x, axis_name)


# Rearrangements.


@LinearCollective
def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
) -> Any:
    """The values of all replicas of the group, on each of them.

    Args:
        x: a pytree of arrays.
        axis_name: a mapped axis, or a tuple of them.
        axis_index_groups: groups of one size, as in `psum`.
        axis: where the replicas' values go; negative ones count from the end of the result.
        tiled: False: stacked along a new axis there. True: concatenated along the axis that is
            there.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.array([[1, 2], [3, 4]])
        >>> f = lambda x: lax.all_gather(x, "i", axis=1)
        >>> gpusim.vmap(f, axis_name="i", out_axes=None)(x)
        array([[1, 3],
               [2, 4]])
    """
    _named_only("all_gather", axis_name)
    options = {"axis": axis, "tiled": bool(tiled), "groups": _groups(axis_name, axis_index_groups)}
    return _each_leaf(Collective("all_gather", collectives.all_gather, (), options), x, axis_name)


def _all_gather_transpose(
    ct: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
    reduction: Reduction | None = None,
) -> Any:
    """The cotangent of all_gather's operand: psum_scatter of the result's."""
    return psum_scatter(
        ct, axis_name, scatter_dimension=axis, axis_index_groups=axis_index_groups, tiled=tiled,
        reduction=reduction,
    )  # fmt: skip


def _psum_scatter_transpose(
    ct: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
) -> Any:
    """The cotangent of psum_scatter's operand: all_gather of the result's."""
    return all_gather(
        ct, axis_name, axis_index_groups=axis_index_groups, axis=scatter_dimension, tiled=tiled
    )


all_gather.transpose = _all_gather_transpose
psum_scatter.transpose = _psum_scatter_transpose


@LinearCollective
def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
) -> Any:
    """Each replica cuts its value into a slice for each replica of the group, and gets one from
    each.

    Args:
        x: a pytree of arrays.
        axis_name: a mapped axis, or a tuple of them.
        split_axis: the axis that is cut; slice r goes to replica r of the group.
        concat_axis: where the received slices go, in the senders' order; both may be negative.
        axis_index_groups: groups of one size, as in `psum`.
        tiled: False: split_axis has as many elements as the group has replicas and is removed, and
            the received slices are stacked along a new axis. True: split_axis is divided by the
            group's size, and the slices are concatenated.

    Raises:
        ValueError: when split_axis does not divide so.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.array([["to 0", "to 1"], ["TO 0", "TO 1"]])
        >>> gpusim.vmap(lambda x: lax.all_to_all(x, "i", 0, 0), axis_name="i")(x)
        array([['to 0', 'TO 0'],
               ['to 1', 'TO 1']], dtype='<U4')
    """
    _named_only("all_to_all", axis_name)
    options = {"tiled": bool(tiled), "groups": _groups(axis_name, axis_index_groups)}
    collective = Collective(
        "all_to_all", collectives.all_to_all, (split_axis, concat_axis), options
    )
    return _each_leaf(collective, x, axis_name)


def _all_to_all_transpose(
    ct: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
) -> Any:
    """The cotangent of all_to_all's operand: all_to_all with the axes exchanged."""
    return all_to_all(
        ct, axis_name, concat_axis, split_axis, axis_index_groups=axis_index_groups, tiled=tiled
    )


all_to_all.transpose = _all_to_all_transpose


@LinearCollective
def pswapaxes(
    x: Any, axis_name: AxisName, axis: int, *, axis_index_groups: AxisIndexGroups = None
) -> Any:
    """Exchange the mapped axis with an axis of the array: all_to_all that splits and stacks there.

    Args, errors: as `all_to_all`, with ``axis`` for both of its axes.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.arange(4).reshape(2, 2)
        >>> gpusim.vmap(lambda x: lax.pswapaxes(x, "i", 0), axis_name="i")(x)
        array([[0, 2],
               [1, 3]])
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


pswapaxes.transpose = pswapaxes


@LinearCollective
def ppermute(x: Any, axis_name: AxisName, perm: Iterable[Sequence[int]]) -> Any:
    """Each source sends its value to its destination; who receives nothing holds zeros.

    Args:
        x: a pytree of arrays.
        axis_name: a mapped axis, or a tuple of them.
        perm: pairs (source, destination) of replica indices; no source and no destination twice.

    Raises:
        ValueError: for a source or destination that comes twice, or is out of range (which is an
            IndexError too).

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.array([1, 2, 3])
        >>> gpusim.vmap(lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2)]), axis_name="i")(x)
        array([0, 1, 2])
    """
    _named_only("ppermute", axis_name)
    pairs = _as_tuple("perm", perm)
    return _each_leaf(Collective("ppermute", collectives.ppermute, (pairs,)), x, axis_name)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    try:
        items = tuple(value)
    except TypeError:
        raise TypeError(f"{name} must be a sequence, but got {value!r}") from None
    return tuple(tuple(item) if isinstance(item, list) else item for item in items)


def _ppermute_transpose(ct: Any, axis_name: AxisName, perm: Iterable[Sequence[int]]) -> Any:
    """The cotangent of ppermute's operand: the values sent back."""
    pairs = _as_tuple("perm", perm)
    collective = Collective("ppermute.transpose", collectives.ppermute.transpose, (pairs,))
    return _each_leaf(collective, ct, _named_only("ppermute", axis_name))


ppermute.transpose = _ppermute_transpose


@LinearCollective
def pshuffle(x: Any, axis_name: AxisName, perm: Sequence[int]) -> Any:
    """Replica i gets the value of replica ``perm[i]``.

    Args:
        x: a pytree of arrays.
        axis_name: a mapped axis, or a tuple of them.
        perm: a permutation of 0 to size - 1.

    Raises:
        ValueError: when it is no permutation.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.array([1, 2, 3])
        >>> gpusim.vmap(lambda x: lax.pshuffle(x, "i", [2, 0, 1]), axis_name="i")(x)
        array([3, 1, 2])
    """
    _named_only("pshuffle", axis_name)
    sources = _as_tuple("perm", perm)
    return _each_leaf(Collective("pshuffle", collectives.pshuffle, (sources,)), x, axis_name)


def _pshuffle_transpose(ct: Any, axis_name: AxisName, perm: Sequence[int]) -> Any:
    """The cotangent of pshuffle's operand: the values sent back."""
    sources = _as_tuple("perm", perm)
    collective = Collective("pshuffle.transpose", collectives.pshuffle.transpose, (sources,))
    return _each_leaf(collective, ct, _named_only("pshuffle", axis_name))


pshuffle.transpose = _pshuffle_transpose


@LinearCollective
def pbroadcast(x: Any, axis_name: AxisName, source: int) -> Any:
    """The value of one replica, on every replica.

    Args:
        x: a pytree of arrays.
        axis_name: a mapped axis, or a tuple of them.
        source: the index of the replica whose value it is.

    Raises:
        ValueError: for a source out of range (an IndexError too).

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.array([1, 2, 3])
        >>> gpusim.vmap(lambda x: lax.pbroadcast(x, "i", 1), axis_name="i")(x)
        array([2, 2, 2])
    """
    _named_only("pbroadcast", axis_name)
    return _each_leaf(Collective("pbroadcast", collectives.pbroadcast, (source,)), x, axis_name)


def _pbroadcast_transpose(ct: Any, axis_name: AxisName, source: int) -> Any:
    """The cotangent of pbroadcast's operand: the sum at the source, zeros elsewhere."""
    collective = Collective("pbroadcast.transpose", collectives.pbroadcast.transpose, (source,))
    return _each_leaf(collective, ct, _named_only("pbroadcast", axis_name))


pbroadcast.transpose = _pbroadcast_transpose


@LinearCollective
def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: AxisIndexGroups = None,
) -> Any:
    """Send slices of rows of different lengths to each replica of the group.

    With n replicas in the group there are K slices, K a multiple of n; slice i goes to replica
    ``i // (K // n)``. It is ``operand[input_offsets[i]:][:send_sizes[i]]`` and is written on its
    receiver at row ``output_offsets[i]``.

    Args:
        operand: (N, *row), the rows to send.
        output: (M, *row) in the same dtype, what rows hold where nothing is received.
        input_offsets, send_sizes: (K,) integers, where each slice begins in ``operand``, and its
            rows.
        output_offsets: (K,) integers, where each *sent* slice begins in its *receiver's* output.
        recv_sizes: (K,) integers, how many rows are received in each slice from each replica: what
            all_to_all makes of the senders' send_sizes.
        axis_name: a mapped axis, or a tuple of them.
        axis_index_groups: groups of one size, as in `psum`.

    Returns:
        A new array (M, *row): ``output`` with the received rows written.

    Raises:
        ValueError: before anything is written, for arguments that are no integers of rank 1 or do
            not divide; for slices that leave ``operand`` or their receiver's ``output``, sizes that
            disagree with recv_sizes, and slices that overlap on a receiver. The message names the
            replica, the slice and the numbers.

    Example:
        Two replicas hold rows 1 to 3 and 4 to 6; each sends its first row to replica 0, the
        others to 1.

        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> def f(rows, start, received):
        ...     output = np.zeros(4, int)
        ...     offsets, sizes = np.array([0, 1]), np.array([1, 2])
        ...     return lax.ragged_all_to_all(
        ...         rows, output, offsets, sizes, start, received, axis_name="i"
        ...     )
        >>> rows = np.array([[1, 2, 3], [4, 5, 6]])
        >>> start = np.array([[0, 0], [1, 2]])  # replica 1's slices come behind replica 0's
        >>> received = np.array([[1, 1], [2, 2]])
        >>> gpusim.vmap(f, axis_name="i")(rows, start, received)
        array([[1, 4, 0, 0],
               [2, 3, 5, 6]])
    """
    collective = Collective(
        "ragged_all_to_all",
        collectives.ragged_all_to_all,
        (),
        {"groups": _groups(axis_name, axis_index_groups)},
    )
    operands = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    ((result,),) = bind(collective, [operands], _named_only("ragged_all_to_all", axis_name))
    return result


def _ragged_all_to_all_transpose(
    ct: Any,
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: AxisIndexGroups = None,
) -> tuple[Any, Any]:
    """The cotangents of operand and output: the slices sent back, and ct where nothing was
    received."""
    collective = Collective(
        "ragged_all_to_all.transpose",
        collectives.ragged_all_to_all.transpose,
        (),
        {"groups": _groups(axis_name, axis_index_groups)},
    )
    operands = (ct, operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    ((operand_ct, output_ct),) = bind(
        collective, [operands], _named_only("ragged_all_to_all", axis_name)
    )
    return operand_ct, output_ct


ragged_all_to_all.transpose = _ragged_all_to_all_transpose


def pgather(src: Any, idx: Any, axes: AxisName) -> Any:
    """The values of the replicas with the given indices: ``all_gather(src, axes)[idx]``.

    Args:
        src: an array.
        idx: an integer array of replica indices.
        axes: a mapped axis, or a tuple of them.

    Returns:
        An array of shape ``idx.shape + src.shape``.

    Raises:
        TypeError: for indices that are no integers. ValueError: out of range (an IndexError too).

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> x = np.array([10, 20, 30])
        >>> f = lambda x: lax.pgather(x, np.array([2, 0]), "i")
        >>> gpusim.vmap(f, axis_name="i", out_axes=None)(x)
        array([30, 10])
    """
    collective = Collective("pgather", collectives.pgather)
    ((result,),) = bind(collective, [(src, idx)], _named_only("pgather", axes))
    return result


# Where a replica stands.


def axis_index(axis_name: AxisName) -> Any:
    """The replica's own index (int32) along an axis, or row-major along a tuple of axes.

    Raises:
        NameError: for an axis that is not bound.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> gpusim.vmap(lambda x: x + lax.axis_index("i"), axis_name="i")(np.array([10, 10, 10]))
        array([10, 11, 12])
    """
    return binding.axis_index(_named_only("axis_index", axis_name))


def axis_size(axis_name: AxisName) -> int:
    """The number of replicas along an axis, or along a tuple of axes, as a Python int.

    Raises:
        NameError: for an axis that is not bound.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> gpusim.vmap(lambda x: x / lax.axis_size("i"), axis_name="i")(np.array([1.0, 2.0]))
        array([0.5, 1. ])
    """
    return binding.axis_size(_named_only("axis_size", axis_name))
