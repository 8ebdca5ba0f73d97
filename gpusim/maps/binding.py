"""From a collective's call inside a map to its definition on stacked arrays, and back.

In lockstep frames the operands are stacked already; in threaded frames the replicas' threads meet,
and the last to arrive computes for all.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .. import reduction as reductions
from ..collectives import Result
from ..collectives import distributed as across
from ..libraries import reshaped_view
from ..runtime.world import CHANNELS, MAIN_TAG
from .arguments import as_array, read_only, root_of
from .frames import Axes, AxisName, Frame, environment, lockstep_environment, resolve, union
from .mapped_array.align import common_axes, lead_full, library_here, sizes
from .mapped_array.array import Array, MappedArray, unpack, wrap
from .routes import caller
from .scheduler import current_task, enclosing_task
from .streams import Arrival, Rendezvous, arrive

#: Values of at most so many bytes are compared between instances where they must be equal.
SMALL_VALUE = 4096

#: How a number that another instance has sent is read.
NUMBERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "complex": complex}

Stacked = tuple[Array, Axes]  # data whose leading axes are the given ones


@dataclass(frozen=True)
class Collective:
    """One collective, as a frontend asks for it.

    Attributes:
        name: what the user called, for messages.
        definition: the function of `gpusim.collectives`.
        arguments: its positional arguments after the operands (perm, split_axis, ...).
        options: its keyword arguments.
        folds: True where the definition takes reduction=, call= and places= and counts as a summing
            collective.
        identity: what a fold over no elements gives in a dtype, for positional axes of size 0.
        scalar: where the collective of a Python number is one, (number, group size) -> number, for
            replicas that hold the same number.
    """

    name: str
    definition: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    folds: bool = False
    scalar: Callable[[Any, int], Any] | None = None
    identity: Callable[[np.dtype[Any]], Any] | None = None

    def reducing(self, reduction: reductions.Reduction) -> Collective:
        """The same collective with this reduction (dataclasses.replace takes far longer)."""
        return Collective(
            self.name,
            self.definition,
            self.arguments,
            {**self.options, "reduction": reduction},
            self.folds,
            self.scalar,
            self.identity,
        )


def split_names(axis_name: AxisName) -> tuple[AxisName, ...]:
    """The axis names as a tuple: one name, or a tuple or list of names (and positional axes)."""
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(
                f"axis_name {axis_name!r} names {name!r} twice; each axis may come once"
            )
    return names


def resolve_names(axis_name: AxisName) -> list[Frame]:
    """The frames of one axis name or a tuple of them, in the tuple's order; NameError if
    unbound."""
    return [resolve(name) for name in split_names(axis_name)]


def axis_size(axis_name: AxisName) -> int:
    """The number of replicas along one axis, or a tuple of them."""
    return math.prod(frame.total for frame in resolve_names(axis_name))


def axis_index(axis_name: AxisName) -> Any:
    """int32 index of each replica along one axis, or row-major along a tuple of them."""
    frames = resolve_names(axis_name)
    here = library_here()
    index: Any = np.zeros((), np.int32)
    for frame in frames:
        first, end = frame.offset, frame.offset + frame.size
        own: Any = (
            wrap(np.arange(first, end, dtype=np.int32, like=here), (frame,))
            if frame.index is None
            else np.asarray(frame.offset + frame.index, np.int32)
        )
        index = own if len(frames) == 1 else index * np.int32(frame.total) + own
    if lockstep_environment() and not isinstance(index, MappedArray):
        return wrap(np.asarray(index), ())
    return index if isinstance(index, MappedArray) else np.int32(index)


def is_scalar(value: Any) -> bool:
    """Whether `value` is a Python number, of which psum is size times the number.

    A bool is none: it is summed as int32, as an array.
    """
    return type(value) in (int, float, complex)


# The lockstep case, which the threaded one is brought to.


@dataclass(frozen=True)
class Place:
    """Where a collective runs: its frames in the order of the axis names, and all frames around."""

    frames: tuple[Frame, ...]
    environment: Axes


def _members(operand: Stacked, frames: tuple[Frame, ...], batch: Axes) -> Array | list[Array]:
    """The operand as a definition takes it: (R, *batch, *s), or a list of R views where that would
    copy."""
    data, axes = operand
    if axes == frames and not batch:
        return data if len(frames) == 1 else _merge_axes(data, frames)
    stacked_axes = sorted((*frames, *batch), key=lambda frame: frame.depth)
    full = lead_full(wrap(data, axes), tuple(stacked_axes))
    order = [stacked_axes.index(frame) for frame in (*frames, *batch)]
    full = full.transpose(*order, *range(len(order), full.ndim))
    return full if len(frames) == 1 else _merge_axes(full, frames)


def _merge_axes(full: Array, frames: tuple[Frame, ...]) -> Array | list[Array]:
    """The leading axes of several frames as one, or a list where that would copy."""
    count = math.prod(sizes(frames))
    rest = full.shape[len(frames) :]
    try:
        return reshaped_view(full, (count, *rest))
    except ValueError:
        return [full[place] for place in np.ndindex(*sizes(frames))]


def _unstack(result: Result, frames: tuple[Frame, ...], batch: Axes) -> Stacked:
    """A definition's result, its mapped axes in their order of depth."""
    value, mapped = result
    if not mapped:
        return value, batch
    if isinstance(value, list):
        value = np.stack(value)
    axes = (*frames, *batch)
    if len(axes) == 1:
        return value, axes
    value = value.reshape(sizes(frames) + value.shape[1:])
    order = sorted(range(len(axes)), key=lambda place: axes[place].depth)
    if order != list(range(len(axes))):
        value = value.transpose(*order, *range(len(order), value.ndim))
    return value, tuple(axes[place] for place in order)


