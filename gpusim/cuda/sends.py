"""Folds with a wire, in levels, of divided members, and of integers: fallback.sends on a device.
A fold with a wire is one launch; exact ones and those of integers are a few."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gpusim.fallback import sends as fallback_sends
from gpusim.fallback import wires as fallback_wires
from gpusim.fallback.arguments import check_batch, check_batch_offset, check_cut, check_out
from gpusim.fallback.formats import FLOAT64, check_float
from gpusim.fallback.members import Members as HostMembers
from gpusim.fallback.orders import COMPENSATED, EXACT, FIXED
from gpusim.fallback.rounding import check_counter, check_places
from gpusim.fallback.sends import Level, Places, Rows, by_linear, fold_of_integers, plan_of
from gpusim.fallback.spec import FoldSpec, check_room
from gpusim.fallback.wires import WireInfo

from ..libraries import as_bits
from .device import Array, Device
from .folding import fold_members
from .layout import ALIGNMENT, MemberLayout, Members
from .sending import Held, SentLaunch, Task, fold_fixed, plan_sent, run_sent


class Fold(NamedTuple):
    """A fold of members of one layout, decided once.

    **Attributes**:

    - `plain`: the spec of a fold that `fold_members` does; else None.
    - `spec`, `divisor`: of level 0, whose members are divided by the latter.
    - `entries`, `size`: of the batch, and of a value.
    - `row`, `slices`: as of `Task`; `outer`: the rows that lie around a cut axis.
    - `result`: the result's dtype.
    - `contiguous`: whether each member is.
    - `task`: of a fold that is one launch; else None.
    - `launch`: that launch, if the members are not copied first.
    """

    plain: FoldSpec | None
    spec: FoldSpec
    divisor: int | None = None
    entries: int = 0
    size: int = 0
    row: int = 1
    slices: tuple[int, int] = (1, 1)
    outer: int = 1
    result: np.dtype[Any] = FLOAT64
    contiguous: bool = True
    task: Task | None = None
    launch: SentLaunch | None = None


def fold_sent(
    device: Device,
    spec: FoldSpec,
    members: Any,
    *,
    batch_ndim: int = 0,
    call: int = 0,
    batch_offset: Any = 0,
    out: Any = None,
) -> Array:
    """`fallback.sends.fold_sent` for arrays of `device`: the same arguments, errors and bits."""
    group = Members.of(members, device)
    layout = group.layout
    if _needs_host(spec):
        numbers = {"call": call, "batch_offset": batch_offset, "batch_ndim": batch_ndim}
        return _fold_on_host(device, spec, group, out, **numbers)
    fold = _plan(spec, layout, batch_ndim, device.busy_threads)
    if fold.plain is not None:
        numbers = {"call": call, "batch_offset": batch_offset}
        return fold_members(device, fold.plain, members, batch_ndim=batch_ndim, out=out, **numbers)
    call, places = check_counter("call", call), batch_offset
    if type(places) is not int or not 0 <= places < 2**64:
        batch = layout.shape[:batch_ndim]
        places = np.broadcast_to(check_batch_offset(places, batch), batch).reshape(-1)
    if out is not None:
        check_out(out, layout.shape, fold.result)
    if not fold.entries or not fold.size:
        return device.empty(layout.shape, fold.result) if out is None else out
    if fold.launch is not None:
        total = run_sent(
            device, fold.launch, Held(layout, group.base, group.pointers), call, places
        )
        return _given(total.reshape(layout.shape), out)
    if not fold.contiguous:
        group = group.contiguous(device)
    if fold.outer > 1:
        group = _slices_first(device, group, fold)
    if fold.task is not None:
        total = _launch(device, fold.task, _held(group, fold), call, places)
    else:
        if isinstance(places, int):
            places = np.full(fold.entries, places, np.uint64)
        level = DeviceLevel(device, fold, call)
        total = level.fold(_rows(group, fold), places)
    if fold.outer > 1:
        shape = fold.entries, fold.slices[0], fold.outer, fold.slices[1]
        total = device.contiguous(total.reshape(shape).swapaxes(1, 2))
    return _given(total.reshape(layout.shape), out)


def _needs_host(spec: FoldSpec) -> bool:
    """Whether a level's wire has scales that only NumPy's kernels have."""
    level: FoldSpec | None = spec
    while level is not None:
        if level.wire is not None and not level.wire.is_compiled:
            return True
        level = level.across
    return False


def _fold_on_host(
    device: Device, spec: FoldSpec, group: Members, out: Any, **numbers: Any
) -> Array:
    """The fold by NumPy's kernels, of copies; it waits for the device."""
    arrays = [device.download(array) for array in group.arrays]
    members = arrays[0] if group.pointers is None else arrays
    folded = fallback_sends.fold_sent(spec, HostMembers.of(members), **numbers)
    total = device.upload(folded)
    if out is None:
        return total
    check_out(out, folded.shape, folded.dtype)
    return _given(total, out)


