"""The dispatcher: every collective of every frontend goes through `resolve` and `run`.

`resolve` settles the Reduction and counts the call. `run` waits until all instances make the same
call, and runs the collective's definition, or its plan where instances share the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..groups import Groups
from ..libraries import call_on_bits, lacks_kernels, on_device
from ..reduction import Reduction, as_reduction, current
from ..runtime.world import MAIN_TAG, World
from .definition import Call, Definition
from .distributed.layout import Layout
from .distributed.rearrange import fetch_all
from .fold import Fold
from .operand import Operand, Result, as_groups, as_slice


class Leaf(NamedTuple):
    """The operands of one leaf of a call's pytree.

    **Arguments**

    - `operands`: each stacked (R, *batch, *s), or a list of R arrays (*batch, *s), of the
      replicas that are here; or an `Operand`.
    - `batch_ndim`: how many axes belong to other mapped axes.
    - `batch_offset`: the linear index of the batch entries over the other mapped axes, for
      stochastic rounding; None counts them from 0.
    - `layout`: where the group's members are; None where all are here.
    - `varies`: for each operand whether it differs between instances; None: all do.
    - `scalar_size`: the size of a group, where the operand is a Python number of all replicas.
    - `finish`: converts the results to the caller's; None returns them as they are.
    - `axes`: the axis entries of the replicas, and of the batch axes, for records; None where the
      replicas are numbered without axes.
    """

    operands: Sequence[Any]
    batch_ndim: int = 0
    batch_offset: Any = None
    layout: Layout | None = None
    varies: tuple[bool, ...] | None = None
    scalar_size: int | None = None
    finish: Callable[[list[Result]], list[Any]] | None = None
    axes: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None


class Resolved(NamedTuple):
    """A call whose groups are checked, whose reduction is settled, and whose leaves are numbered.

    `number` is the call number of the first leaf; see `gpusim.reduction`.
    """

    name: str
    collective: Definition
    parameters: Mapping[str, Any]
    groups: Groups | None
    reduction: Reduction | None
    number: int


RecordCall = Callable[[Resolved, Leaf, int, Sequence[Operand]], Callable[[list[Result]], None]]

record_call: RecordCall | None = None
"""Called with each leaf that is about to run, its call's number and its operands; it returns what
is called with the results. None: nothing is recorded. See `gpusim.maps.records`."""


def resolve(call: Call, groups: Groups | None, leaves: int, number: int | None = None) -> Resolved:
    """Settle a call's reduction: the one given, or that of the context, where it is counted.

    **Raises**: TypeError for a reduction of another type; ValueError for one that does not sum,
    where the collective does.
    """
    collective, given = call.collective, call.reduction
    name = call.name or collective.name
    if not collective.folds:
        return Resolved(name, collective, call.parameters, groups, None, 0)
    if given is None:
        state = current()
        given = state.reduction
        number = state.next_calls(leaves) if number is None else number
    elif not isinstance(given, Reduction):
        given = as_reduction(given, f"{name}: reduction")
    if collective.op is not None and given.op != collective.op:
        raise ValueError(
            f"{name} needs a Reduction with op={collective.op!r}, got op={given.op!r}; "
            "gpusim.collectives.all_reduce takes any"
        )
    return Resolved(name, collective, call.parameters, groups, given, number or 0)


def run(
    call: Resolved, leaves: Iterable[Leaf], agreement: AbstractContextManager[Any] | None = None
) -> list[list[Any]]:
    """Run a collective on each leaf.

    **Arguments**: `leaves` may be made one by one while they run. `agreement` is a context that
    is entered when all instances make this call, see `agreed`; None where no others take part.

    **Returns** for each leaf its results (most collectives have one), finished as the leaf says.

    **Raises** the errors of the collective.
    """
    if agreement is not None:
        with agreement:
            return run(call, leaves)
    return [run_leaf(call, leaf, number) for number, leaf in enumerate(leaves, call.number)]


def run_leaf(call: Resolved, leaf: Leaf, number: int) -> list[Any]:
    """Run a collective on one leaf, whose call has this number: its results, as for `run`."""
    collective, layout = call.collective, leaf.layout
    if leaf.scalar_size is not None:
        assert collective.scalar is not None and leaf.finish is not None
        return leaf.finish([Result(collective.scalar(leaf.operands[0], leaf.scalar_size), False)])
    operands = []
    for name, values in zip(collective.operand_names, leaf.operands, strict=True):
        is_operand = type(values) is Operand
        operands.append(values if is_operand else Operand(values, leaf.batch_ndim, name))
    options = {**call.parameters}
    if collective.groups is not None:
        options["groups"] = call.groups
    if call.reduction is not None:
        options["fold"] = Fold(call.reduction, number, leaf.batch_offset)
    recorded = None if record_call is None else record_call(call, leaf, number, operands)
    held = operands[0].dtype
    bits = collective.moves and lacks_kernels(held) and on_device(operands[0].array)
    if bits:
        operands[0] = operands[0].view(f"u{held.itemsize}")
    assert collective.local is not None
    if layout is None:
        results = collective.local(*operands, **options)
    else:
        if leaf.varies is not None and collective.operands > 1:
            for operand, varies in zip(operands, leaf.varies, strict=True):
                operand.varies = varies
        with layout.channel():
            layout.engine.prepare(operands[0].array)
            if collective.distributed is None:
                results = _gather_and_run(collective.local, layout, operands, options)
            else:
                results = collective.distributed(layout, *operands, **options)
    found = [results] if type(results) is Result else list(results)
    if bits:
        found = _view(found, held)
    if recorded is not None:
        recorded(found)
    return found if leaf.finish is None else leaf.finish(found)


def _view(results: Sequence[Result], dtype: np.dtype[Any]) -> list[Result]:
    """The results with their bits in another dtype of the same width."""
    return [
        Result([part.view(dtype) for part in value], mapped)
        if isinstance(value, list)
        else Result(value.view(dtype), mapped)
        for value, mapped in results
    ]


def _gather_and_run(
    local: Callable[..., Any], layout: Layout, operands: list[Operand], options: dict[str, Any]
) -> list[Result]:
    """The plan of a collective without one: all values come here, and the local part is kept."""
    whole = [
        Operand(fetch_all(layout, operand), operand.batch_ndim, operand.collective)
        for operand in operands
    ]
    results = local(*whole, **options)
    return [
        Result(_local_part(layout, value) if mapped else value, mapped)
        for value, mapped in ([results] if type(results) is Result else results)
    ]


def _local_part(layout: Layout, value: Any) -> Any:
    """The entries of this instance's members, in the form and the library of the value."""
    members = layout.local.tolist()
    evenly = as_slice(members)
    if evenly is not None:
        return value[evenly]
    rows = [value[member] for member in members]
    return rows if isinstance(value, list) else call_on_bits(np.stack, rows)


