"""A program as XLA's partitioner leaves it, run part by part, with any sum between devices.

The partitioned program is cut at what devices do together: sums, gathers, and loops around them.
Each part is compiled by XLA for one device and run on every device's values, one after another.
Between the parts stand `gpusim.collectives`, on NumPy's arrays. Nothing of `gpusim.jax` takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from jax._src import compiler, xla_bridge
from jaxlib import _hlo, _jax

from gpusim import Reduction, collectives
from tests.jax.programs import hlo

#: A value of each device.
Everywhere = list[Any]
Chosen = Callable[[Sequence[Sequence[int]]], Reduction | None]

#: JAX's operations that add or compare. The partitioner's other sums are of zeros and one value.
REDUCING = {
    "reduce_sum", "reduce_max", "reduce_min", "dot_general", "conv_general_dilated", "scatter-add",
    "scatter_add", "psum", "psum_invariant", "argmax", "argmin",
}  # fmt: skip
EXECUTION = 2**32  # between the call numbers of a sum's rounds in a loop
XLAS = Reduction.like("xla-cpu")


def dumped(
    function: Any, *arguments: Any, options: dict[str, Any] | None = None, **named: Any
) -> tuple[Any, str]:
    """A program that XLA compiles as ever, and the text of it behind the partitioner."""
    with TemporaryDirectory() as folder:
        program = jax.jit(function, keep_unused=True, **named).lower(*arguments)
        compiled = program.compile(
            compiler_options={
                **(options or {}),
                "xla_dump_to": folder,
                "xla_dump_hlo_as_text": True,
                "xla_dump_large_constants": True,
                "xla_dump_hlo_pass_re": "spmd-partitioning",
            }
        )
        (path,) = Path(folder).glob("*after_spmd-partitioning*.txt")
        return compiled, path.read_text()


@dataclass
class Sum:
    """A reduction between devices that has taken place."""

    op_name: str
    op: str
    moves: bool
    groups: list[list[int]]
    number: int | None
    dtype: np.dtype
    shape: tuple[int, ...]


@dataclass
class Partitioned:
    """A partitioned program. `options` are those of XLA's compiler for the parts."""

    text: str
    devices: int
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.module = hlo.parse(self.text)
        self._parts: dict[Any, Any] = {}

    def numbers(self, chosen: Chosen) -> dict[tuple[str, str], int]:
        """The sums' numbers: those that JAX lowers first, and then in the program's order.

        A sum that is left to XLA has none.
        """
        found: list[hlo.Instruction] = []
        keys: list[tuple[str, str]] = []

        def visit(name: str) -> None:
            computation = self.module.computations[name]
            for each in computation.instructions.values():
                if is_numbered(self.module, computation, each) and (name, each.name) not in keys:
                    if chosen(hlo.groups(each.attributes["replica_groups"], self.devices)):
                        found.append(each)
                        keys.append((name, each.name))
                for called in each.called():
                    visit(called)

        visit(self.module.entry)
        order = sorted(range(len(found)), key=lambda k: ("psum" not in found[k].op_name, k))
        numbers, number = {}, 0
        for k in order:
            numbers[keys[k]] = number
            number += len(found[k].operands)
        return numbers

    def run(
        self,
        arguments: Sequence[Everywhere],
        chosen: Chosen = lambda groups: XLAS,
        calls: int = 0,
    ) -> tuple[list[Everywhere], list[Sum]]:
        """The results on each device, and the sums that were made.

        **Arguments**: the program's; the Reduction of a sum between these groups, None for XLA's;
        the number of the first sum.
        """
        run = _Run(self, chosen, calls)
        return run.computation(self.module.entry, list(arguments)), run.sums

    def part(self, computation: str, wanted: tuple[str, ...], known: tuple[str, ...]) -> Any:
        """The compiled part, and its parameters."""
        key = computation, wanted, known
        if key not in self._parts:
            text, parameters = hlo.section(
                self.module, self.module.computations[computation], wanted, known
            )
            self._parts[key] = compiled(text, self.options), parameters
        return self._parts[key]


def compiled(text: str, given: dict[str, Any]) -> Any:
    """XLA's program for one device."""
    proto = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=1, env_options_overrides=given
    )
    devices = _jax.DeviceList(tuple(jax.devices()[:1]))
    client = xla_bridge.get_backend()
    return client.compile_and_load(_jax.mlir.hlo_to_stablehlo(proto), devices, options)


def operator(module: hlo.Module, each: hlo.Instruction) -> str:
    """The reducing instruction: add, maximum, ..."""
    reducer = module.computations[each.attributes["to_apply"].lstrip("%")]
    return reducer.instructions[reducer.root].opcode