def _batch_axes(axes: Axes, place: Place, stochastic: bool) -> Axes:
    """The other mapped axes that a collective runs along.

    Stochastic rounding draws other bits for each place, so there operands are broadcast over all
    axes.
    """
    if stochastic:
        axes = union(axes, tuple(frame for frame in place.environment if frame.index is None))
    return tuple(frame for frame in axes if frame not in place.frames)


def _places(place: Place, batch: Axes) -> Any:
    """The linear index over all mapped axes but the collective's own, outermost first, along
    `batch`."""
    index: Any = 0
    for frame in place.environment:
        if frame in place.frames:
            continue
        if frame.index is not None and frame not in batch:
            index = index * frame.total + frame.offset + frame.index
        elif frame in batch:
            shape = [frame.size if frame is other else 1 for other in batch]
            here = np.arange(frame.offset, frame.offset + frame.size)
            index = index * frame.total + here.reshape(shape)
        else:
            index = index * frame.total
    return index


def _options(collective: Collective, place: Place, batch: Axes, call: int) -> dict[str, Any]:
    options = {**collective.options, "batch_ndim": len(batch)}
    if collective.folds:
        options["call"] = call
        options["places"] = _places(place, batch) if _is_stochastic(collective) else 0
    return options


def _is_stochastic(collective: Collective) -> bool:
    chosen = collective.options.get("reduction")
    return collective.folds and chosen is not None and chosen.rounding == "stochastic"


def run_lockstep(
    collective: Collective, operands: Sequence[Stacked], place: Place, call: int
) -> list[Stacked]:
    """Run a definition on operands stacked over any axes; the results' axes come in order of
    depth."""
    axes: Axes = ()
    for _, own in operands:
        axes = union(axes, own)
    batch = _batch_axes(axes, place, _is_stochastic(collective))
    shared = _shared(place.frames)
    if shared is not None and shared not in axes:
        return _run_on_equals(collective, operands, place, call, shared)
    members = [_members(operand, place.frames, batch) for operand in operands]
    varies = [shared in own for _, own in operands]
    options = _options(collective, place, batch, call)
    results = _define(collective, members, place, options, varies)
    return [_unstack(result, place.frames, batch) for result in results]


