"""Arguments and results of maps over tensors: in_dims and out_dims as tree prefixes, sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from .. import trees
from ..maps.agreement import agree_on_arguments
from ..maps.arguments import (
    PYTHON_SCALARS,
    MapArguments,
    check_in_axes,
    check_out_axes,
    read_arguments,
)
from ..maps.axis_environment import Sharding
from .private import is_transformed
from .tensors import as_array

__all__ = ["agree_on_shared", "as_result", "check_dims", "equal_bits", "take_replicated", "read"]


def check_dims(what: str, in_dims: Any, out_dims: Any) -> Any:
    """in_dims with a list of entries turned into a tuple.

    **Raises**:

    - TypeError: where one of the two holds anything but integers and None.
    """
    check_out_axes(what, out_dims, "out_dims")
    return check_in_axes(what, in_dims, "in_dims")


def read(
    what: str, in_dims: Any, size: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> MapArguments:
    """Flatten the arguments and find which dimension of each leaf is mapped, and how long it is.

    **Raises**:

    - ValueError: when in_dims does not fit the arguments, and as `gpusim.vmap`.
    - TypeError: if a mapped argument is not a tensor.
    """
    leaves, structure = trees.flatten((args, kwargs))
    shapes = [_of_shape(tuple(leaf.shape)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if leaves and not kwargs and (in_dims is None or type(in_dims) is int):  # of each leaf
        shown_args, shown_kwargs = tuple(shapes), kwargs
    else:
        shown_args, shown_kwargs = trees.unflatten(structure, shapes)
    found = read_arguments(what, in_dims, size, shown_args, shown_kwargs, "in_dims")
    for number, (leaf, axis) in enumerate(zip(leaves, found.axes, strict=True)):
        if axis is not None and not isinstance(leaf, Tensor):
            raise TypeError(
                f"{what}: leaf {number} of the arguments is of type {type(leaf).__name__} and "
                "mapped; a tensor was expected (in_dims None passes it as it is)"
            )
    flat = found.structure is None and trees.LEAF_TYPES.issuperset(map(type, args))
    return MapArguments(leaves, None if flat else structure, found.axes, found.size)


def _of_shape(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of this shape in one byte; np.broadcast_to takes six times as long."""
    return np.ndarray(shape, np.bool_, b"\0", 0, (0,) * len(shape))


def agree_on_shared(what: str, arguments: MapArguments, sharding: Sharding | None) -> None:
    """Check that the arguments that all replicas share are equal on all instances.

    Tensors without values of their own, those of torch.func's transforms and of tracers, are not
    compared, nor are dtypes that NumPy lacks.

    **Raises**: CollectiveMismatchError if they are not.
    """
    if sharding is None:
        return
    shared = []
    for number, leaf, _ in arguments.shared():
        value = leaf
        if isinstance(leaf, Tensor):
            if type(leaf) not in (Tensor, Parameter) or is_transformed(leaf):
                continue
            try:
                value = as_array(leaf)
            except TypeError:
                continue
        shared.append((number, value, "in_dims=None"))
    agree_on_arguments(what, shared, sharding)


def as_result(what: str, value: Any, device: torch.device | None = None) -> Tensor:
    """A result as a tensor; TypeError if it is neither that nor a number."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, PYTHON_SCALARS):
        return torch.as_tensor(value, device=device)
    raise TypeError(
        f"{what}: a result is {value!r:.60} of type {type(value).__name__}; a tensor or a number "
        "was expected"
    )


def equal_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits."""
    a, b = (x.detach().resolve_conj().resolve_neg() for x in (first, second))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return torch.equal(a.view(integers), b.view(integers))


def take_replicated(what: str, stacked: Tensor, axis_name: Any) -> Tensor:
    """The value of all replicas, which must be the same.

    **Raises**:

    - ValueError: where it differs.
    """
    first = stacked[0]
    if stacked.stride(0) != 0 and not equal_bits(first.expand(stacked.shape), stacked):
        raise ValueError(
            f"{what} out_dims is None for a result of shape {tuple(first.shape)} that differs over "
            f"axis {axis_name!r}: only what is the same on all replicas (psum's or all_gather's "
            "result, say) can be returned once"
        )
    return first
