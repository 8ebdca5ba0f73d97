"""Ops that bring values into a graph and out of it: host streams, remote buffers, new tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .. import dtypes
from .._definition import Attributes, Definition, Specs, add_op, fixed_spec, only_compiled
from .._op import Op
from ..context import get_current_graph
from ..graph import Graph
from ..remote_buffer import RemoteBuffer
from ..streams import DeviceToHostStream, HostToDeviceStream
from ..tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from ..execution.compiler import GraphCompiler
    from ..execution.program import Step

__all__ = [
    "CODE_LOCATION",
    "host_load",
    "host_store",
    "init",
    "remote_load",
    "remote_load_",
    "remote_store",
    "multiply_tuple",
    "remote_code_load",
    "code_copy",
]


def nothing(*arguments: Any) -> list[Any]:
    return []


# Host streams


def stream_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [attributes["stream"].spec]


def compile_host_load(compiler: GraphCompiler, op: Op) -> Step:
    machine, stream = compiler.machine, op.attributes["stream"].tensor_id
    output = compiler.slot(op.outputs[0])

    def step(values: list[Any]) -> None:
        values[output] = machine.load(stream)

    return step


HOST_LOAD = Definition(
    "HostLoad", stream_spec, only_compiled, effect=True, compile=compile_host_load
)


def host_load(h2d_stream: HostToDeviceStream, name: str | None = None) -> Tensor:
    """Load the next tensor of a stream from the host, at each execution.

    A run provides `Ir.num_host_transfers` tensors; after the last one the first comes again.

    **Raises**: TypeError: if `h2d_stream` is not a stream from the host.
    """
    if not isinstance(h2d_stream, HostToDeviceStream):
        raise TypeError(f"h2d_stream must be a HostToDeviceStream, got {h2d_stream!r}")
    label = name or h2d_stream.tensor_id
    return add_op(HOST_LOAD, [], {"stream": h2d_stream}, name, output_names=[label])[0]


def compile_host_store(compiler: GraphCompiler, op: Op) -> Step:
    machine, stream = compiler.machine, op.attributes["stream"].tensor_id
    source = compiler.slot(op.inputs[0])

    def step(values: list[Any]) -> None:
        machine.store(stream, values[source])

    return step


HOST_STORE = Definition(
    "HostStore", nothing, only_compiled, effect=True, compile=compile_host_store
)


def host_store(d2h_stream: DeviceToHostStream, t: Tensor) -> None:
    """Store a tensor as the next one of a stream to the host, at each execution.

    A run returns `Ir.num_host_transfers` tensors; further ones overwrite them, from the first.

    **Raises**

    - TypeError: if `d2h_stream` is not a stream to the host.
    - ValueError: if the tensor has another shape or dtype than the stream.
    """
    if not isinstance(d2h_stream, DeviceToHostStream):
        raise TypeError(f"d2h_stream must be a DeviceToHostStream, got {d2h_stream!r}")
    if isinstance(t, Tensor):
        if t.dtype is not d2h_stream.dtype:
            raise ValueError(
                f"dtype of stream {d2h_stream.tensor_id} `{d2h_stream.dtype}` does not match dtype "
                f"of provided tensor `{t.dtype}`"
            )
        if t.shape != d2h_stream.shape:
            raise ValueError(
                f"shape of stream {d2h_stream.tensor_id} `{d2h_stream.shape}` does not match shape "
                f"of provided tensor `{t.shape}`"
            )
    add_op(HOST_STORE, [t], {"stream": d2h_stream})


# New tensors


def compile_init(compiler: GraphCompiler, op: Op) -> Step:
    machine, spec = compiler.machine, op.attributes["spec"]
    output, dtype = compiler.slot(op.outputs[0]), spec.dtype.as_numpy()

    def step(values: list[Any]) -> None:
        values[output] = machine.xp.zeros((machine.count, *spec.shape), dtype)

    return step


#: Values that are undefined on an IPU are zero here, so that programs are deterministic.
INIT = Definition("Init", fixed_spec, only_compiled, compile=compile_init)


def init(
    shape: Iterable[int],
    dtype: dtypes.dtype,
    name: str | None = None,
    init_type: Literal["zero", "undef"] = "zero",
    meta_shape: Iterable[int] | None = None,
) -> Tensor:
    """A new tensor of zeros. With "undef" a program cannot rely on them, but they are zeros too.

    **Raises**: ValueError: for another `init_type`.
    """
    if init_type not in ("zero", "undef"):
        raise ValueError(f"Unknown init_type: {init_type}")
    spec = TensorSpec(shape, dtype, () if meta_shape is None else meta_shape)
    return add_op(INIT, [], {"spec": spec, "init_type": init_type}, name)[0]


# Remote buffers: the offset is an attribute, or the last input


def buffer_spec(inputs: Specs, attributes: Attributes) -> Specs:
    buffer = attributes["buffer"]
    return [TensorSpec(buffer.tensor_shape, buffer.tensor_dtype, buffer.meta_shape)]


def place_of(compiler: GraphCompiler, op: Op, at: int) -> Any:
    """A function of the values that gives each replica's entry as an index of the buffer."""
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