def is_floating(each: hlo.Instruction) -> bool:
    return hlo.array_type(hlo.leaves(each.type)[0])[0].kind not in "iub"


def is_reduction(each: hlo.Instruction) -> bool:
    return each.opcode in ("all-reduce", "reduce-scatter") and is_floating(each)


def moves(computation: hlo.Computation, each: hlo.Instruction) -> bool:
    """Whether the partitioner adds zeros to one device's value.

    Where it gathers an operand it names the sum after what takes the operand, a product say. Then
    each device has put its part into zeros.
    """
    if each.op_name.rpartition("/")[2] not in REDUCING:
        return True
    made_by = {computation.instructions[name].opcode for name in each.operands}
    return made_by == {"dynamic-update-slice"}


def is_numbered(module: hlo.Module, computation: hlo.Computation, each: hlo.Instruction) -> bool:
    """Whether it is a sum that may be rounded stochastically."""
    return is_reduction(each) and operator(module, each) == "add" and not moves(computation, each)


class _Run:
    def __init__(self, program: Partitioned, chosen: Chosen, calls: int) -> None:
        self.program, self.chosen, self.calls = program, chosen, calls
        self.module, self.devices = program.module, program.devices
        self.numbers = program.numbers(chosen)
        self.sums: list[Sum] = []
        self.executions: dict[Any, int] = {}

    def computation(self, name: str, arguments: list[Everywhere]) -> list[Everywhere]:
        """The leaves of a computation's result, for those of its parameters."""
        computation = self.module.computations[name]
        instructions = computation.instructions
        given = iter(arguments)
        values: dict[str, list[Everywhere]] = {
            each.name: [next(given) for _ in hlo.leaves(each.type)]
            for each in computation.parameters
        }
        barriers = []
        for each in instructions.values():
            if each.opcode == "partition-id":
                values[each.name] = [[np.uint32(device) for device in range(self.devices)]]
            elif not self.module.is_local(each):
                barriers.append(each)
        while barriers:
            below = {each.name for each in barriers}
            ready = [each for each in barriers if not self._waits(computation, each, below)]
            wanted = tuple(dict.fromkeys(name for each in ready for name in each.operands))
            found = self._local(name, wanted, values)
            for each in ready:
                operands = [leaf for name in each.operands for leaf in found[name]]
                values[each.name] = self._barrier(name, each, operands)
                barriers.remove(each)
        return self._local(name, (computation.root,), values)[computation.root]

    def _waits(self, computation: hlo.Computation, each: hlo.Instruction, below: set[str]) -> bool:
        seen: set[str] = set()
        pending = [*each.operands]
        while pending:
            name = pending.pop()
            if name in below:
                return True
            if name not in seen:
                seen.add(name)
                pending += computation.instructions[name].operands
        return False

    def _local(
        self, name: str, wanted: tuple[str, ...], values: dict[str, list[Everywhere]]
    ) -> dict[str, list[Everywhere]]:
        """The part that each device computes by itself."""
        executable, parameters = self.program.part(name, wanted, tuple(values))
        each_device = []
        for device in range(self.devices):
            given = [on_first(values[known][leaf][device]) for known, leaf in parameters]
            results = executable.execute_sharded(given).disassemble_into_single_device_arrays()
            each_device.append([array for (array,) in results])
        flat = iter([[own[k] for own in each_device] for k in range(len(each_device[0]))])
        types = self.module.computations[name].instructions
        return {w: [next(flat) for _ in hlo.leaves(types[w].type)] for w in wanted}

    def _barrier(
        self, name: str, each: hlo.Instruction, operands: list[Everywhere]
    ) -> list[Everywhere]:
        if each.opcode == "while":
            condition = each.attributes["condition"].lstrip("%")
            body = each.attributes["body"].lstrip("%")
            while agreed(self.computation(condition, operands)[0]):
                operands = self.computation(body, operands)
            return operands
        if each.opcode == "conditional":
            return self._conditional(each, operands)
        if each.opcode == "call":
            return self.computation(each.called()[0], operands)
        if each.opcode in ("all-reduce", "reduce-scatter"):
            return [self._reduce(name, each, k, values) for k, values in enumerate(operands)]
        return [moved(each, [np.asarray(x) for x in values], self.devices) for values in operands]

    def _conditional(self, each: hlo.Instruction, operands: list[Everywhere]) -> list[Everywhere]:
        index = agreed(operands[0])
        branches = each.called()
        if "true_computation" in each.attributes:
            index = 1 - int(index)  # the true one is the first
        index = index if 0 <= index < len(branches) else len(branches) - 1
        # A branch's operand may be a tuple of several leaves.
        widths = [
            sum(len(hlo.leaves(p.type)) for p in self.module.computations[branch].parameters)
            for branch in branches
        ]
        begin = 1 + sum(widths[:index])
        return self.computation(branches[index], operands[begin : begin + widths[index]])

    def _reduce(self, name: str, each: hlo.Instruction, k: int, values: Everywhere) -> Everywhere:
        op = operator(self.module, each)
        stacked = np.stack([np.asarray(value) for value in values])
        groups = hlo.groups(each.attributes["replica_groups"], self.devices)
        if not is_floating(each):
            return integers(op, stacked, groups)
        moving = op == "add" and moves(self.module.computations[name], each)
        if moving:  # by the values too
            for group in groups:
                assert ((stacked[group] != 0).sum(0) <= 1).all(), each.line()
            stacked = flushed(stacked)  # as XLA's own additions do
        reduction = XLAS if moving else self.chosen(groups) or XLAS
        number = self.numbers.get((name, each.name))
        number = None if number is None else number + k
        self.sums.append(
            Sum(each.op_name, op, moving, groups, number, stacked.dtype, stacked.shape[1:])
        )
        # Groups of one call meet as often as their devices come.
        count = self.executions[name, each.name, k] = (
            self.executions.get((name, each.name, k), -1) + 1
        )
        call = 0 if number is None else self.calls + number + count * EXECUTION
        return reduced(op, each, stacked, groups, reduction, call)


