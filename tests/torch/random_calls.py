"""Random calls of torch.distributed, for real gloo processes and simulated ranks alike.

A call is drawn from a seed, the same on all ranks: an entry point, a dtype, shapes, layouts, how
tensors share memory, and now and then a mistake that all ranks make. `random_calls` makes calls and
returns what they leave in memory, gaps and surroundings included, or that they raise an exception.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

#: Calls that are not compared, as gloo's result is undefined, or refused here by name.
EXCLUDED = {
    "gaps": "gloo reduces and sends what lies between the elements; gpusim refuses it",
    "expanded": "gloo reads and writes behind an expanded tensor, or over it; refused",
    "reduce_scatter of a list": "gloo mixes its tensors' orders of memory; refused if they differ",
    "scalar output": "gloo reads behind the shape of a 0-d output of reduce_scatter_tensor",
    "in place": "gloo sends what it may have overwritten: all_to_all_single(y, y), scatter from y",
    "rows": "gloo cuts rows that do not divide by elements, and drops the rest; refused",
    "AVG of a list": "gloo's allreduce([a, b]) divides a alone; refused",
}

DTYPES = (
    "float32 float64 float16 bfloat16 int8 uint8 bool int32 int64 int16 uint16 complex64".split()
)
OPERATORS = "SUM SUM SUM AVG PRODUCT MIN MAX BAND BOR BXOR".split()
SHAPES = [(), (1,), (5,), (0,), (37,), (2, 3), (3, 4), (2, 0, 3), (2, 3, 2, 3), (19, 3)]
LAYOUTS = "contiguous contiguous offset transposed channels_last gaps expanded".split()


class Excluded(Exception):
    """The draw is one of EXCLUDED."""


class Draw:
    """One call: what all ranks draw alike, and the rank's own values."""

    def __init__(self, seed: int, attempt: int, rank: int, size: int) -> None:
        self.random = random.Random(f"{seed} {attempt}")
        self.rank, self.size = rank, size
        self.values = torch.Generator().manual_seed(seed * 64 + rank)
        self.bases: list[Tensor] = []
        self.dtype: torch.dtype = getattr(torch, self.pick(DTYPES))
        self.mistake = ""
        if self.chance(0.12):
            self.mistake = self.pick(["length", "dtype", "shape"])
        self.text: list[Any] = [self.dtype, self.mistake]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, options: Sequence[Any]) -> Any:
        return self.random.choice(options)

    def exclude(self, name: str, when: bool = True) -> None:
        if when:
            raise Excluded(EXCLUDED[name])

    def operator(self) -> Any:
        name = self.pick(OPERATORS)
        self.text.append(name)
        return getattr(dist.ReduceOp, name)

    def root(self, **names: str) -> dict[str, int]:
        """A root by its global or its group rank, now and then one that is none."""
        root = self.pick([-1, self.size, self.size + 2]) if self.chance(0.1) else None
        root = self.random.randrange(self.size) if root is None else root
        name = self.pick(list(names.values()))
        self.text.append((name, root))
        self.chosen = root
        return {name: root}

    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.pick(SHAPES)
        return shape

    def filled(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Values of the rank's own."""
        numbers = torch.randn(tuple(shape), generator=self.values, dtype=torch.float64) * 3
        if dtype.is_complex:
            return torch.complex(
                numbers.float(), numbers.float().flip(0) if numbers.dim() else -numbers.float()
            )
        if dtype in (torch.uint8, torch.uint16):
            numbers = numbers.abs()
        return numbers.to(dtype) if dtype != torch.bool else numbers > 0

    def tensor(
        self,
        shape: tuple[int, ...],
        layouts: Sequence[str] = LAYOUTS,
        dtype: torch.dtype | None = None,
        by_rank: bool = False,
    ) -> Tensor:
        """A tensor in a random layout, on each rank in another one if `by_rank`."""
        chosen = [self.pick(layouts) for _ in range(self.size if by_rank else 1)]
        layout = chosen[self.rank if by_rank else 0]
        dtype = dtype or self.dtype
        self.text.append((tuple(shape), chosen))
        if layout == "transposed" and len(shape) > 1:
            base = self.filled((*shape[:-2], shape[-1], shape[-2]), dtype)
            view = base.transpose(-1, -2)
        elif layout == "channels_last" and len(shape) == 4:
            base = self.filled((shape[0], *shape[2:], shape[1]), dtype)
            view = base.permute(0, 3, 1, 2)
        elif layout == "gaps" and shape:
            base = self.filled((*shape[:-1], 2 * shape[-1] + 1), dtype)
            view = base[..., 1::2]
        elif layout == "expanded" and shape and shape[0] > 1:
            base = self.filled((1, *shape[1:]), dtype)
            view = base.expand(shape)
        elif layout == "offset":
            base = self.filled((prod(shape) + 3,), dtype)
            view = base[2 : 2 + prod(shape)].reshape(shape)
        else:
            view = base = self.filled(shape, dtype)
        self.bases.append(base)
        return view

    def in_memory(self, tensors: Sequence[Tensor], by_rank: bool = False) -> None:
        """Leave out what engines that move memory do not define."""
        for tensor in tensors:
            self.exclude("expanded", _repeats(tensor))
            self.exclude("gaps", bool(tensor.numel()) and not _is_dense(tensor))

    def outputs(
        self, count: int, shape: tuple[int, ...], layouts: Sequence[str] = LAYOUTS
    ) -> list[Tensor]:
        """A list of results, now and then one that is wrong."""
        wrong = self.mistake
        dtype = self.dtype
        if wrong == "dtype":
            dtype = torch.float32 if self.dtype != torch.float32 else torch.int32
        if wrong == "shape":
            shape = (*shape, 2)
        count += wrong == "length"
        return [self.tensor(shape, layouts, dtype) for _ in range(count)]


def _repeats(tensor: Tensor) -> bool:
    both = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in both)


