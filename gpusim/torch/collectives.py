"""The collectives of `gpusim.lax` by the same names and arguments, on pytrees of tensors.
Each tensor goes to the operator gpusim::collective, a Python number to `gpusim.maps`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import lax, trees
from ..lax import AxisIndexGroups, AxisName
from ..maps import binding
from ..reduction import Reduction
from . import operators
from .plan import TABLE, What

__all__ = [*lax.__all__]

trees.LEAF_TYPES.add(Tensor)
trees.LEAF_TYPES.add(torch.nn.Parameter)


def _names(name: str, axis_name: AxisName) -> tuple[str, ...]:
    """The axis names, all of which must be strings, which operators of a graph can carry."""
    names = binding.split_names(axis_name)
    for one in names:
        if not isinstance(one, str):
            raise TypeError(
                f"{name} of tensors needs axis names that are strings, but got axis_name "
                f"{axis_name!r}"
            )
    return names  # type: ignore[return-value]  # strings, as checked


def _groups(
    axis_name: AxisName, groups: AxisIndexGroups, *, uneven: bool = False
) -> tuple[tuple[int, ...], ...] | None:
    found = lax._groups(axis_name, groups, uneven=uneven)
    return None if found is None else found.members


def _given(name: str, reduction: Reduction | None) -> Reduction | None:
    if reduction is not None and not isinstance(reduction, Reduction):
        raise TypeError(
            f"{name} reduction must be a gpusim.Reduction or None, but got {reduction!r}"
        )
    return reduction


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if type(value) in (bool, int, float, complex):
        return torch.as_tensor(value)
    raise TypeError(
        f"{name}'s operand is {value!r:.60} of type {type(value).__name__}; a tensor or a number "
        "was expected (gpusim.lax is for arrays)"
    )


def _each_leaf(
    x: Any,
    axis_name: AxisName,
    what: What,
    scalar: Callable[[Any, int], Any] | None = None,
) -> Any:
    """Run a collective of one operand on each leaf of a tree, all in one call of the operator."""
    name = what.collective
    names = _names(name, axis_name)
    if isinstance(x, Tensor):
        return operators.collective([x], what, names)[0]
    leaves, structure = trees.flatten(x)
    numbers: dict[int, Any] = {}
    if scalar is not None and not _uneven(what):
        numbers = {place: leaf for place, leaf in enumerate(leaves) if binding.is_scalar(leaf)}
    tensors = [_tensor(name, leaf) for place, leaf in enumerate(leaves) if place not in numbers]
    if numbers:
        what = replace(what, numbers=tuple(numbers))
    results = iter(operators.collective(tensors, what, names) if tensors else ())
    found = [
        _of_number(what, names, leaf, scalar) if place in numbers else next(results)
        for place, leaf in enumerate(leaves)
    ]
    return trees.unflatten(structure, found)


def _uneven(what: What) -> bool:
    return what.groups is not None and len({len(group) for group in what.groups}) > 1


def _of_number(what: What, names: tuple[str, ...], number: Any, scalar: Any) -> Any:
    """What a fold makes of a Python number: again one, if all groups have one size. In pmap the
    replicas' numbers may differ, and they meet."""
    frames = binding.resolve_names(names)
    if any(frame.index is not None for frame in frames):
        options: dict[str, Any] = {"axis_index_groups": what.groups}
        if TABLE[what.collective].folds:
            options["reduction"] = what.reduction
        return getattr(lax, what.collective)(number, names, **options)
    total = math.prod(frame.total for frame in frames)
    return scalar(number, total if what.groups is None else len(what.groups[0]))


# Folds.


def psum(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    reduction: Reduction | None = None,
) -> Any:
    """The sum over the replicas, on every replica: `gpusim.lax.psum` of tensors.

    Its cotangents are summed over the replicas too, in the same order and precision.

    Args:
        x: a pytree of tensors of any shape; bool is summed as int32. Of a Python number that is the
            same everywhere the result is size times the number.
        axis_name: a mapped axis, or a tuple of them.
        axis_index_groups: lists of replica indices, each index once; sums within each group.
        reduction: order, accumulator and rounding; None is that of the `gpusim.reduction` context.

    Returns:
        The sums, in the shapes and dtypes of ``x``. In `vmap` they are in memory once, for all
        replicas: ``.clone()`` before they are changed in place.

    Raises:
        NameError: for an axis that is not bound.
        TypeError: for a dtype that NumPy and ml_dtypes have not, and axis names that are no
            strings.
        ValueError: for groups that are no partition, or a name that comes twice.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> gt.vmap(lambda x: x / gt.psum(x, "i"), axis_name="i")(torch.tensor([1.0, 2.0, 5.0]))
        tensor([0.1250, 0.2500, 0.6250])
    """
    groups = _groups(axis_name, axis_index_groups, uneven=True)
    what = What("psum", groups=groups, reduction=_given("psum", reduction))
    return _each_leaf(x, axis_name, what, operator.mul)