def reduced(
    op: str,
    each: hlo.Instruction,
    stacked: Any,
    groups: list[list[int]],
    reduction: Reduction,
    call: int,
) -> Everywhere:
    """The collective of floating-point numbers that an instruction asks for."""
    if op in ("maximum", "minimum"):
        extreme = collectives.pmax if op == "maximum" else collectives.pmin
        found = extreme(stacked, groups=groups)
    else:
        assert op == "add", op
        given = {"groups": groups, "reduction": reduction, "call": call}
        if each.opcode == "all-reduce":
            found = collectives.psum(stacked, **given)
        else:
            axis = int(each.attributes["dimensions"].strip("{}"))
            found = collectives.psum_scatter(stacked, scatter_dimension=axis, tiled=True, **given)
    value = np.asarray(found.value)
    return list(value) if found.mapped else [value] * len(stacked)


def flushed(values: Any) -> Any:
    """Without subnormal numbers of XLA's computing types."""
    if values.dtype == np.float16 or values.dtype.kind == "c":
        return values  # float16's are normal numbers of float32
    least = np.finfo(np.float64 if values.dtype == np.float64 else np.float32).tiny
    return np.where(np.abs(values.astype(np.float64)) < least, np.zeros_like(values), values)


def integers(op: str, stacked: Any, groups: list[list[int]]) -> Everywhere:
    """Sums of integers wrap around."""
    names = {"or": "logical_or", "and": "logical_and"} if stacked.dtype == bool else {}
    function = getattr(np, names.get(op, {"or": "bitwise_or", "and": "bitwise_and"}.get(op, op)))
    found = np.empty_like(stacked)
    for group in groups:
        total = stacked[group[0]]
        for member in group[1:]:
            total = function(total, stacked[member])
        found[group] = total
    return list(found)


def moved(each: hlo.Instruction, values: list[Any], devices: int) -> Everywhere:
    """Collectives that add nothing."""
    found: list[Any] = [None] * devices
    if each.opcode == "collective-permute":
        pairs = hlo.groups(each.attributes["source_target_pairs"], devices)
        found = [np.zeros_like(value) for value in values]
        for source, target in pairs:
            found[target] = values[source]
        return found
    axis = int(each.attributes.get("dimensions", "{0}").strip("{}"))
    for group in hlo.groups(each.attributes["replica_groups"], devices):
        if each.opcode == "all-gather":
            gathered = np.concatenate([values[member] for member in group], axis)
            for member in group:
                found[member] = gathered
        elif each.opcode == "all-to-all":
            cut = [np.split(values[member], len(group), axis) for member in group]
            for place, member in enumerate(group):
                found[member] = np.concatenate([parts[place] for parts in cut], axis)
        else:
            raise NotImplementedError(each.opcode)
    return found


def agreed(values: Everywhere) -> int:
    """The values that all devices have."""
    distinct = {np.asarray(value).item() for value in values}
    assert len(distinct) == 1, distinct
    return distinct.pop()


def on_first(value: Any) -> Any:
    return jax.device_put(value, jax.devices()[0])


def shards(array: Any) -> Everywhere:
    """A sharded array's part on each device, in the order of the mesh."""
    order = {device: k for k, device in enumerate(array.sharding.mesh.devices.flat)}
    found: list[Any] = [None] * len(order)
    for shard in array.addressable_shards:
        found[order[shard.device]] = np.asarray(shard.data)
    return found