def offset_of(buffer: RemoteBuffer, offset: int | Tensor) -> tuple[list[Tensor], dict[str, object]]:
    """An offset as inputs and attributes of an op."""
    if isinstance(offset, Tensor):
        if offset.nelms != 1 or not offset.dtype.is_int:
            raise ValueError(f"offset must be one integer, got {offset}")
        return [offset], {"buffer": buffer, "offset": None}
    if not 0 <= offset < buffer.entries:
        raise ValueError(f"offset={offset}: {buffer} has the entries 0 to {buffer.entries - 1}")
    return [], {"buffer": buffer, "offset": offset}


def compile_remote_load(compiler: GraphCompiler, op: Op) -> Step:
    machine, number = compiler.machine, op.attributes["buffer"].remote_buffer_id
    place, output = place_of(compiler, op, 0), compiler.slot(op.outputs[0])

    def step(values: list[Any]) -> None:
        values[output] = machine.remote[number][place(values)]

    return step


REMOTE_LOAD = Definition("RemoteLoad", buffer_spec, only_compiled, compile=compile_remote_load)


def remote_load(
    remote_buffer: RemoteBuffer, offset: int | Tensor, name: str | None = None
) -> Tensor:
    """Load an entry of a remote buffer; of a sharded one the replica's shard.

    **Arguments**: `offset`: the number of the entry, or a tensor that holds it.

    **Raises**: ValueError: if the buffer has no such entry. For a tensor a run raises IndexError.
    """
    inputs, attributes = offset_of(remote_buffer, offset)
    return add_op(REMOTE_LOAD, inputs, attributes, name)[0]


def compile_remote_load_inplace(compiler: GraphCompiler, op: Op) -> Step:
    machine, number = compiler.machine, op.attributes["buffer"].remote_buffer_id
    place, target = place_of(compiler, op, 1), compiler.slot(op.inputs[0])
    output = compiler.slot(op.outputs[0])

    def step(values: list[Any]) -> None:
        values[target][...] = machine.remote[number][place(values)]
        values[output] = values[target]

    return step


REMOTE_LOAD_INPLACE = Definition(
    "RemoteLoadInplace",
    buffer_spec,
    only_compiled,
    aliases={0: 0},
    modifies=(0,),
    names=("t", "offset"),
    compile=compile_remote_load_inplace,
)


def remote_load_(remote_buffer: RemoteBuffer, offset: int | Tensor, t: Tensor) -> Tensor:
    """Load an entry of a remote buffer into a tensor, and return the tensor.

    **Raises**: as `remote_load`; also ValueError: if the tensor has another shape or dtype.
    """
    remote_buffer.validate_tensor_matches_buffer(t)
    inputs, attributes = offset_of(remote_buffer, offset)
    return add_op(REMOTE_LOAD_INPLACE, [t, *inputs], attributes)[0]


def compile_remote_store(compiler: GraphCompiler, op: Op) -> Step:
    machine, number = compiler.machine, op.attributes["buffer"].remote_buffer_id
    place, source = place_of(compiler, op, 1), compiler.slot(op.inputs[0])

    def step(values: list[Any]) -> None:
        machine.remote[number][place(values)] = values[source]

    return step


REMOTE_STORE = Definition(
    "RemoteStore",
    nothing,
    only_compiled,
    effect=True,
    names=("t", "offset"),
    compile=compile_remote_store,
)


def remote_store(remote_buffer: RemoteBuffer, offset: int | Tensor, t: Tensor) -> None:
    """Store a tensor in an entry of a remote buffer.

    **Raises**: as `remote_load`; also ValueError: if the tensor has another shape or dtype.
    """
    remote_buffer.validate_tensor_matches_buffer(t)
    inputs, attributes = offset_of(remote_buffer, offset)
    add_op(REMOTE_STORE, [t, *inputs], attributes)


def multiply_tuple(tup: tuple[int, ...]) -> int:
    """The product of the numbers.

    >>> multiply_tuple((2, 3, 4))
    24
    """
    return math.prod(tup)


# The place of a graph's code, which changes nothing here

CODE_LOCATION = Literal["executable", "buffer"]
_LOCATIONS = ("executable", "buffer")
_REMOTE_CODE_LOAD = Definition("RemoteCodeLoad", nothing, nothing, effect=True)


def remote_code_load(graph: Graph, destination: CODE_LOCATION) -> None:
    """Load the code of `graph` from remote memory. This has no effect here.

    **Arguments**: `destination`: "executable".

    **Raises**

    - ValueError: for another destination, or if `graph` is the current graph.
    - NotImplementedError: for "buffer", as in PopXL.

    >>> import gpusim.popxl as popxl
    >>> ir = popxl.Ir()
    >>> graph = ir.create_empty_graph()
    >>> with ir.main_graph:
    ...     popxl.ops.remote_code_load(graph, "executable")
    """
    current = get_current_graph()
    if destination not in _LOCATIONS:
        raise ValueError(
            f"Not a valid location: {destination}. Must choose from: {', '.join(_LOCATIONS)}"
        )
    if graph == current:
        raise ValueError(
            "The remote_code_load op cannot load the code for the graph it resides in "
            f"({current.id})."
        )
    if destination == "buffer":
        raise NotImplementedError(
            f"destination == '{destination}' for remote_code_load op, graph {graph.id} not "
            "supported."
        )
    add_op(_REMOTE_CODE_LOAD, [], {"loaded": graph.id, "destination": destination})


def code_copy(graph: Graph, source: CODE_LOCATION, destination: CODE_LOCATION) -> None:
    """Raise NotImplementedError, as PopXL does."""
    raise NotImplementedError("popxl.ops.code_copy op is not yet implemented.")
