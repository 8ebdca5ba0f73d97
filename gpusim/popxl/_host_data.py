"""The host's data of a session: buffers of streams, and the values of variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpusim.libraries import reshaped_view

from .streams import Stream
from .tensor import Variable
from .utils import FLOAT8, downcast_np_dtypes

if TYPE_CHECKING:
    from .execution import Machine
    from .ir import Ir

__all__ = ["Weights", "as_transfers", "host_buffer", "stream_shape"]


# Streams


def stream_shape(stream: Stream, ir: Ir) -> tuple[int, ...]:
    """The shape of a host array: (transfers, local replicas, *shape) without sizes of 1."""
    leading = ir.num_host_transfers, ir.instance_replication_factor
    return (*(size for size in leading if size != 1), *stream.shape)


def host_buffer(stream: Stream, ir: Ir) -> NDArray[Any]:
    """An array of zeros for the tensors of a stream in one run."""
    return np.zeros(stream_shape(stream, ir), stream.dtype.as_numpy())


def as_transfers(array: NDArray[Any], stream: Stream, ir: Ir) -> NDArray[Any]:
    """A host array as a view (transfers, replicas, *shape).

    It may have more transfers than a run takes; the first ones are taken. For a stream of one
    element, axes of length 1 may be missing or too many.

    **Raises**: ValueError: for another shape or dtype.
    """
    kind = type(stream).__name__
    lead = len(stream_shape(stream, ir)) - len(stream.shape)
    if math.prod(stream.shape) == math.prod(array.shape[lead:]) == 1:
        array = reshaped_view(array, (*array.shape[:lead], *stream.shape))
    check_shape(array, stream, ir, kind)
    if array.dtype != stream.dtype.as_numpy():
        raise ValueError(
            f"Type mismatch for {kind} stream {stream.tensor_id}:\nStream dtype = {stream.dtype}. "
            f"Got array dtype = {array.dtype}"
        )
    if ir.num_host_transfers > 1:
        array = array[: ir.num_host_transfers]
    shape = ir.num_host_transfers, ir.instance_replication_factor, *stream.shape
    view: NDArray[Any] = reshaped_view(array, shape)
    return view


def check_shape(array: NDArray[Any], stream: Stream, ir: Ir, kind: str) -> None:
    """Raise ValueError if an array has another shape than a stream's host side needs."""
    transfers, replicas = ir.num_host_transfers, ir.instance_replication_factor
    expected = stream_shape(stream, ir)
    shape = array.shape
    if array.ndim == len(expected):
        if transfers > 1 and shape[0] < transfers:
            raise ValueError(
                f"Dimension 0 ({shape[0]}) for the array provided for {kind} stream "
                f"{stream.tensor_id} is not large enough.\nIt should be at least of size "
                f"num_host_transfers = {transfers}"
            )
        if replicas > 1 and shape[at := int(transfers > 1)] != replicas:
            raise ValueError(
                f"Dimension {at} ({shape[at]}) for the array provided for {kind} stream "
                f"{stream.tensor_id} is the wrong size.\nIt should be of size replication_factor = "
                f"{replicas}"
            )
        shape = expected[:1] + shape[1:] if transfers > 1 else shape
    if shape != expected:
        raise ValueError(
            f"Shape mismatch for {kind} stream {stream.tensor_id}:\nStream shape = {stream.shape}, "
            f"therefore expected full global batch shape {expected}. "
            f"Got array shape = {array.shape}"
        )


# Variables