# The terms that all callers have to agree on


class OperandKind(NamedTuple):
    """The dtype and shape of one replica's operand; "Python int" and so on for numbers."""

    dtype: str
    shape: tuple[int, ...]

    def __repr__(self) -> str:
        return self.dtype if self.dtype.startswith("Python") else f"{self.dtype}{list(self.shape)}"


def describe(call: Resolved, kinds: Sequence[OperandKind], **terms: Any) -> dict[str, Any]:
    """All that must be the same on all replicas and instances, by the name in error messages."""
    return {
        "collective": f"lax.{call.name}",
        "arguments": dict(call.parameters),
        "groups": call.groups,
        "reduction": call.reduction,
        "shapes and dtypes": [*kinds],
        "number of summing collectives before": call.number,
        **terms,
    }


@contextmanager
def agreed(
    world: World,
    terms: Mapping[str, Any],
    *,
    over: str = "",
    line: str = "",
    tag: int = MAIN_TAG,
    within: int | None = None,
) -> Iterator[None]:
    """A block that runs when all instances make this call.

    **Arguments**: `terms` as `describe` makes them; `over` and `line` say over which axes and where
    in the program, for messages. `tag` is the channel, `within` the one on which to agree, if it
    is another.

    **Raises**: CollectiveMismatchError or InstanceError where they do not.
    """
    kinds = ", ".join(map(repr, terms["shapes and dtypes"]))
    text = f"{terms['collective']}{over} of {kinds}{line}"
    said = {name: repr(value) for name, value in terms.items()}
    with world.call(text, said, tag, within=within):
        yield


# Calls on stacked arrays


def run_leaves(
    call: Call,
    leaves: Sequence[tuple[Any, ...]],
    world: World | None,
    batch_ndim: int = 0,
    number: int | None = None,
    batch_offset: Any = None,
) -> list[list[Result]]:
    """Run a call on leaves of stacked arrays, each of which counts as a call.

    **Arguments**: `world` says which instances hold the replicas; None: all are here. The call's
    own operands are not looked at.

    **Returns** for each leaf its results.
    """
    collective = call.collective
    layout = None if world is None or world.instances == 1 else Layout.of_world(world)
    ready = []
    for leaf in leaves:
        operands = []
        for name, values in zip(collective.operand_names, leaf, strict=True):
            operands.append(Operand.of(values, batch_ndim, name))
        ready.append(Leaf(operands, batch_ndim, batch_offset, layout))
    size = ready[0].operands[0].size if layout is None else layout.size
    groups = as_groups(call.groups, size, collective.name, uneven=collective.groups == "any")
    resolved = resolve(call, groups, len(leaves), number)
    if layout is None:
        return run(resolved, ready)
    kinds = []
    for leaf in ready:
        for operand in leaf.operands:
            if operand.size != len(layout.local):
                raise ValueError(
                    f"{operand.collective} inside `with world` takes the values of this "
                    f"instance's {len(layout.local)} replicas, got {operand.size}"
                )
            kinds.append(OperandKind(str(operand.dtype), operand.batch_shape + operand.shape))
    return run(resolved, ready, agreed(layout.world, describe(resolved, kinds)))