def _shared(frames: Sequence[Frame]) -> Frame | None:
    """The axis that instances share out, if it is one of these."""
    return next((frame for frame in frames if frame.share is not None), None)


def _run_on_equals(
    collective: Collective, operands: Sequence[Stacked], place: Place, call: int, shared: Frame
) -> list[Stacked]:
    """Operands that do not vary along the axis that instances share are here already, as many as
    there are replicas: each instance computes all of it."""
    whole = Frame(shared.name, shared.total, shared.depth)

    def exchanged(axes: Axes, old: Frame, new: Frame) -> Axes:
        return tuple(new if frame is old else frame for frame in axes)

    everywhere = Place(
        exchanged(place.frames, shared, whole), exchanged(place.environment, shared, whole)
    )
    results = []
    for data, axes in run_lockstep(collective, operands, everywhere, call):
        if whole in axes:
            own = [slice(None)] * axes.index(whole)
            data = data[(*own, slice(shared.offset, shared.offset + shared.size))]
        results.append((data, exchanged(axes, whole, shared)))
    return results


def _define(
    collective: Collective,
    members: list[Any],
    place: Place,
    options: dict[str, Any],
    varies: Sequence[bool],
) -> list[Result]:
    """Run a definition, across instances where they share one of the axes."""
    if _shared(place.frames) is None:
        results = collective.definition(*members, *collective.arguments, **options)
    else:
        results = across.run(
            collective.definition,
            _spread(place),
            varies,
            *members,
            *collective.arguments,
            **options,
        )
    return _as_list(results)


def _as_list(results: Any) -> list[Result]:
    return [results] if isinstance(results, Result) else list(results)


def _spread(place: Place, tag: int | None = None) -> across.Spread:
    """How the group's members, in the order of the axis names, lie over the instances."""
    (axis,) = (number for number, frame in enumerate(place.frames) if frame.share is not None)
    share = place.frames[axis].share
    assert share is not None
    totals = tuple(frame.total for frame in place.frames)
    tag = _channel(place.environment, place.frames) if tag is None else tag
    return across.Spread(share.world, totals, axis, share.counts, tag)


def _channel(around: Axes, group: Sequence[Frame]) -> int:
    """A number for the threads that meet: other ones for those that meet at the same time."""
    number = 0
    for frame in around:
        if frame.index is not None and frame not in group:
            number = number * (frame.size + 1) + frame.index + 1
    return number % CHANNELS


# Positional axes are mapped axes for the time of one collective.


def is_positional(name: AxisName) -> bool:
    """Whether a collective's axis name stands for an axis of the array itself."""
    return isinstance(name, (int, np.integer)) and not isinstance(name, bool)


def _expose_positional(
    collective: Collective,
    names: tuple[AxisName, ...],
    bound_frames: Sequence[Frame],
    operand: Stacked,
    depth: int,
) -> tuple[Stacked, tuple[Frame, ...]]:
    """The operand with its positional axes leading as frames of their own, and the frames of all
    names."""
    data, axes = operand
    ndim = data.ndim - len(axes)
    named = iter(bound_frames)
    frames: list[Frame] = []
    sources: list[int] = []
    for name in names:
        if not is_positional(name):
            frames.append(next(named))
            continue
        source = int(name) + len(axes)  # type: ignore[call-overload]  # an integer, by is_positional
        if not len(axes) <= source < data.ndim:
            raise ValueError(
                f"axis_name {names!r} has the positional axis {name}, but the array of shape "
                f"{data.shape[len(axes) :]} has axes 0 to {ndim - 1}"
            )
        if data.shape[source] == 0 and collective.identity is not None:
            shape = (*data.shape[:source], 1, *data.shape[source + 1 :])
            data = np.full_like(data, collective.identity(data.dtype), shape=shape)
        frames.append(Frame(None, data.shape[source], depth + len(sources)))
        axes = (*axes, frames[-1])
        sources.append(source)
    if sources:
        start = len(axes) - len(sources)
        data = np.moveaxis(data, sources, range(start, len(axes)))
    return (data, axes), tuple(frames)