def pmean(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    reduction: Reduction | None = None,
) -> Any:
    """The mean over the replicas, on every replica. Integers and bool give float32 (64-bit
    integers float64).

    Args, errors: as `psum`.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> gt.vmap(lambda x: x - gt.pmean(x, "i"), axis_name="i")(torch.tensor([1.0, 2.0, 6.0]))
        tensor([-2., -1.,  3.])
    """
    groups = _groups(axis_name, axis_index_groups, uneven=True)
    what = What("pmean", groups=groups, reduction=_given("pmean", reduction))
    return _each_leaf(x, axis_name, what, lax._mean_of_equal)


def pmax(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Any:
    """The elementwise maximum over the replicas, on every replica. NaN wins, and -0 is below +0.

    Args, errors: as `psum`; complex values are a TypeError. It has no derivative.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> gt.vmap(lambda x: gt.pmax(x, "i"), axis_name="i")(torch.tensor([3, 8, 5]))
        tensor([8, 8, 8])
    """
    groups = _groups(axis_name, axis_index_groups, uneven=True)
    return _each_leaf(x, axis_name, What("pmax", groups=groups), lax._same)


def pmin(x: Any, axis_name: AxisName, *, axis_index_groups: AxisIndexGroups = None) -> Any:
    """The elementwise minimum over the replicas, on every replica. NaN wins, and -0 is below +0.

    Args, errors: as `pmax`.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> gt.vmap(lambda x: gt.pmin(x, "i"), axis_name="i")(torch.tensor([3, 8, 5]))
        tensor([3, 3, 3])
    """
    groups = _groups(axis_name, axis_index_groups, uneven=True)
    return _each_leaf(x, axis_name, What("pmin", groups=groups), lax._same)


def _holder(name: str, x: Any, axis_name: AxisName) -> Any:
    if isinstance(axis_name, (tuple, list)):
        raise TypeError(f"{name} takes a single axis name, but got {axis_name!r}")
    return _each_leaf(x, axis_name, What(name))


def pargmax(x: Any, axis_name: AxisName) -> Any:
    """The index (int32) of the first replica that holds the maximum, for each element.

    Raises:
        TypeError: for a tuple of axes.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> gt.vmap(lambda x: gt.pargmax(x, "i"), axis_name="i")(torch.tensor([3.0, 7.0, 7.0]))
        tensor([1, 1, 1], dtype=torch.int32)
    """
    return _holder("pargmax", x, axis_name)


def pargmin(x: Any, axis_name: AxisName) -> Any:
    """The index (int32) of the first replica that holds the minimum, for each element.

    Args, errors: as `pargmax`.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> gt.vmap(lambda x: gt.pargmin(x, "i"), axis_name="i")(torch.tensor([3.0, 7.0, 1.0]))
        tensor([2, 2, 2], dtype=torch.int32)
    """
    return _holder("pargmin", x, axis_name)


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

    Its cotangents are gathered (`all_gather`).

    Args:
        x: a pytree of tensors.
        axis_name, axis_index_groups, reduction: as in `psum`; groups have one size.
        scatter_dimension: the dimension of ``x`` that is cut into a slice for each replica of the
            group; negative ones count from the end.
        tiled: False: the dimension has as many elements as the group has replicas, and is removed.
            True: its size is a multiple of that, and it stays.

    Raises:
        ValueError: when the dimension does not divide so.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> x = torch.arange(8).reshape(2, 4)
        >>> gt.vmap(lambda x: gt.psum_scatter(x, "i", tiled=True), axis_name="i")(x)
        tensor([[ 4,  6],
                [ 8, 10]])
    """
    options = (("scatter_dimension", _dimension(scatter_dimension)), ("tiled", bool(tiled)))
    groups = _groups(axis_name, axis_index_groups)
    what = What("psum_scatter", (), options, groups, _given("psum_scatter", reduction))
    return _each_leaf(x, axis_name, what)


def _dimension(given: Any) -> Any:
    """An integer that a graph can carry; what is none is refused where it is used."""
    return operator.index(given) if hasattr(given, "__index__") else given


# Rearrangements.


def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
) -> Any:
    """The values of all replicas of the group, on each of them.

    Its cotangents are summed and scattered (`psum_scatter`).

    Args:
        x: a pytree of tensors.
        axis_name, axis_index_groups: as in `psum`; groups have one size.
        axis: where the replicas' values go; negative ones count from the end of the result.
        tiled: False: stacked along a new dimension there. True: concatenated along the one there.

    Returns:
        As `psum`: in `vmap` in memory once.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> gt.vmap(lambda x: gt.all_gather(x, "i"), axis_name="i")(torch.tensor([1, 2]))
        tensor([[1, 2],
                [1, 2]])
    """
    options = (("axis", _dimension(axis)), ("tiled", bool(tiled)))
    groups = _groups(axis_name, axis_index_groups)
    return _each_leaf(x, axis_name, What("all_gather", (), options, groups))


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

    Its cotangents go back by all_to_all with the dimensions exchanged.

    Args:
        x: a pytree of tensors.
        axis_name, axis_index_groups: as in `psum`; groups have one size.
        split_axis: the dimension that is cut; slice r goes to replica r of the group.
        concat_axis: where the received slices go, in the senders' order; both may be negative.
        tiled: False: split_axis has as many elements as the group has replicas and is removed, and
            the received slices are stacked along a new dimension. True: split_axis is divided by
            the group's size, and the slices are concatenated.

    Raises:
        ValueError: when split_axis does not divide so.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> x = torch.arange(4).reshape(2, 2)
        >>> gt.vmap(lambda x: gt.all_to_all(x, "i", 0, 0), axis_name="i")(x)
        tensor([[0, 2],
                [1, 3]])
    """
    places = (_dimension(split_axis), _dimension(concat_axis))
    groups = _groups(axis_name, axis_index_groups)
    return _each_leaf(x, axis_name, What("all_to_all", places, (("tiled", bool(tiled)),), groups))


def pswapaxes(
    x: Any, axis_name: AxisName, axis: int, *, axis_index_groups: AxisIndexGroups = None
) -> Any:
    """Exchange the mapped axis with a dimension: `all_to_all` that splits and stacks there.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> x = torch.arange(4).reshape(2, 2)
        >>> gt.vmap(lambda x: gt.pswapaxes(x, "i", 0), axis_name="i")(x)
        tensor([[0, 2],
                [1, 3]])
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def ppermute(x: Any, axis_name: AxisName, perm: Iterable[Sequence[int]]) -> Any:
    """Each source sends its value to its destination; who receives nothing holds zeros.

    Its cotangents are sent back.

    Args:
        x: a pytree of tensors.
        axis_name: a mapped axis, or a tuple of them.
        perm: pairs (source, destination) of replica indices; no source and no destination twice.

    Raises:
        ValueError: for a source or destination that comes twice, or is out of range (which is an
            IndexError too).

    Example:
        >>> import torch, gpusim.torch as gt
        >>> f = lambda x: gt.ppermute(x, "i", [(0, 1), (1, 2)])
        >>> gt.vmap(f, axis_name="i")(torch.tensor([1, 2, 3]))
        tensor([0, 1, 2])
    """
    pairs = tuple(
        tuple(map(_dimension, pair)) if isinstance(pair, tuple) else pair
        for pair in lax._as_tuple("perm", perm)
    )
    return _each_leaf(x, axis_name, What("ppermute", (pairs,)))


def pshuffle(x: Any, axis_name: AxisName, perm: Sequence[int]) -> Any:
    """Replica i gets the value of replica ``perm[i]``. Its cotangents are sent back.

    Args:
        x: a pytree of tensors.
        axis_name: a mapped axis, or a tuple of them.
        perm: a permutation of 0 to size - 1.

    Raises:
        ValueError: when it is no permutation.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> f = lambda x: gt.pshuffle(x, "i", [2, 0, 1])
        >>> gt.vmap(f, axis_name="i")(torch.tensor([1, 2, 3]))
        tensor([3, 1, 2])
    """
    sources = tuple(map(_dimension, lax._as_tuple("perm", perm)))
    return _each_leaf(x, axis_name, What("pshuffle", (sources,)))


def pbroadcast(x: Any, axis_name: AxisName, source: int) -> Any:
    """The value of one replica, on every replica.

    Its cotangents are summed at the source.

    Args:
        x: a pytree of tensors.
        axis_name: a mapped axis, or a tuple of them.
        source: the index of the replica whose value it is.

    Raises:
        ValueError: for a source out of range (an IndexError too).

    Example:
        >>> import torch, gpusim.torch as gt
        >>> gt.vmap(lambda x: gt.pbroadcast(x, "i", 1), axis_name="i")(torch.tensor([1, 2, 3]))
        tensor([2, 2, 2])
    """
    return _each_leaf(x, axis_name, What("pbroadcast", (_dimension(source),)))


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

    Arguments and errors are those of `gpusim.lax.ragged_all_to_all`, as tensors. Cotangents of the
    operand are the slices sent back; those of the output are zero where something was received.

    Returns:
        A new tensor (M, *row): ``output`` with the received rows written.

    Example:
        Two replicas hold rows 1 to 3 and 4 to 6; each sends its first row to replica 0, the
        others to 1.

        >>> import torch, gpusim.torch as gt
        >>> def f(rows, start, received):
        ...     output, offsets, sizes = torch.zeros(4), torch.tensor([0, 1]), torch.tensor([1, 2])
        ...     return gt.ragged_all_to_all(
        ...         rows, output, offsets, sizes, start, received, axis_name="i"
        ...     )
        >>> rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> start = torch.tensor([[0, 0], [1, 2]])  # replica 1's slices come behind replica 0's
        >>> received = torch.tensor([[1, 1], [2, 2]])
        >>> gt.vmap(f, axis_name="i")(rows, start, received)
        tensor([[1., 4., 0., 0.],
                [2., 3., 5., 6.]])
    """
    name = "ragged_all_to_all"
    given = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    what = What(name, groups=_groups(axis_name, axis_index_groups))
    tensors = [_tensor(name, value) for value in given]
    return operators.collective(tensors, what, _names(name, axis_name))[0]


def pgather(src: Any, idx: Any, axes: AxisName) -> Any:
    """The values of the replicas with the given indices: ``all_gather(src, axes)[idx]``.

    Args:
        src: a tensor.
        idx: an integer tensor of replica indices, or an int.
        axes: a mapped axis, or a tuple of them.

    Returns:
        A tensor of shape ``idx.shape + src.shape``.

    Raises:
        TypeError: for indices that are no integers. IndexError: out of range.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> f = lambda x: gt.pgather(x, torch.tensor([2, 0]), "i")
        >>> gt.vmap(f, axis_name="i")(torch.tensor([10, 20, 30]))
        tensor([[30, 10],
                [30, 10],
                [30, 10]])
    """
    chosen = _tensor("pgather", idx)
    if chosen.is_floating_point() or chosen.is_complex() or chosen.dtype == torch.bool:
        raise TypeError(f"pgather: idx must be integers, got {chosen.dtype}")
    gathered = all_gather(_tensor("pgather", src), axes)
    # torch counts negative numbers from the end; here they are no replica's.
    return gathered[torch.where(chosen < 0, len(gathered), chosen).long()]


# Where a replica stands.


def axis_index(axis_name: AxisName) -> Tensor:
    """The replica's own index (int32) along an axis, or row-major along a tuple of axes.

    Raises:
        NameError: for an axis that is not bound.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> f = lambda x: x + gt.axis_index("i")
        >>> gt.vmap(f, axis_name="i")(torch.tensor([10, 10, 10]))
        tensor([10, 11, 12])
    """
    return operators.axis_index(_names("axis_index", axis_name))


def axis_size(axis_name: AxisName) -> int:
    """The number of replicas along an axis, or along a tuple of axes, as a Python int.

    Raises:
        NameError: for an axis that is not bound.

    Example:
        >>> import torch, gpusim.torch as gt
        >>> gt.vmap(lambda x: x / gt.axis_size("i"), axis_name="i")(torch.tensor([1.0, 2.0]))
        tensor([0.5000, 1.0000])
    """
    return lax.axis_size(axis_name)
