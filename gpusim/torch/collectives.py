"""The collectives of `gpusim.lax` by the same names and arguments, on pytrees of tensors.
Each tensor goes to the operator gpusim::collective, a Python number to `gpusim.maps`."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec

import torch
from torch import Tensor

from .. import collectives, lax, trees
from ..collectives import Call, Collective
from ..maps.bind import bind, read_groups
from ..maps.lockstep import is_scalar
from ..maps.names import AxisName, resolve_names, split_names
from ..reduction import Reduction, as_reduction
from . import operators
from .plan import CollectiveSpec

__all__ = [*lax.COLLECTIVES]

P = ParamSpec("P")

trees.LEAF_TYPES.add(Tensor)
trees.LEAF_TYPES.add(torch.nn.Parameter)


def on_tensors(
    collective: Collective[P], example: str = "", run: Callable[[Call], Any] | None = None
) -> Callable[P, Any]:
    """A collective's function of tensors: the signature and docstring are those of its record.

    Axis names must be strings. In `vmap` a result that is the same on all replicas is in memory
    once: clone it before it is changed in place.

    **Arguments**: `example` replaces the docstring's example. `run` replaces the way from the call
    to its result.
    """
    read, execute = collective.call, run_on_tensors if run is None else run

    def function(*args: P.args, **kwargs: P.kwargs) -> Any:
        return execute(read(*args, **kwargs))

    function.__name__ = function.__qualname__ = collective.name
    prose = inspect.cleandoc(collective.__doc__ or "").partition("\n>>>")[0].rstrip()
    function.__doc__ = f"{prose}\n\n{inspect.cleandoc(example)}\n"
    function.__signature__ = inspect.signature(read)  # type: ignore[attr-defined]
    return function


def run_on_tensors(call: Call) -> Any:
    """Run a call on each leaf of its operand, all in one call of the operator.

    **Raises**: NameError for an axis that is not bound, TypeError for a dtype that NumPy and
    ml_dtypes lack, and for axis names that are not strings.
    """
    collective, operands = call.collective, call.operands
    names = _names(collective.name, call.axis_name)
    spec = _spec(call)
    if collective.operands > 1:
        tensors = [_tensor(collective.name, operand) for operand in operands]
        results = operators.collective(tensors, spec, names)
        return results[0] if len(results) == 1 else tuple(results)
    if isinstance(operands[0], Tensor):
        return operators.collective([operands[0]], spec, names)[0]
    leaves, structure = trees.flatten(operands[0])
    numbers: dict[int, Any] = {}
    if collective.scalar is not None and not _uneven(spec):
        numbers = {place: leaf for place, leaf in enumerate(leaves) if is_scalar(leaf)}
    tensors = [
        _tensor(collective.name, leaf) for place, leaf in enumerate(leaves) if place not in numbers
    ]
    if numbers:
        spec = replace(spec, numbers=tuple(numbers))
    found = iter(operators.collective(tensors, spec, names) if tensors else ())
    results = [
        _of_number(call, spec, leaf) if place in numbers else next(found)
        for place, leaf in enumerate(leaves)
    ]
    return trees.unflatten(structure, results)


def _spec(call: Call) -> CollectiveSpec:
    name, reduction = call.collective.name, call.reduction
    text = None
    if reduction is not None and not isinstance(reduction, Reduction):
        if torch.compiler.is_dynamo_compiling():
            reduction, text = None, _text(reduction, f"{name}: reduction")
        else:
            reduction = as_reduction(reduction, f"{name}: reduction")
    groups = None
    if call.groups is not None:
        groups = read_groups(call, resolve_names(call.axis_name)).members
    parameters = tuple([(key, _plain(value)) for key, value in call.parameters.items()])
    return CollectiveSpec(call.collective.key, parameters, groups, reduction, reduction_text=text)


@torch.compiler.assume_constant_result
def _text(given: Any, name: str) -> str:
    """The text of a Reduction. torch.compile calls this, as it cannot trace how one is made."""
    return str(as_reduction(given, name))


def _plain(value: Any) -> Any:
    """A value that a graph can carry: integers as int; others are refused where they are used."""
    if isinstance(value, tuple):
        return tuple([_plain(item) for item in value])
    if isinstance(value, bool):
        return value
    return operator.index(value) if hasattr(value, "__index__") else value


def _names(name: str, axis_name: AxisName) -> tuple[str, ...]:
    """The axis names, which must be strings: those are what operators of a graph can carry."""
    names = split_names(axis_name)
    for one in names:
        if not isinstance(one, str):
            raise TypeError(
                f"{name} of tensors needs axis names that are strings, but got axis_name "
                f"{axis_name!r}"
            )
    return names  # type: ignore[return-value]  # strings, as checked


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if type(value) in (bool, int, float, complex):
        return torch.as_tensor(value)
    raise TypeError(
        f"{name}'s operand is {value!r:.60} of type {type(value).__name__}; a tensor or a number "
        "was expected (gpusim.lax is for arrays)"
    )


def _uneven(spec: CollectiveSpec) -> bool:
    return spec.groups is not None and len({len(group) for group in spec.groups}) > 1


def _of_number(call: Call, spec: CollectiveSpec, number: Any) -> Any:
    """The result for a Python number: a number, if all groups have one size.

    In pmap the replicas' numbers may differ, and they meet.
    """
    entries = resolve_names(call.axis_name)
    if any(entry.index is not None for entry in entries):
        return bind(call._replace(operands=(number,)))
    assert call.collective.scalar is not None
    total = math.prod(entry.total for entry in entries)
    return call.collective.scalar(number, total if spec.groups is None else len(spec.groups[0]))


def _gather_chosen(call: Call) -> Any:
    """pgather as all_gather and indexing, which torch differentiates."""
    src, idx = call.operands
    chosen = _tensor("pgather", idx)
    if chosen.is_floating_point() or chosen.is_complex() or chosen.dtype == torch.bool:
        raise TypeError(f"pgather: idx must be integers, got {chosen.dtype}")
    gathered = all_gather(_tensor("pgather", src), call.axis_name)
    # torch counts negative numbers from the end; here no replica has them.
    return gathered[torch.where(chosen < 0, len(gathered), chosen).long()]


psum = on_tensors(
    collectives.psum,
    """
    Cotangents are summed over the replicas too, in the same order and precision.

    >>> import torch, gpusim.torch as gt
    >>> gt.vmap(lambda x: x / gt.psum(x, "i"), axis_name="i")(torch.tensor([1.0, 2.0, 5.0]))
    tensor([0.1250, 0.2500, 0.6250])
    """,
)

pmean = on_tensors(
    collectives.pmean,
    """
    >>> import torch, gpusim.torch as gt
    >>> gt.vmap(lambda x: x - gt.pmean(x, "i"), axis_name="i")(torch.tensor([1.0, 2.0, 6.0]))
    tensor([-2., -1.,  3.])
    """,
)

pmax = on_tensors(
    collectives.pmax,
    """
    >>> import torch, gpusim.torch as gt
    >>> gt.vmap(lambda x: gt.pmax(x, "i"), axis_name="i")(torch.tensor([3, 8, 5]))
    tensor([8, 8, 8])
    """,
)

pmin = on_tensors(
    collectives.pmin,
    """
    >>> import torch, gpusim.torch as gt
    >>> gt.vmap(lambda x: gt.pmin(x, "i"), axis_name="i")(torch.tensor([3, 8, 5]))
    tensor([3, 3, 3])
    """,
)

pargmax = on_tensors(
    collectives.pargmax,
    """
    >>> import torch, gpusim.torch as gt
    >>> gt.vmap(lambda x: gt.pargmax(x, "i"), axis_name="i")(torch.tensor([3.0, 7.0, 7.0]))
    tensor([1, 1, 1], dtype=torch.int32)
    """,
)

pargmin = on_tensors(
    collectives.pargmin,
    """
    >>> import torch, gpusim.torch as gt
    >>> gt.vmap(lambda x: gt.pargmin(x, "i"), axis_name="i")(torch.tensor([3.0, 7.0, 1.0]))
    tensor([2, 2, 2], dtype=torch.int32)
    """,
)

psum_scatter = on_tensors(
    collectives.psum_scatter,
    """
    Cotangents are gathered (`all_gather`).

    >>> import torch, gpusim.torch as gt
    >>> x = torch.arange(8).reshape(2, 4)
    >>> gt.vmap(lambda x: gt.psum_scatter(x, "i", tiled=True), axis_name="i")(x)
    tensor([[ 4,  6],
            [ 8, 10]])
    """,
)

all_gather = on_tensors(
    collectives.all_gather,
    """
    Cotangents are summed and scattered (`psum_scatter`).

    >>> import torch, gpusim.torch as gt
    >>> gt.vmap(lambda x: gt.all_gather(x, "i"), axis_name="i")(torch.tensor([1, 2]))
    tensor([[1, 2],
            [1, 2]])
    """,
)

all_to_all = on_tensors(
    collectives.all_to_all,
    """
    Cotangents go back by all_to_all with the dimensions exchanged.

    >>> import torch, gpusim.torch as gt
    >>> x = torch.arange(4).reshape(2, 2)
    >>> gt.vmap(lambda x: gt.all_to_all(x, "i", 0, 0), axis_name="i")(x)
    tensor([[0, 2],
            [1, 3]])
    """,
)

pswapaxes = on_tensors(
    collectives.pswapaxes,
    """
    >>> import torch, gpusim.torch as gt
    >>> x = torch.arange(4).reshape(2, 2)
    >>> gt.vmap(lambda x: gt.pswapaxes(x, "i", 0), axis_name="i")(x)
    tensor([[0, 2],
            [1, 3]])
    """,
)

ppermute = on_tensors(
    collectives.ppermute,
    """
    Cotangents are sent back.

    >>> import torch, gpusim.torch as gt
    >>> f = lambda x: gt.ppermute(x, "i", [(0, 1), (1, 2)])
    >>> gt.vmap(f, axis_name="i")(torch.tensor([1, 2, 3]))
    tensor([0, 1, 2])
    """,
)

pshuffle = on_tensors(
    collectives.pshuffle,
    """
    Cotangents are sent back.

    >>> import torch, gpusim.torch as gt
    >>> f = lambda x: gt.pshuffle(x, "i", [2, 0, 1])
    >>> gt.vmap(f, axis_name="i")(torch.tensor([1, 2, 3]))
    tensor([3, 1, 2])
    """,
)

pbroadcast = on_tensors(
    collectives.pbroadcast,
    """
    Cotangents are summed at the source.

    >>> import torch, gpusim.torch as gt
    >>> gt.vmap(lambda x: gt.pbroadcast(x, "i", 1), axis_name="i")(torch.tensor([1, 2, 3]))
    tensor([2, 2, 2])
    """,
)

pgather = on_tensors(
    collectives.pgather,
    """
    >>> import torch, gpusim.torch as gt
    >>> f = lambda x: gt.pgather(x, torch.tensor([2, 0]), "i")
    >>> gt.vmap(f, axis_name="i")(torch.tensor([10, 20, 30]))
    tensor([[30, 10],
            [30, 10],
            [30, 10]])
    """,
    run=_gather_chosen,
)

ragged_all_to_all = on_tensors(
    collectives.ragged_all_to_all,
    """
    Cotangents of the operand are the slices sent back; those of the output are zero where
    something was received.

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
    """,
)


def axis_index(axis_name: AxisName) -> Tensor:
    """The replica's own index (int32) along an axis, or row-major along a tuple of axes.

    **Raises**: NameError for an axis that is not bound.

    >>> import torch, gpusim.torch as gt
    >>> f = lambda x: x + gt.axis_index("i")
    >>> gt.vmap(f, axis_name="i")(torch.tensor([10, 10, 10]))
    tensor([10, 11, 12])
    """
    return operators.axis_index(_names("axis_index", axis_name))


def axis_size(axis_name: AxisName) -> int:
    """The number of replicas along an axis, or along a tuple of axes, as a Python int.

    **Raises**: NameError for an axis that is not bound.

    >>> import torch, gpusim.torch as gt
    >>> gt.vmap(lambda x: x / gt.axis_size("i"), axis_name="i")(torch.tensor([1.0, 2.0]))
    tensor([0.5000, 1.0000])
    """
    return lax.axis_size(axis_name)