def _run_leaf(
    collective: Collective,
    names: tuple[AxisName, ...],
    frames: Sequence[Frame],
    operands: Sequence[Stacked],
    around: Axes,
    call: int,
) -> list[Stacked]:
    exposed = [
        _expose_positional(collective, names, frames, operand, len(around)) for operand in operands
    ]
    place = Place(exposed[0][1], around)
    return run_lockstep(collective, [operand for operand, _ in exposed], place, call)


# Calls from the frontends.


def bind(
    collective: Collective,
    leaves: Sequence[tuple[Any, ...]],
    axis_name: AxisName,
    structure: Any = None,
) -> list[tuple[Any, ...]]:
    """Run a collective for each leaf of a tree.

    Args:
        collective: what to run.
        leaves: for each leaf the operands (most collectives have one).
        axis_name: one name or a tuple of names; integers are positional axes of the operands.
        structure: the tree's structure, to be compared between replicas.

    Returns:
        For each leaf its results (most collectives have one).

    Raises:
        NameError: for an axis name that is not bound.
    """
    names = split_names(axis_name)
    frames = [resolve(name) for name in names if not is_positional(name)]
    if not names:
        return [tuple(_lift(operand) for operand in operands) for operands in leaves]
    call = 0
    if collective.folds and collective.options["reduction"] is None:
        state = reductions.current()
        collective = collective.reducing(state.reduction)
        call = state.next_calls(len(leaves))
    ready = [_ready(operands, collective) for operands in leaves]
    around = environment()
    threaded = any(frame.index is not None for frame in frames)
    if not threaded and _shared(frames) is None:
        return _run_leaves(collective, names, frames, ready, around, call)
    offer = Offer(collective, names, frames, ready, around, call, structure, _line(frames))
    if threaded:
        return _meet(offer)
    with _together(offer):
        return _run_leaves(collective, names, frames, ready, around, call)


def _run_leaves(
    collective: Collective,
    names: tuple[AxisName, ...],
    frames: list[Frame],
    ready: list[list[Any]],
    around: Axes,
    call: int,
) -> list[tuple[Any, ...]]:
    results: list[tuple[Any, ...]] = []
    for number, operands in enumerate(ready):
        if is_scalar(operands[0]):
            results.append((_fold_equal_scalars(collective, operands[0], frames),))
            continue
        out = _run_leaf(collective, names, frames, operands, around, call + number)
        results.append(tuple(_deliver(data, axes, around) for data, axes in out))
    return results


def _ready(operands: tuple[Any, ...], collective: Collective) -> list[Any]:
    """Operands as stacked data, but for Python numbers of which the collective makes Python
    numbers."""
    if collective.scalar is not None and is_scalar(operands[0]) and _even_groups(collective):
        return [operands[0]]
    return [_stacked(operand, collective.name) for operand in operands]


def _even_groups(collective: Collective) -> bool:
    groups = collective.options.get("groups")
    return groups is None or groups.even


def _fold_equal_scalars(collective: Collective, value: Any, frames: Sequence[Frame]) -> Any:
    groups = collective.options.get("groups")
    size = math.prod(frame.total for frame in frames) if groups is None else groups.group_size
    assert collective.scalar is not None
    return collective.scalar(value, size)


def _stacked(value: Any, what: str) -> Stacked:
    if isinstance(value, MappedArray):
        return unpack(value)
    return as_array(value, f"{what}'s operand"), ()


def _lift(value: Any) -> Any:
    if isinstance(value, MappedArray) or is_scalar(value) or not lockstep_environment():
        return value
    return wrap(read_only(as_array(value, "operand")), ())


def _deliver(data: Array, axes: Axes, around: Axes) -> Any:
    """A result as the code around sees it: wrapped under vmap, else a plain read-only array."""
    if any(frame.index is None for frame in around):
        return wrap(data, axes)
    return read_only(np.asarray(data) if isinstance(data, np.generic) else data)


# Threads: the replicas meet, and the last to arrive computes for all.


