"""host_load, host_store, init and remote buffers: what comes into a graph from outside of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tensor import TensorSpec
from .definition import Definition
from .op import Op

if TYPE_CHECKING:
    from ..execution.compiler import GraphCompiler
    from ..execution.program import Step

__all__ = ["HOST_LOAD", "HOST_STORE", "INIT", "REMOTE_LOAD", "REMOTE_LOAD_INPLACE", "REMOTE_STORE"]

Array = Any
Attributes = Mapping[str, Any]


def only_compiled(xp: Any, inputs: list[Array], attributes: Attributes) -> Sequence[Array]:
    """The rule of ops that the session compiles in a way of their own."""
    raise AssertionError("this op has no rule on arrays alone")


def stream_spec(inputs: list[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    return [attributes["stream"].spec]


def nothing(inputs: list[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    return []


def compile_host_load(compiler: GraphCompiler, op: Op) -> Step:
    machine, stream = compiler.machine, op.attributes["stream"].tensor_id
    output = compiler.slot(op.outputs[0])

    def step(values: list[Any]) -> None:
        values[output] = machine.load(stream)

    return step


def compile_host_store(compiler: GraphCompiler, op: Op) -> Step:
    machine, stream = compiler.machine, op.attributes["stream"].tensor_id
    source = compiler.slot(op.inputs[0])

    def step(values: list[Any]) -> None:
        machine.store(stream, values[source])

    return step


HOST_LOAD = Definition(
    "HostLoad", stream_spec, only_compiled, effect=True, compile=compile_host_load
)
HOST_STORE = Definition(
    "HostStore", nothing, only_compiled, effect=True, names=("t",), compile=compile_host_store
)


def init_spec(inputs: list[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    return [attributes["spec"]]


def compile_init(compiler: GraphCompiler, op: Op) -> Step:
    machine, spec = compiler.machine, op.attributes["spec"]
    output, dtype = compiler.slot(op.outputs[0]), spec.dtype.as_numpy()

    def step(values: list[Any]) -> None:
        values[output] = machine.xp.zeros((machine.count, *spec.shape), dtype)

    return step


#: What is undefined on an IPU is zero here, so that programs always print the same.
INIT = Definition("Init", init_spec, only_compiled, compile=compile_init)


# Remote buffers: the offset is an attribute, or the last input.


def buffer_spec(inputs: list[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    buffer = attributes["buffer"]
    return [TensorSpec(buffer.tensor_shape, buffer.tensor_dtype, buffer.meta_shape)]


def place_of(compiler: GraphCompiler, op: Op, at: int) -> Any:
    """What gives, at run time, the index of each replica's entry in the buffer's array."""
    machine, buffer = compiler.machine, op.attributes["buffer"]
    fixed = op.attributes["offset"]
    slot = compiler.slot(op.inputs[at]) if fixed is None else -1

    def place(values: list[Any]) -> tuple[Any, Any]:
        rows = machine.remote_rows()
        if fixed is not None:
            return rows, fixed
        offsets = values[slot].reshape(len(rows)).astype(np.int64)
        if bool(((offsets < 0) | (offsets >= buffer.entries)).any()):
            raise IndexError(
                f"{op.debugName()}: offset {offsets.tolist()} of replicas {rows.tolist()}, but "
                f"{buffer} has the entries 0 to {buffer.entries - 1}"
            )
        return rows, offsets

    return place


def compile_remote_load(compiler: GraphCompiler, op: Op) -> Step:
    machine, number = compiler.machine, op.attributes["buffer"].remote_buffer_id
    place, output = place_of(compiler, op, 0), compiler.slot(op.outputs[0])

    def step(values: list[Any]) -> None:
        values[output] = machine.remote[number][place(values)]

    return step


def compile_remote_load_inplace(compiler: GraphCompiler, op: Op) -> Step:
    machine, number = compiler.machine, op.attributes["buffer"].remote_buffer_id
    place, target = place_of(compiler, op, 1), compiler.slot(op.inputs[0])
    output = compiler.slot(op.outputs[0])

    def step(values: list[Any]) -> None:
        values[target][...] = machine.remote[number][place(values)]
        values[output] = values[target]

    return step


def compile_remote_store(compiler: GraphCompiler, op: Op) -> Step:
    machine, number = compiler.machine, op.attributes["buffer"].remote_buffer_id
    place, source = place_of(compiler, op, 1), compiler.slot(op.inputs[0])

    def step(values: list[Any]) -> None:
        machine.remote[number][place(values)] = values[source]

    return step


REMOTE_LOAD = Definition("RemoteLoad", buffer_spec, only_compiled, compile=compile_remote_load)
REMOTE_LOAD_INPLACE = Definition(
    "RemoteLoadInplace",
    buffer_spec,
    only_compiled,
    aliases={0: 0},
    modifies=(0,),
    names=("t", "offset"),
    compile=compile_remote_load_inplace,
)
REMOTE_STORE = Definition(
    "RemoteStore",
    nothing,
    only_compiled,
    effect=True,
    names=("t", "offset"),
    compile=compile_remote_store,
)