def _given(total: Array, out: Any) -> Array:
    """The result, in `out` if that is not None."""
    if out is None:
        return total
    as_bits(out)[...] = as_bits(total)
    return out


@lru_cache(maxsize=4096)
def _plan(spec: FoldSpec, layout: MemberLayout, batch_ndim: int, busy_threads: int) -> Fold:
    """Check a fold's arguments, and decide how it is done."""
    dtype, shape, count = layout.dtype, layout.shape, layout.number
    plain = fold_of_integers(spec, dtype, shape, batch_ndim)
    if plain is not None:
        return Fold(plain, spec)
    check_room(spec, count)
    divisor = spec.divisor if spec.divide == "members" and count > 1 else None
    if not (spec.wire or spec.groups_of or spec.order == FIXED or divisor):
        return Fold(spec.plain, spec)
    check_batch(batch_ndim, shape)
    batch, value = shape[:batch_ndim], shape[batch_ndim:]
    entries, size, row = math.prod(batch), math.prod(value), value[-1] if value else 1
    result = np.dtype(spec.out_dtype or dtype)
    slices, outer = (1, size), 1
    if spec.cut_axis is not None and not spec.groups_of:
        length = check_cut(spec.cut_axis, value, count)
        outer = math.prod(value[: spec.cut_axis])
        if outer > 1:
            slices = count, length * math.prod(value[spec.cut_axis + 1 :])
        row //= count if spec.cut_axis == len(value) - 1 else 1
    level = replace(spec, cut_axis=None, out_dtype=result, divide="result", stream=0)
    if divisor is not None:
        level = replace(level, divisor=None)
    fold = Fold(None, level, divisor, entries, size, row, slices, outer, result)
    fold = fold._replace(contiguous=_is_contiguous(layout))
    if spec.groups_of is not None or count == 1 or not entries or not size:
        return fold
    task = Task("fold", level, dtype, count, 0, row, 0, slices, divisor)
    if not _is_one_launch(task, (entries, size)):
        return fold
    launch = None
    if fold.contiguous and outer == 1:
        launch = plan_sent(task, _by_entry(layout, fold), busy_threads)
    return fold._replace(task=task, launch=launch)