class Weights:
    """The variables of an Ir: their values on the host, and the machine's arrays for them."""

    def __init__(self, ir: Ir, machine: Machine) -> None:
        self._ir, self._machine = ir, machine
        self.variables = ir.main_graph.variables
        self.stale = False  # whether a run may have changed values since the last transfer
        #: those whose data is a file that cannot be written
        self.read_only = [
            v
            for v in self.variables
            if isinstance(v._host, np.memmap) and not v._host.flags.writeable
        ]
        self._allocate()

    def _allocate(self) -> None:
        """Allocate the arrays of all variables and buffers, which are never replaced."""
        machine, replicas = self._machine, self._machine.replicas
        for buffer in self._ir._remote_buffers:
            shape = replicas, buffer.entries, *buffer.tensor_shape
            machine.remote[buffer.remote_buffer_id] = machine.xp.zeros(
                shape, buffer.tensor_dtype.as_numpy()
            )
        for variable in self.variables:
            groups = variable.replica_grouping._groups
            if groups.size != machine.total:
                raise RuntimeError(
                    f"{variable} was made for groups of {groups.size} replicas, but there are "
                    f"{machine.total} now"
                )
            tensor = variable if variable._shard is None else variable._shard
            if variable._remote is None:
                shape = replicas, *tensor.shape
                machine.variables[tensor.id] = machine.xp.zeros(shape, tensor.dtype.as_numpy())

    def _array(self, variable: Variable) -> Any:
        """The machine's array for a variable: (replicas, *shape), or for a shard, or an entry's."""
        if variable._remote is not None:
            array = self._machine.remote[variable._remote.remote_buffer_id]
            return array[:, variable._offset]
        tensor = variable if variable._shard is None else variable._shard
        return self._machine.variables[tensor.id]

    def run_done(self) -> None:
        """Mark all variables as stale on the host."""
        self.stale = True
        for variable in self.variables:
            variable._stale = True

    # To the machine

    def from_host(self) -> None:
        """Send every variable's values to this instance's replicas."""
        for variable in self.variables:
            self.send(variable)
        self.stale = False

    def send(self, variable: Variable) -> None:
        """Send one variable's values."""
        machine, whole = self._machine, per_replica(variable)
        rows = range(machine.offset, machine.offset + machine.replicas)
        if variable._shards:
            values = np.stack([shard_of(whole, variable, row) for row in rows])
        else:
            values = whole[rows.start : rows.stop]
        array = self._array(variable)
        array[...] = machine.upload(np.ascontiguousarray(values)).reshape(array.shape)
        variable._stale = False

    # To the host

    def to_host(self) -> None:
        """Bring every variable's values here; Exception if one is a read-only file."""
        if self.read_only:
            raise Exception(
                "Writing data from device to host is not possible as the `ir` contains a read-only "
                "memmap."
            )
        for variable in self.variables:
            self._retrieve(variable)
            variable._stale = False
        self.stale = False

    def _retrieve(self, variable: Variable) -> None:
        groups = variable.replica_grouping._groups
        every = variable.retrieval_mode == "all_replicas"
        rows = list(range(groups.size)) if every else [members[0] for members in groups.members]
        values = self._wholes(variable, rows)
        if every:
            variable._every = values
            values = values[[members[0] for members in groups.members]]
        values = values.reshape(variable.shape_on_host)
        if isinstance(variable._host, np.memmap):
            variable._host[...] = values
            variable._host.flush()
        else:
            variable._host = values

    def _wholes(self, variable: Variable, rows: Sequence[int]) -> NDArray[Any]:
        """The whole values of some replicas, joined from shards if they are cut."""
        array = self._array(variable)
        if not variable._shards:
            values: NDArray[Any] = self._machine.rows_of(array, rows)
            return values.reshape(len(rows), *variable.shape)
        domains = [domain_of(variable, row) for row in rows]
        parts = self._machine.rows_of(array, [member for domain in domains for member in domain])
        flat = parts.reshape(len(rows), -1)[:, : variable.nelms]
        whole: NDArray[Any] = flat.reshape(len(rows), *variable.shape)
        return whole

    # The host's own

    def on_host(self, variable: Variable) -> NDArray[Any]:
        """The host's values: (replicas, *shape) for "all_replicas", else of shape_on_host."""
        if variable.retrieval_mode == "all_replicas":
            return per_replica(variable).copy()
        held = variable._host
        return held if isinstance(held, np.memmap) else held.copy()

    def check(self, variable: Variable, data: Any) -> NDArray[Any]:
        """The array to store for new values of a variable, with all checks."""
        name = variable.id
        if variable.dtype in FLOAT8 and getattr(data, "dtype", None) != variable.dtype.as_numpy():
            raise TypeError(
                f"Data for variable {name} must be passed in as an np.array with dtype "
                f"{variable.dtype.as_numpy()} (see popxl.fp8_utils.host_pow2scale_cast_to_fp8)"
            )
        if variable.retrieval_mode == "all_replicas" and variable.replica_grouping.group_size > 1:
            raise NotImplementedError(
                f'Copying to tensor {name} with "all_replicas" retreval mode is not yet supported.'
            )
        array = np.asarray(data)
        if array.dtype != variable.dtype.as_numpy():
            array = array.astype(downcast_np_dtypes.get(array.dtype, array.dtype), copy=False)
        if array.dtype != variable.dtype.as_numpy():
            raise TypeError(
                f"The dtype of the input array {array.dtype} must match the equivalent type of the "
                f"tensor {name} : {variable.dtype}"
            )
        if array.shape != variable.shape_on_host:
            raise ValueError(
                f"The shape of the input array {array.shape} must match the shape of the tensor "
                f"{name} : {variable.shape_on_host}"
            )
        return array

    def set(self, variable: Variable, array: NDArray[Any]) -> None:
        """Store other values on the host only."""
        variable._every = None
        if isinstance(variable._host, np.memmap) and variable._host.flags.writeable:
            variable._host[...] = array
        else:
            variable._host = array.copy()


def per_replica(variable: Variable) -> NDArray[Any]:
    """The host's values for each replica: (replicas, *shape), a view if there is one group."""
    if variable._every is not None:
        return variable._every
    groups = variable.replica_grouping._groups
    if groups.group_count == 1:
        return np.broadcast_to(variable._host, (groups.size, *variable.shape))
    return variable._host[list(groups.assignment)]


def domain_of(variable: Variable, replica: int) -> tuple[int, ...]:
    """The replicas that share the value of a replica in shards: neighbours in its group."""
    groups = variable.replica_grouping._groups
    members = groups.members[groups.assignment[replica]]
    first = members.index(replica) // variable._shards * variable._shards
    return members[first : first + variable._shards]


def shard_of(wholes: NDArray[Any], variable: Variable, replica: int) -> NDArray[Any]:
    """The part of its value that a replica holds: flat, the last one padded with zeros."""
    place = domain_of(variable, replica).index(replica)
    size = -(-math.prod(variable.shape) // variable._shards)
    part = wholes[replica].reshape(-1)[place * size : (place + 1) * size]
    return np.pad(part, (0, size - len(part)))