@dataclass(frozen=True)
class Offer:
    """What one replica brings to a meeting."""

    collective: Collective
    names: tuple[AxisName, ...]
    frames: list[Frame]
    leaves: list[list[Any]]
    around: Axes
    call: int
    structure: Any
    line: str = ""  # where it is called, if instances share an axis
    arrival: Arrival | None = None  # of a replica on a GPU

    @property
    def threads(self) -> Axes:
        """The threaded frames that the collective spans, outermost first."""
        return tuple(f for f in self.around if f.index is not None and f in self.frames)

    def terms(self) -> dict[str, Any]:
        """What must be the same on all replicas, by the name that an error message gives it."""
        return {
            "collective": f"lax.{self.collective.name}",
            "axis_name": self.names,
            "arguments": self.collective.arguments,
            "options": self.collective.options,
            "axes around": tuple((frame.name, frame.total) for frame in self.around),
            "tree": self.structure,
            "shapes and dtypes": [_kind(o) for operands in self.leaves for o in operands],
            "number of summing collectives before": self.call,
        }


class Kind(NamedTuple):
    """What replicas must agree on of an operand: "int64", or "Python int", and the shape."""

    dtype: str
    shape: tuple[int, ...]

    def __repr__(self) -> str:
        return self.dtype if self.dtype.startswith("Python") else f"{self.dtype}{list(self.shape)}"


def _line(frames: Sequence[Frame]) -> str:
    return caller() if _shared(frames) is not None else ""


@contextmanager
def _together(offer: Offer) -> Iterator[None]:
    """A block that runs when all instances that share an axis make this call.

    Raises:
        CollectiveMismatchError, InstanceError: where they do not.
    """
    shared = _shared(offer.frames)
    if shared is None:
        yield
        return
    assert shared.share is not None
    offered = offer.terms()
    kinds = ", ".join(map(repr, offered["shapes and dtypes"]))
    over = repr(offer.names[0]) if len(offer.names) == 1 else repr(offer.names)
    text = f"lax.{offer.collective.name} over {over} of {kinds} at {offer.line}"
    values = [_unvaried(o, shared) for operands in offer.leaves for o in operands]
    offered["values of what all replicas share"] = values
    terms = {name: repr(value) for name, value in offered.items()}
    tag = _channel(offer.around, offer.frames)
    task = enclosing_task()
    if task is None:
        with shared.share.world.call(text, terms, tag):
            yield
        return
    # Where one replica runs at a time it keeps its turn, so that all takes the same path always;
    # instances that meet in another order must learn it, or they would wait for each other.
    one = task.run.scheduler.one_at_a_time
    within = MAIN_TAG if one else None
    with task.elsewhere(), shared.share.world.call(text, terms, tag, within=within):
        yield


def _unvaried(operand: Any, shared: Frame) -> Any:
    """What is to be the same on all instances of a small operand that does not vary along their
    axis. (Python numbers of threads may differ.)"""
    if not isinstance(operand, tuple):
        return operand if shared.index is None else None
    data, axes = operand
    if shared in axes or shared.index is not None or not isinstance(data, np.ndarray):
        return None
    return zlib.crc32(data.tobytes()) if data.nbytes <= SMALL_VALUE else None


def _kind(operand: Any) -> Kind:
    if not isinstance(operand, tuple):
        return Kind(f"Python {type(operand).__name__}", ())
    data, axes = operand
    return Kind(str(data.dtype), tuple(data.shape[len(axes) :]))


def _meet(offer: Offer) -> list[tuple[Any, ...]]:
    task = current_task()
    arrival = None if task.lane is None else arrive(task.lane)
    if arrival is not None:
        offer = replace(offer, arrival=arrival)
    compute = _compute_on_streams if task.run.streams else _compute_for_all
    found = task.meet(offer.threads, offer.around, offer.terms(), offer, compute)
    if arrival is not None:
        arrival.depart()
    return found


