"""Checks of a fold's arguments, shared by all sets of kernels.
Each check returns its argument in the form that kernels take, or raises the error that names it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

NO_MEMBERS = "members is empty: a fold needs at least one member"


def check_stacked(members: Any) -> None:
    """ValueError unless axis 0 of an array numbers at least one member."""
    if members.ndim == 0:
        raise ValueError("members is a 0-d array: expected axis 0 to number the members")
    if not len(members):
        raise ValueError(NO_MEMBERS)


def check_listed(members: Sequence[Any]) -> None:
    """ValueError or TypeError unless a list has members, of one shape and dtype.

    The message names the first that differs.
    """
    if not members:
        raise ValueError(NO_MEMBERS)
    for index, array in enumerate(members):
        if array.shape != members[0].shape:
            raise ValueError(
                f"members[{index}] has shape {array.shape}, members[0] {members[0].shape}: "
                "expected equal shapes"
            )
        if array.dtype != members[0].dtype:
            raise TypeError(
                f"members[{index}] has dtype {array.dtype}, members[0] {members[0].dtype}: "
                "expected equal dtypes"
            )


def check_batch(batch_ndim: int, shape: tuple[int, ...]) -> None:
    """ValueError unless members of this shape have `batch_ndim` axes or more."""
    if not 0 <= batch_ndim <= len(shape):
        raise ValueError(f"batch_ndim={batch_ndim}: the members have {len(shape)} axes")


def check_window(
    window: tuple[int, int] | None, size: int, cut_axis: int | None
) -> tuple[int, int] | None:
    """The window, known to lie within its value; `size` is the number of elements held."""
    if window is None:
        return None
    first, total = window
    if cut_axis is not None:
        raise ValueError(f"window={window!r}: expected no cut_axis beside it")
    if not 0 <= first <= total - size:
        raise ValueError(
            f"window={window!r}: the members' {size} elements do not fit into {total} from {first}"
        )
    return window


def check_cut(cut_axis: int, value: tuple[int, ...], members: int) -> int:
    """The number of positions in one slice of the axis that a ring cuts."""
    if not 0 <= cut_axis < len(value):
        raise ValueError(f"cut_axis={cut_axis}: expected 0 to {len(value) - 1}")
    length = value[cut_axis]
    if length % members:
        raise ValueError(
            f"cut_axis={cut_axis} has length {length}, which {members} members do not divide"
        )
    return length // members


def check_batch_offset(places: ArrayLike, batch: tuple[int, ...]) -> NDArray[np.uint64]:
    """One batch offset per batch entry; users know them as `places`."""
    given = np.asarray(places)
    if given.dtype.kind not in "iu" or (given.size and given.min() < 0):
        raise ValueError(f"places={places!r}: expected integers from 0 to 2**64 - 1")
    try:
        spread = np.broadcast_to(given, batch)
    except ValueError:
        raise ValueError(
            f"places has shape {given.shape}, which does not broadcast to the batch's {batch}"
        ) from None
    return spread.astype(np.uint64)


def check_nodes(given: tuple[int, int, int], final: bool, members: int) -> None:
    """ValueError unless the members, as these nodes of a tree, make a subtree of it."""
    level, first, total = nodes = tuple(given)
    if not (0 <= level < 63 and 0 <= first and 0 < total < 2**63):
        raise ValueError(f"nodes={nodes!r}: expected (level, first, total), a tree's total members")
    width, last = -(-total >> level), first + members
    if last > width:
        raise ValueError(
            f"nodes={nodes!r}: {members} members given, but there are {width} nodes of that level"
        )
    span = 1 << (members - 1).bit_length()
    if first % span or (members < span and last < width):
        raise ValueError(
            f"nodes={nodes!r}: {members} members from {first} on are not a subtree: expected a "
            "power of two of them, from a multiple of it on (the tree's last ones may be fewer)"
        )
    if final and members < width:
        raise ValueError(f"nodes={nodes!r}: {members} of {width} nodes given; expected final=False")


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """ValueError or TypeError unless a result of this shape and dtype can be written into it."""
    if out.shape != shape or not out.flags.c_contiguous:
        order = "" if out.flags.c_contiguous else ", which is not C-contiguous"
        raise ValueError(f"out has shape {out.shape}{order}: expected {shape}, C-contiguous")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}: expected {dtype}, the result's dtype")


def check_partial(partial: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """ValueError or TypeError unless it is of the members' shape and the partial results' dtype."""
    if partial.shape != shape:
        raise ValueError(
            f"partial has shape {partial.shape}: expected {shape}, the shape of each member"
        )
    if partial.dtype != dtype:
        raise TypeError(
            f"partial has dtype {partial.dtype}: expected {dtype}, the partial results' dtype"
        )


def check_rounding(rounding: str) -> bool:
    """True for "stochastic", False for "nearest", ValueError for anything else."""
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding={rounding!r}: expected 'nearest' or 'stochastic'")
    return rounding == "stochastic"


def check_word(name: str, given: Any) -> int:
    """A 64-bit word, such as a seed or a call number, of a user's argument.

    **Raises**: TypeError for no integer; ValueError outside its range.
    """
    try:
        value = operator.index(given)
    except TypeError:
        raise TypeError(f"{name}={given!r}: expected an integer") from None
    if not 0 <= value < 2**64:
        raise ValueError(f"{name}={given!r}: expected an integer from 0 to 2**64 - 1")
    return value
