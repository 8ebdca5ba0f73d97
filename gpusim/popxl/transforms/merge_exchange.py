"""merge_exchange and io_tile_exchange: several transfers from and to the host as one op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from .._definition import Definition, only_compiled
from .._op import Op, op_class
from ..context import get_current_context, get_current_graph, in_sequence, io_tiles
from ..graph import Graph

if TYPE_CHECKING:
    from ..execution.compiler import GraphCompiler
    from ..execution.program import Step

__all__ = ["io_tile_exchange", "merge_exchange"]

_MERGED = ("HostLoad", "HostStore", "RemoteLoad", "RemoteLoadInplace", "RemoteStore")


@contextmanager
def merge_exchange() -> Iterator[None]:
    """Merge the transfers added inside, host and remote loads and stores, into one op.

    Transfers whose values depend on each other are not merged.

    >>> import gpusim.popxl as popxl
    >>> ir = popxl.Ir()
    >>> with ir.main_graph, popxl.transforms.merge_exchange():
    ...     x = popxl.ops.host_load(popxl.h2d_stream((), popxl.float32), "x")
    ...     popxl.ops.host_store(popxl.d2h_stream((), popxl.float32), popxl.constant(1.0))
    >>> ir.main_graph._pb_graph.getOps()[-1].opType()
    'MultiExchange'
    """
    context = get_current_context()
    graph = context.graph
    ops: list[Op] = []
    handle = graph.register_op_created_hook(ops.append)
    try:
        yield
    finally:
        graph.remove_op_created_hook(handle)
    for op in _merge(graph, [op for op in ops if op.opType() in _MERGED]):
        for hook in (*context._hooks.values(), *graph._hooks.values()):
            hook(op)


@contextmanager
def io_tile_exchange(verify_overlap: bool = True) -> Iterator[None]:
    """`io_tiles`, `merge_exchange` and `in_sequence(False)` at once.

    **Arguments**: `verify_overlap`: whether to check that one op is left of all that were added, so
    that an IPU can compute meanwhile.

    **Raises**: RuntimeError: if more ops are left.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph, popxl.transforms.io_tile_exchange():
    ...     x = popxl.ops.host_load(popxl.h2d_stream((), popxl.float32), "x")
    ...     popxl.ops.host_store(popxl.d2h_stream((), popxl.float32), popxl.constant(1.0))
    """
    graph = get_current_graph()
    ops: list[Op] = []
    handle = graph.register_op_created_hook(ops.append)
    try:
        with io_tiles(), merge_exchange(), in_sequence(False):
            yield
    finally:
        graph.remove_op_created_hook(handle)
    left = [op for op in graph._ops if op.opType() != "Init" and any(op is each for each in ops)]
    if verify_overlap and len(left) > 1:
        ops_debug = "\n   ".join(op.debugName() for op in left)
        raise RuntimeError(
            "More than one Op remained after `io_tile_exchange`. This will prevent overlap with "
            f"following compute. Remaining Ops:\n   {ops_debug}"
        )


def _merge(graph: Graph, ops: Sequence[Op]) -> list[Op]:
    """Merge the ops of each group that can go together, and return the new ops."""
    groups: list[list[Op]] = []
    for op in ops:
        last = groups[-1] if groups else []
        if last and not _depends(graph, op, last):
            last.append(op)
        else:
            groups.append([op])
    return [_merge_ops(graph, group) for group in groups if len(group) > 1]


def _depends(graph: Graph, op: Op, earlier: Sequence[Op]) -> bool:
    """Whether an op needs results of earlier ones, or must follow an op that does.

    Directly following them, as in `in_sequence`, does not count: they become one op.
    """
    together = {each.id for each in earlier}
    needing: set[int] = set()
    for each in graph._ops:
        producers = {t._producer.id for t in each.inputs if t._producer is not None}
        before = {other.id for other in each.after}
        if each is op:
            return bool(producers & together or (producers | before) & needing)
        if each.id not in together and (producers | before) & (together | needing):
            needing.add(each.id)
    return False


def _merge_ops(graph: Graph, ops: Sequence[Op]) -> Op:
    """One op for several, at the place of the first; the others move as far as necessary."""
    inputs = [tensor for op in ops for tensor in op.inputs]
    merged = op_class("MultiExchange")(
        graph,
        _definition(ops),
        inputs,
        {"exchanges": tuple(ops)},
        ipu=ops[0].ipu,
        tile_set=ops[0].tile_set,
        location=ops[0].location,
    )
    merged.outputs = [tensor for op in ops for tensor in op.outputs]
    for number, tensor in enumerate(merged.outputs):
        tensor._producer, tensor._index = merged, number
    replaced = {op.id for op in ops}
    merged.after = [each for op in ops for each in op.after if each.id not in replaced]
    graph._ops[:] = [merged if op is ops[0] else op for op in graph._ops]
    graph._ops[:] = [op for op in graph._ops if op.id not in replaced]
    for op in graph._ops:
        op.after = [merged if each.id in replaced else each for each in op.after]
    graph._ops[:] = _sort(graph._ops)
    last = graph._last_in_sequence
    if last is not None and last.id in replaced:
        graph._last_in_sequence = merged
    graph.ir._mark_changed()
    return merged


def _sort(ops: Sequence[Op]) -> list[Op]:
    """The ops, each after those that it needs, otherwise in their order."""
    place = {op.id: index for index, op in enumerate(ops)}
    needed: list[set[int]] = []
    users: list[list[int]] = [[] for _ in ops]
    for index, op in enumerate(ops):
        producers = (tensor._producer for tensor in op.inputs)
        earlier = {place[each.id] for each in (*producers, *op.after) if each and each.id in place}
        needed.append(earlier)
        for each in earlier:
            users[each].append(index)
    ready = [index for index, earlier in enumerate(needed) if not earlier]
    out: list[Op] = []
    while ready:
        index = heappop(ready)
        out.append(ops[index])
        for user in users[index]:
            needed[user].discard(index)
            if not needed[user]:
                heappush(ready, user)
    return out


def _definition(ops: Sequence[Op]) -> Definition:
    """The definition of several transfers as one, with all their inputs and outputs in order."""
    aliases: dict[int, int] = {}
    modifies: list[int] = []
    first_input = first_output = 0
    for op in ops:
        for out, into in op.definition.aliases.items():
            aliases[first_output + out] = first_input + into
        modifies += [first_input + index for index in op.definition.modifies]
        first_input += len(op.inputs)
        first_output += len(op.outputs)
    specs = [tensor.spec for op in ops for tensor in op.outputs]
    return Definition(
        "MultiExchange",
        infer=lambda inputs, attributes: specs,
        run=only_compiled,
        aliases=aliases,
        modifies=tuple(modifies),
        effect=True,
        compile=_compile,
    )


def _compile(compiler: GraphCompiler, op: Op) -> Step:
    steps = []
    for each in op.attributes["exchanges"]:
        assert each.definition.compile is not None
        steps.append(each.definition.compile(compiler, each))

    def step(values: list[Any]) -> None:
        for each in steps:
            each(values)

    return step