def _is_contiguous(layout: MemberLayout) -> bool:
    expected = layout.dtype.itemsize
    for length, stride in zip(reversed(layout.shape), reversed(layout.strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _is_one_launch(task: Task, shape: tuple[int, int]) -> bool:
    """Whether a fold is, with the sending of its result."""
    spec, wire = task.spec, task.spec.wire
    order = plan_of(spec, task.dtype, task.members, shape).order
    if spec.order == FIXED or order in (EXACT, *COMPENSATED):
        return False
    sends = wire is not None and (wire.at_hops or wire.at_members)
    return sends or task.divisor is not None or task.slices[0] > 1


def _held(group: Members, fold: Fold) -> Held:
    """The members, each of the shape (entries, size)."""
    return Held(_by_entry(group.layout, fold), group.base, group.pointers)


def _by_entry(layout: MemberLayout, fold: Fold) -> MemberLayout:
    strides = fold.size * layout.dtype.itemsize, layout.dtype.itemsize
    return layout._replace(shape=(fold.entries, fold.size), strides=strides)


def _rows(group: Members, fold: Fold) -> Rows:
    """The members as arrays of that shape: stacked, or a list."""
    if group.pointers is None:
        return group.arrays[0].reshape(group.layout.number, fold.entries, fold.size)
    return [array.reshape(fold.entries, fold.size) for array in group.arrays]


def _slices_first(device: Device, group: Members, fold: Fold) -> Members:
    """Copies whose elements lie slice by slice of the axis that is cut."""
    shape = fold.entries, fold.outer, *fold.slices
    if group.pointers is None:
        stacked = group.arrays[0].reshape(group.layout.number, *shape).swapaxes(2, 3)
        return Members.of(device.contiguous(stacked), device)
    arrays = [array.reshape(shape).swapaxes(1, 2) for array in group.arrays]
    return Members.of([device.contiguous(array) for array in arrays], device)


def _launch(device: Device, task: Task, held: Held, call: int, places: Any) -> Array:
    return run_sent(device, plan_sent(task, held.layout, device.busy_threads), held, call, places)


def round_to_wire(
    device: Device,
    x: Any,
    wire: WireInfo,
    *,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 1,
    call: int = 0,
    place: Any = 0,
    batch_ndim: int = 0,
) -> Array:
    """`fallback.wires.round_to_wire` for arrays of `device`: the same arguments and bits."""
    check_float("x", x.dtype)
    if not wire.is_compiled:
        numbers = {"rounding": rounding, "seed": seed, "step": step, "call": call}
        given = {"place": place, "batch_ndim": batch_ndim, **numbers}
        return device.upload(fallback_wires.round_to_wire(device.download(x), wire, **given))
    batch, value = x.shape[:batch_ndim], x.shape[batch_ndim:]
    common, listed = check_places(place, batch)
    step, call = check_counter("step", step), check_counter("call", call)
    if not math.prod(x.shape):
        return device.empty(x.shape, x.dtype)
    array = device.contiguous(x).reshape(math.prod(batch), math.prod(value))
    spec = FoldSpec(wire=wire, seed=seed, out_dtype=x.dtype)
    task = Task("message", spec, x.dtype, 1, row=value[-1] if value else 1, step=step)
    places = common if listed is None else listed.reshape(-1)
    return _launch(device, task, _one(device, array), call, places).reshape(x.shape)


def _one(device: Device, array: Array) -> Held:
    """An array of the shape (entries, elements) as the one member."""
    base = device.pointer(array)
    layout = MemberLayout(1, array.shape, array.strides, array.dtype, 0, base % ALIGNMENT, 16)
    return Held(layout, base, None)


class DeviceLevel(Level):
    """One level of a fold, on a device."""

    def __init__(
        self, device: Device, fold: Fold, call: int, number: int = 0, first: int = 0
    ) -> None:
        super().__init__(fold.spec, call, fold.row, None, number, first, fold.divisor)
        self.device, self._fold = device, fold

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.device.empty(shape, dtype)

    def copy(self, source: Array, target: Array) -> None:
        as_bits(target)[...] = as_bits(source)

    def above(self, spec: FoldSpec, first: int) -> DeviceLevel:
        fold = Fold(None, spec, row=self.row)
        return DeviceLevel(self.device, fold, self.call, self.number + 1, first)

    # DeviceRun has a run's interface, and holds its totals on the device.
    def run(self, spec: FoldSpec, rows: Rows, places: Places) -> DeviceRun:  # type: ignore[override]
        return DeviceRun(self, spec, rows, places)

    def fold_plain(self, spec: FoldSpec, rows: Rows, places: Places) -> Array:
        return fold_members(
            self.device, spec, rows, batch_ndim=1, call=self.call, batch_offset=places
        )

    def fold_lone(self, spec: FoldSpec, row: Array, places: Places) -> Array:
        task = self.task("lone", spec, row.dtype, 2)
        return _launch(self.device, task, _one(self.device, row), self.call, places)

    def _fold_one(self, spec: FoldSpec, rows: Rows, places: Places) -> Array:
        spec = replace(spec, stream=2 * self.number)
        if len(rows) == 1 and spec.order == FIXED and spec.divisor is not None:
            plain = replace(by_linear(spec), accumulate=FLOAT64)  # in which its means are divided
            return self.fold_plain(plain, rows, places)
        if len(rows) == 1 or not (spec.wire or spec.order == FIXED or self.divisor):
            return self.fold_plain(by_linear(spec), rows, places)
        return self.run(spec, rows, places).result()

    def task(self, kind: str, spec: FoldSpec, dtype: np.dtype[Any], count: int) -> Task:
        place = self.number, self.row, self.first
        return Task(kind, spec, dtype, count, *place, self._slices, self.divisor)

    @property
    def _slices(self) -> tuple[int, int]:
        return self._fold.slices


class DeviceRun:
    """A fold without levels whose members are sent or divided, or whose result is."""

    def __init__(self, level: DeviceLevel, spec: FoldSpec, rows: Rows, places: Places) -> None:
        self._level, self._spec, self._rows, self._places = level, spec, rows, places
        self._dtype = rows[0].dtype

    def result(self) -> Array:
        """The result (entries, elements), as members receive it."""
        spec, level, rows = self._spec, self._level, self._rows
        task = self._task("fold")
        shape = rows[0].shape
        if _is_one_launch(task, shape):
            return self._launch(task, rows)
        wire = spec.wire
        order = plan_of(spec, self._dtype, len(rows), shape).order
        if (wire is not None and wire.at_members) or level.divisor:
            rows = self._launch(self._task("each"), rows)
        if spec.order == FIXED:
            total = fold_fixed(level.device, spec, self._held(rows))
        else:
            plain = spec.plain
            if order in (EXACT, *COMPENSATED):
                arithmetic = plan_of(spec, self._dtype, len(rows), shape).arithmetic
                plain = replace(plain, order=str(order), accumulate=arithmetic.accumulator)
            total = level.fold_plain(plain, rows, self._places)
        sends = wire is not None and wire.at_result and spec.gathered
        return self.send_results(total) if sends else total

    def send_results(self, out: Array) -> Array:
        """The result as it is sent round."""
        task, level = self._task("result"), self._level
        return _launch(level.device, task, _one(level.device, out), level.call, self._places)

    def _task(self, kind: str) -> Task:
        return self._level.task(kind, self._spec, self._dtype, len(self._rows))

    def _held(self, rows: Rows) -> Held:
        group = Members.of(rows, self._level.device)
        layout = group.layout
        if layout.strides[1] != layout.dtype.itemsize and layout.shape[1] > 1:
            group = group.contiguous(self._level.device)
        return Held(group.layout, group.base, group.pointers)

    def _launch(self, task: Task, rows: Rows) -> Array:
        level = self._level
        return _launch(level.device, task, self._held(rows), level.call, self._places)