def _compute_on_streams(offers: list[Offer]) -> list[list[tuple[Any, ...]]]:
    """The same for replicas of which some are on GPUs: their values meet on one of these."""
    if all(offer.arrival is None for offer in offers):
        return _compute_for_all(offers)
    meeting = Rendezvous([offer.arrival for offer in offers])
    with meeting.held():
        results = _compute_for_all(_on_one_gpu(offers, meeting))
        flat = [
            (value, replica)
            for replica, leaves in enumerate(results)
            for leaf in leaves
            for value in leaf
        ]
        values = iter(meeting.hand_out(flat))
        return [[tuple(next(values) for _ in leaf) for leaf in leaves] for leaves in results]


def _on_one_gpu(offers: list[Offer], meeting: Rendezvous) -> list[Offer]:
    """The offers with all operands on the meeting's GPU."""
    found = [[list(operands) for operands in offer.leaves] for offer in offers]
    for number, operands in enumerate(offers[0].leaves):
        for k, operand in enumerate(operands):
            if isinstance(operand, tuple):  # else a Python number
                data = meeting.gather([offer.leaves[number][k][0] for offer in offers])
                for leaves, offer, moved in zip(found, offers, data, strict=True):
                    leaves[number][k] = moved, offer.leaves[number][k][1]
    return [replace(o, leaves=leaves) for o, leaves in zip(offers, found, strict=True)]


def _compute_for_all(offers: list[Offer]) -> list[list[tuple[Any, ...]]]:
    """Each replica's results, from all replicas' offers in row-major order of their threaded
    frames."""
    first = offers[0]
    with _together(first):
        per_leaf = [
            _compute_leaf(offers, number, first.call + number)
            for number in range(len(first.leaves))
        ]
    return [[results[replica] for results in per_leaf] for replica in range(len(offers))]


def _compute_leaf(offers: list[Offer], number: int, call: int) -> list[tuple[Any, ...]]:
    first = offers[0]
    leaves = [offer.leaves[number] for offer in offers]
    scalars = is_scalar(leaves[0][0])
    if scalars:
        values = [operands[0] for operands in leaves]
        shared = _shared(first.threads) is not None
        everyone = _numbers_of_all(first, values) if shared else values
        if all(value == everyone[0] for value in everyone):
            result = _fold_equal_scalars(first.collective, everyone[0], first.frames)
            return [(result,)] * len(offers)
        if shared and len(first.threads) == len(first.names):
            return _compute_numbers(first, everyone, call)
        leaves = [[(np.asarray(value), ())] for value in values]
    columns = [
        [_canonical(operands[k], first.around) for operands in leaves]
        for k in range(len(leaves[0]))
    ]
    threads = first.threads
    if len(threads) == len(first.names):
        results = _compute_from_lists(first, columns, call)
    else:
        results = _compute_stacked(first, columns, call)
    return [
        tuple(_hand_over(data, axes, offer, scalars) for data, axes in results[replica])
        for replica, offer in enumerate(offers)
    ]


def _numbers_of_all(first: Offer, values: list[Any]) -> list[Any]:
    """The Python numbers of all replicas, row-major in the order of the names of threaded axes."""
    frames = tuple(frame for frame in first.frames if frame.index is not None)
    spread = _spread(Place(frames, first.around), _channel(first.around, first.frames))
    order = _tuple_order(first.threads, frames)
    said = json.dumps([(type(values[r]).__name__, repr(values[r])) for r in order])
    everyone: list[Any] = [None] * spread.size
    with spread.channel():
        for held, text in zip(
            spread.held, across.all_gather_bytes(spread, said.encode()), strict=True
        ):
            for member, (kind, number) in zip(held.tolist(), json.loads(text), strict=True):
                everyone[member] = NUMBERS[kind](number)
    return everyone


def _compute_numbers(first: Offer, everyone: list[Any], call: int) -> list[tuple[Any, ...]]:
    """Each replica's result for the Python numbers of all instances: each computes it."""
    collective, threads = first.collective, first.threads
    place = Place(tuple(first.frames), first.around)
    spread = _spread(place)
    options = _options(collective, place, (), call)
    arrays = [np.asarray(value) for value in everyone]
    (result,) = _as_list(collective.definition(arrays, *collective.arguments, **options))
    out: list[tuple[Any, ...]] = [()] * math.prod(sizes(threads))
    for position, replica in enumerate(_tuple_order(threads, place.frames)):
        value = result.value[spread.mine[position]] if result.mapped else result.value
        out[replica] = (value.item(),)
    return out