def _is_dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    return tensor.permute(order).is_contiguous()


Call = Callable[[], Any]
CALLS: list[tuple[Callable[[Draw], Call], int]] = []


def call(weight: int) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
    def add(function: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
        CALLS.append((function, weight))
        return function

    return add


def finished(work: Any) -> None:
    if work is not None:
        work.wait()


def group() -> Any:
    return dist.group.WORLD


# Reductions


@call(4)
def all_reduce(draw: Draw) -> Call:
    x, op, late = draw.tensor(draw.shape()), draw.operator(), draw.chance(0.4)
    draw.in_memory([x])
    return lambda: finished(dist.all_reduce(x, op, async_op=late))


@call(3)
def reduce(draw: Draw) -> Call:
    x, op, root = draw.tensor(draw.shape()), draw.operator(), draw.root(a="dst", b="group_dst")
    draw.in_memory([x])
    if draw.chosen != draw.rank:
        draw.bases.clear()  # other ranks' tensors are left with partial sums

    return lambda: dist.reduce(x, op=op, **root)


@call(3)
def reduce_scatter(draw: Draw) -> Call:
    shape, op = draw.shape(), draw.operator()
    layouts = LAYOUTS if draw.mistake else [draw.pick(LAYOUTS)]
    inputs = draw.outputs(draw.size, shape, layouts)
    out = draw.tensor(shape, layouts)
    draw.in_memory([*inputs, out])
    orders = {each.stride() for each in [*inputs, out] if each.shape == shape}
    one = all(each.is_contiguous() for each in [*inputs, out])
    draw.exclude("reduce_scatter of a list", len(orders) > 1 and not one)
    return lambda: dist.reduce_scatter(out, inputs, op)


def _pieces(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of all ranks' parts together; now and then a wrong one."""
    first = shape[0] if shape else 1
    if draw.mistake in ("length", "shape"):
        first += 1
    return (first * draw.size, *shape[1:])


@call(4)
def reduce_scatter_tensor(draw: Draw) -> Call:
    shape, op, late = draw.shape(), draw.operator(), draw.chance(0.4)
    draw.exclude("scalar output", not shape)
    if draw.chance(0.2) and draw.mistake == "" and shape:
        whole = draw.tensor(_pieces(draw, shape), ["contiguous", "offset"])
        out = whole.view(-1)[int(draw.size > 1) :][: prod(shape)].view(shape)
    else:
        whole = draw.tensor(_pieces(draw, shape))
        out = draw.outputs(1, shape)[0] if draw.mistake == "dtype" else draw.tensor(shape)
    return lambda: finished(dist.reduce_scatter_tensor(out, whole, op, async_op=late))


@call(2)
def all_reduce_coalesced(draw: Draw) -> Call:
    layouts = LAYOUTS[:-1]
    xs = [draw.tensor(draw.shape(), layouts, by_rank=True) for _ in range(draw.pick([1, 2, 3]))]
    op = draw.operator()
    return lambda: dist.all_reduce_coalesced(xs, op)


@call(2)
def all_reduce_of_a_list(draw: Draw) -> Call:
    shape, count = draw.shape(), draw.pick([0, 1, 2, 3])
    xs = [draw.tensor(shape) for _ in range(count)]
    if draw.mistake == "shape" and count:
        xs[-1] = draw.tensor((*shape, 2))
    if draw.mistake == "dtype" and count:
        xs[-1] = draw.tensor(shape, dtype=torch.float64)
    options = dist.AllreduceOptions()
    options.reduceOp = draw.operator()
    draw.exclude("AVG of a list", count > 1 and options.reduceOp == dist.ReduceOp.AVG)
    draw.in_memory(xs)
    return lambda: finished(group().allreduce(xs, options))


@call(1)
def reduce_scatter_coalesced(draw: Draw) -> Call:
    shapes = [shape for shape in (draw.shape(), draw.shape()) if shape]
    draw.exclude("scalar output", not shapes)
    wholes = [draw.tensor(_pieces(draw, shape)) for shape in shapes]
    outs = [draw.tensor(shape) for shape in shapes]
    return lambda: finished(group().reduce_scatter_tensor_coalesced(outs, wholes))


# Moves


@call(4)
def broadcast(draw: Draw) -> Call:
    x, root = draw.tensor(draw.shape(), by_rank=True), draw.root(a="src", b="group_src")
    late = draw.chance(0.4)
    for layout in draw.text[-2][1]:
        draw.exclude("gaps", layout == "gaps")
        draw.exclude("expanded", layout == "expanded")
    draw.in_memory([x])
    return lambda: finished(dist.broadcast(x, async_op=late, **root))


@call(2)
def broadcast_of_a_list(draw: Draw) -> Call:
    shape, count = draw.shape(), draw.pick([1, 2, 3])
    xs = [draw.tensor(shape) for _ in range(count)]
    if draw.mistake == "shape":
        xs.append(draw.tensor((*shape, 2)))
    draw.in_memory(xs)
    options = dist.BroadcastOptions()
    options.rootRank = draw.pick([*range(draw.size), -1])
    options.rootTensor = draw.pick([*range(count), count + 1])
    draw.text.append((options.rootRank, options.rootTensor))
    return lambda: finished(group().broadcast(xs, options))


@call(4)
def all_gather(draw: Draw) -> Call:
    shape, late = draw.shape(), draw.chance(0.4)
    if draw.chance(0.25) and not draw.mistake and shape:
        base = draw.tensor((draw.size + 1, *shape), ["contiguous"])
        rows = list(base)
        draw.random.shuffle(rows)
        x, row = rows[draw.pick([0, -1])], rows[: draw.size]
    elif draw.chance(0.1) and not draw.mistake:
        x, row = draw.tensor(shape), [draw.tensor(shape, ["contiguous"])] * draw.size
    else:
        x, row = draw.tensor(shape, by_rank=True), draw.outputs(draw.size, shape)
    return lambda: finished(dist.all_gather(row, x, async_op=late))


@call(4)
def all_gather_into_tensor(draw: Draw) -> Call:
    shape, late = draw.shape(), draw.chance(0.4)
    if draw.chance(0.25) and not draw.mistake and shape:
        whole = draw.tensor(_pieces(draw, shape), ["contiguous"])
        start = draw.random.randrange(max(1, (draw.size - 1) * prod(shape) + 1))
        x = whole.view(-1)[start : start + prod(shape)].view(shape)
    else:
        x, whole = draw.tensor(shape, by_rank=True), draw.tensor(_pieces(draw, shape))
        draw.exclude("expanded", _repeats(whole))
    return lambda: finished(dist.all_gather_into_tensor(whole, x, async_op=late))


@call(3)
def gather(draw: Draw) -> Call:
    shape, root = draw.shape(), draw.root(a="dst", b="group_dst")
    x = draw.tensor(shape, by_rank=True)
    # Mistakes would be the root's alone, for which others would wait.
    row = [draw.tensor(shape, LAYOUTS[:-1]) for _ in range(draw.size)]
    if draw.chance(0.2) and shape:
        base = draw.tensor((draw.size, *shape), ["contiguous"])
        x, row = base[draw.pick([0, -1])], list(base)
    mine = row if draw.rank == draw.chosen else None
    return lambda: dist.gather(x, mine, **root)


@call(3)
def scatter(draw: Draw) -> Call:
    shape, root = draw.shape(), draw.root(a="src", b="group_src")
    layouts = ["contiguous", "offset", "transposed", "channels_last"]
    out = draw.tensor(shape, layouts, by_rank=True)
    row = [draw.tensor(shape, layouts) for _ in range(draw.size)]
    mine = row if draw.rank == draw.chosen else None
    return lambda: dist.scatter(out, mine, **root)


@call(3)
def all_to_all(draw: Draw) -> Call:
    shape, late = draw.shape(), draw.chance(0.4)
    if draw.chance(0.25) and not draw.mistake and shape:
        base = draw.tensor((draw.size, *shape), ["contiguous"])
        inputs = outputs = list(base)
        if draw.chance(0.5):
            outputs = inputs[::-1]
    else:
        inputs = [draw.tensor(shape) for _ in range(draw.size)]
        outputs = draw.outputs(draw.size, shape)
    return lambda: finished(dist.all_to_all(outputs, inputs, async_op=late))


@call(4)
def all_to_all_single(draw: Draw) -> Call:
    shape, late = draw.shape(), draw.chance(0.4)
    rest, size = shape[1:], draw.size
    if draw.chance(0.5):
        table = [[draw.random.randrange(4) for _ in range(size)] for _ in range(size)]
        sent, received = table[draw.rank], [row[draw.rank] for row in table]
        rows = [sum(sent), sum(received)]
        if draw.mistake == "length":
            sent = [*sent, 0]
        if draw.mistake == "shape":
            sent = [sent[0] + 1, *sent[1:]]
    else:
        sent = received = None
        rows = [shape[0] * size if shape else 1] * 2
        if draw.mistake == "shape" and size > 1:
            rows = [rows[0] + 1] * 2
    draw.exclude("in place", draw.chance(0.1))
    draw.exclude("rows", sent is None and rows[0] % size > 0)
    # What is refused must not depend on a rank's number of rows.
    x = draw.tensor((rows[0], *rest), ["contiguous", "offset"] if sent else LAYOUTS)
    out = draw.tensor((rows[1], *rest), ["contiguous", "offset", "transposed", "channels_last"])
    return lambda: finished(dist.all_to_all_single(out, x, received, sent, async_op=late))


@call(2)
def all_gather_coalesced(draw: Draw) -> Call:
    shapes = [draw.shape() for _ in range(draw.pick([1, 2]))]
    xs = [draw.tensor(shape) for shape in shapes]
    lists = [[draw.tensor(shape) for shape in shapes] for _ in range(draw.size)]
    if draw.mistake == "length":
        lists.pop()
    if draw.mistake == "shape":
        lists[0][0] = draw.tensor((*shapes[0], 2))
    return lambda: finished(group().allgather_coalesced(lists, xs))


@call(1)
def all_gather_into_tensor_coalesced(draw: Draw) -> Call:
    shapes = [draw.shape() for _ in range(draw.pick([1, 2]))]
    xs = [draw.tensor(shape) for shape in shapes]
    wholes = [draw.tensor(_pieces(draw, shape), LAYOUTS[:-1]) for shape in shapes]
    return lambda: finished(group().allgather_into_tensor_coalesced(wholes, xs))


@call(1)
def all_gather_of_lists(draw: Draw) -> Call:
    shape, count = draw.shape(), draw.pick([1, 2])
    xs = [draw.tensor(shape) for _ in range(count)]
    rows = [[draw.tensor(shape) for _ in range(count * draw.size)] for _ in range(count)]
    if draw.mistake == "length":
        rows[-1].pop()
    return lambda: finished(group().allgather(rows, xs))


@call(3)
def messages(draw: Draw) -> Call:
    shape, size, tag = draw.shape(), draw.size, draw.pick([0, 0, 3])
    layouts = LAYOUTS if draw.chance(0.3) else ["contiguous", "offset"]
    x, y = draw.tensor(shape, layouts), draw.tensor(shape, layouts)
    step = draw.pick(range(1, max(2, size)))
    there, back = (draw.rank + step) % size, (draw.rank - step) % size
    # A message that is refused at one end only is one that the other waits for.
    draw.exclude("gaps", x.is_contiguous() != y.is_contiguous() or size == 1)
    if draw.chance(0.5):

        def batch() -> None:
            ops = [
                dist.P2POp(dist.isend, x, there, tag=tag),
                dist.P2POp(dist.irecv, y, back, tag=tag),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return batch

    def plain() -> None:
        sent = dist.isend(x, there, tag=tag)
        dist.recv(y, back, tag=tag)
        sent.wait()

    return plain


# Objects, and functional collectives


@call(2)
def objects(draw: Draw) -> Call:
    kind, size = draw.pick(["all_gather", "broadcast", "gather", "scatter"]), draw.size
    mine = ("of rank", draw.rank, [draw.random.random()] * draw.pick([0, 1, 90]))
    root = draw.root(a="group")["group"]
    draw.text.append(kind)
    found: list[Any] = [None] * size

    def make() -> None:
        if kind == "all_gather":
            dist.all_gather_object(found, mine)
        elif kind == "broadcast":
            found[:] = [mine, draw.rank]
            dist.broadcast_object_list(found, group_src=root)
        elif kind == "gather":
            dist.gather_object(mine, found if draw.rank == root else None, group_dst=root)
        else:
            del found[1:]
            row = [(mine, r) for r in range(size)] if draw.rank == root else None
            dist.scatter_object_list(found, row, group_src=root)
        draw.bases.append(torch.tensor(list(repr(found).encode())))

    return make


@call(2)
def functional_calls(draw: Draw) -> Call:
    kind = draw.pick(["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
    shape = draw.shape()
    draw.exclude("scalar output", not shape)
    draw.text.append(kind)
    if kind == "reduce_scatter":
        x = draw.tensor(_pieces(draw, shape), ["contiguous", "offset", "transposed"])
    else:
        x = draw.tensor(shape, ["contiguous", "offset", "transposed"])
    draw.exclude("gaps", draw.mistake != "" and kind == "reduce_scatter")

    def make() -> None:
        if kind == "all_reduce":
            found = functional.all_reduce(x, "sum", group())
        elif kind == "all_gather":
            found = functional.all_gather_tensor(x, 0, group())
        elif kind == "broadcast":
            found = functional.broadcast(x, draw.size - 1, group())
        else:
            found = functional.reduce_scatter_tensor(x, "sum", 0, group())
        draw.bases.append(functional.wait_tensor(found).contiguous())

    return make


FAILED = torch.full((1,), 251, dtype=torch.uint8)


def drawn(seed: int, rank: int, size: int) -> tuple[Draw, Call]:
    """The call of a seed: the first draw that is not one of EXCLUDED."""
    for attempt in range(1000):
        draw = Draw(seed, attempt, rank, size)
        functions, weights = zip(*CALLS, strict=True)
        (function,) = draw.random.choices(functions, weights)
        draw.text.insert(0, function.__name__)
        try:
            return draw, function(draw)
        except Excluded:
            continue
    raise AssertionError(f"seed {seed}: no draw is compared")


def outcome(seed: int, rank: int, size: int) -> Tensor:
    """The bytes that a call leaves, or FAILED."""
    draw, make = drawn(seed, rank, size)
    try:
        make()
    except Exception:
        return FAILED
    parts = [torch.zeros(0, dtype=torch.uint8)]
    for base in draw.bases:
        bits = base.detach().contiguous().reshape(-1).view(torch.uint8)
        parts.append(bits.ne(0).to(torch.uint8) if base.dtype == torch.bool else bits)
    return torch.cat(parts)


def random_calls(seeds: list[int]) -> dict[str, Tensor]:
    """The outcomes of calls, by their seeds."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {str(seed): outcome(seed, rank, size) for seed in seeds}
    # gloo's barrier raises the exception of a failed call that its worker has not put away yet.
    dist.all_reduce(torch.ones(1))
    return found


def described(seed: int, size: int) -> str:
    """The call of a seed in words."""
    return f"seed {seed} on {size} ranks: {drawn(seed, 0, size)[0].text}"