def _canonical(operand: Stacked, around: Axes) -> Stacked:
    """The operand with its axes named by the first replica's frames (replicas bind their own)."""
    data, axes = operand
    return data, tuple(around[frame.depth] for frame in axes)


def _hand_over(data: Array, axes: Axes, offer: Offer, scalar: bool) -> Any:
    if scalar and not axes:
        return data.item()
    return _deliver(data, tuple(offer.around[frame.depth] for frame in axes), offer.around)


def _compute_from_lists(
    first: Offer, columns: list[list[Stacked]], call: int
) -> list[list[Stacked]]:
    """The common case: the group is the threads, and the definition takes their arrays as a
    list."""
    collective, threads = first.collective, first.threads
    place = Place(tuple(first.frames), first.around)
    axes: Axes = ()
    for column in columns:
        for _, own in column:
            axes = union(axes, own)
    batch = _batch_axes(axes, place, _is_stochastic(collective))
    order = _tuple_order(threads, place.frames)
    members = [[lead_full(wrap(*column[r]), batch) for r in order] for column in columns]
    options = _options(collective, place, batch, call)
    results = _define(collective, members, place, options, [True] * len(members))
    guard = _changeable_roots(members)
    shared = [None if r.mapped else _detach(r.value, guard) for r in results]
    out: list[list[Stacked]] = [[] for _ in order]
    for position, replica in enumerate(order):
        for result, common in zip(results, shared, strict=True):
            value = _detach(result.value[position], guard) if result.mapped else common
            out[replica].append((value, batch))
    return out


def _tuple_order(threads: Axes, frames: Sequence[Frame]) -> list[int]:
    """For each place in the group (row-major in the names' order) the replica in order of depth."""
    numbers = np.arange(math.prod(sizes(threads))).reshape(sizes(threads))
    return numbers.transpose([threads.index(frame) for frame in frames]).ravel().tolist()


def _changeable_roots(members: list[list[Array]]) -> set[int]:
    roots = set()
    for column in members:
        for array in column:
            root = root_of(array)
            if not isinstance(root, np.ndarray) or root.flags.writeable:  # a GPU's always are
                roots.add(id(root))
    return roots


def _detach(value: Array, guard: set[int]) -> Array:
    """A copy, if the replica that sent the value could still change it."""
    return value.copy() if guard and id(root_of(value)) in guard else value


def _compute_stacked(first: Offer, columns: list[list[Stacked]], call: int) -> list[list[Stacked]]:
    """Threads and lockstep axes in one group: stack the threads, run in lockstep, take apart."""
    threads = first.threads
    operands = [_stack_threads(column, threads) for column in columns]
    results = _run_leaf(first.collective, first.names, first.frames, operands, first.around, call)
    out = []
    for index in np.ndindex(*sizes(threads)):
        where = dict(zip(threads, index, strict=True))
        out.append([_take(data, axes, where) for data, axes in results])
    return out


def _stack_threads(column: list[Stacked], threads: Axes) -> Stacked:
    axes = common_axes(wrap(*operand) for operand in column)
    stacked = np.stack([lead_full(wrap(*operand), axes) for operand in column])
    stacked = stacked.reshape(sizes(threads) + stacked.shape[1:])
    mixed = (*threads, *axes)
    order = sorted(range(len(mixed)), key=lambda place: mixed[place].depth)
    stacked = stacked.transpose(*order, *range(len(order), stacked.ndim))
    return stacked, tuple(mixed[place] for place in order)


def _take(data: Array, axes: Axes, where: dict[Frame, int]) -> Stacked:
    index = tuple(where.get(frame, slice(None)) for frame in axes)
    return data[(*index, ...)], tuple(frame for frame in axes if frame not in where)
