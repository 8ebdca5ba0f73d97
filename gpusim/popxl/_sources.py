"""Tensors that no op makes: constants, variables and graph inputs; and graph outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from . import dtypes
from ._tensor import Tensor, TensorSpec
from .context import get_current_graph
from .remote_buffer import RemoteBuffer
from .remote_buffer import remote_buffer as new_remote_buffer
from .tensorlocation import ReplicatedTensorSharding, TensorLocation, TensorStorage
from .typing_ import HostScalarTensor
from .utils import to_numpy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .replica_grouping import ReplicaGrouping

__all__ = [
    "Constant",
    "Variable",
    "constant",
    "graph_input",
    "graph_output",
    "remote_replica_sharded_variable",
    "remote_variable",
    "replica_sharded_buffer",
    "replica_sharded_variable",
    "variable",
]

RetrievalMode = Literal["one_per_group", "all_replicas"]


class Constant(Tensor):
    """A tensor whose values are part of the graph."""

    _data: NDArray[Any]


class Variable(Tensor):
    """A tensor of the main graph that keeps its values between runs. The host can set them."""

    _host: NDArray[Any]
    _every: NDArray[Any] | None
    _grouping: ReplicaGrouping | None
    _retrieval_mode: RetrievalMode
    _remote: RemoteBuffer | None
    _offset: int
    _shards: int
    _shard: Tensor | None
    _stale: bool

    @property
    def replica_grouping(self) -> ReplicaGrouping:
        """The groups of replicas with one initial value each."""
        return self.ir.replica_grouping() if self._grouping is None else self._grouping

    @property
    def retrieval_mode(self) -> RetrievalMode:
        """Whether a session returns a value for each group, or for each replica."""
        return self._retrieval_mode

    @property
    def shape_on_replica(self) -> tuple[int, ...]:
        """The shape of one replica's value, before it is cut into shards."""
        return self.shape

    @property
    def shape_on_host(self) -> tuple[int, ...]:
        """The shape on the host: with a leading axis of groups if there are several."""
        groups = self.replica_grouping.num_groups
        return (groups, *self.shape_on_replica) if groups > 1 else self.shape_on_replica

    @property
    def in_sync_with_ipu(self) -> bool:
        """Whether the host and the device hold the same values."""
        return not self._stale

    @property
    def location_info(self) -> TensorLocation:
        """The memory that holds its data."""
        remote, sharded = self._remote is not None, self._shards > 0
        return TensorLocation(
            TensorStorage.OffChip if remote else TensorStorage.OnChip,
            ReplicatedTensorSharding.On if sharded else ReplicatedTensorSharding.Off,
        )


def constant(
    data: HostScalarTensor,
    dtype: dtypes.dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Constant:
    """A constant of the current graph.

    **Arguments**: `data`: numbers, nested lists, an array or a torch tensor; the others, and the
    errors, are those of `popxl.utils.to_numpy`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.constant([1, 2, 3], popxl.float16, name="numbers")
    Constant[numbers popxl.dtypes.float16 (3,)]
    """
    array = to_numpy(data, dtype, downcast, log2_scale=log2_scale, nan_on_overflow=nan_on_overflow)
    graph = get_current_graph()
    spec = TensorSpec(array.shape, dtypes.dtype.as_dtype(array.dtype))
    new: Constant = Constant._create(graph, graph._new_id(name or "t"), spec)
    new._data = array
    return new


def variable(
    data: HostScalarTensor,
    dtype: dtypes.dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    retrieval_mode: RetrievalMode | None = None,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """A variable, which keeps its values between the runs of a session.

    **Arguments**

    - `data`: the initial values; (groups, *shape) if `replica_grouping` has several groups. A
      memory-mapped array is not copied: the session writes retrieved values into its file.
    - `replica_grouping`: the groups of replicas with one value each; by default one group of all.
    - `retrieval_mode`: whether a session returns a value for each group, that of its first replica
      ("one_per_group", the default), or for each replica ("all_replicas").
    - the others are those of `popxl.utils.to_numpy`.

    **Raises**: ValueError: outside of the main graph, for a shape that does not begin with the
    number of groups, or for another retrieval mode; and the errors of `popxl.utils.to_numpy`.

    >>> import gpusim.popxl as popxl
    >>> ir = popxl.Ir(replication=4)
    >>> with ir.main_graph:
    ...     pairs = ir.replica_grouping(stride=1, group_size=2)
    ...     weight = popxl.variable([[1.0, 2.0], [3.0, 4.0]], replica_grouping=pairs)
    >>> weight.shape, weight.shape_on_host
    ((2,), (2, 2))
    """
    array = _variable_data(data, dtype, downcast, log2_scale, nan_on_overflow)
    return _new_variable(array, name, replica_grouping, retrieval_mode)


def remote_variable(
    data: HostScalarTensor,
    remote_buffer: RemoteBuffer,
    offset: int = 0,
    dtype: dtypes.dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """A variable whose values lie in an entry of a remote buffer. Ops load and store them.

    Arguments and errors as in `variable`; also ValueError: if the buffer has another shape, but for
    axes of length 1, another dtype, or no entry `offset`.
    """
    array = _variable_data(data, dtype, downcast, log2_scale, nan_on_overflow)
    new = _new_variable(array, name, replica_grouping, retrieval_mode)
    if not _differ_by_ones(new.shape, remote_buffer.tensor_shape) or (
        new.dtype is not remote_buffer.tensor_dtype
    ):
        remote_buffer.validate_tensor_matches_buffer(new)
    return _place(new, remote_buffer, offset)


def replica_sharded_buffer(
    shape: Iterable[int],
    dtype: dtypes.dtype,
    replica_grouping: ReplicaGrouping | None = None,
    shard_over: int | None = None,
    entries: int = 1,
) -> RemoteBuffer:
    """A remote buffer for the shards of tensors of a shape.

    **Arguments**

    - `shape`, `dtype`: those of the whole tensor; if there are several groups, `shape` begins with
      their number, as a variable's data does.
    - `replica_grouping`: the groups of replicas with one tensor each; by default one group of all.
    - `shard_over`: the number of neighbours of a group with one shard each; by default all of the
      group.
    - `entries`: the number of such tensors in the buffer.

    **Raises**: ValueError: for an Ir of one replica, if `shard_over` does not divide the group, or
    if the shape does not begin with the number of groups.

    >>> import gpusim.popxl as popxl
    >>> ir = popxl.Ir(replication=4)
    >>> pairs = ir.replica_grouping(1, 2)
    >>> with ir.main_graph:
    ...     buffer = popxl.replica_sharded_buffer((2, 5, 3), popxl.float32, pairs)
    >>> buffer.meta_shape, buffer.tensor_shape
    ((5, 3), (8,))
    """
    shards = _shard_count(replica_grouping, shard_over)
    shape = _shape_on_replica(tuple(shape), replica_grouping)
    new = new_remote_buffer((-(-math.prod(shape) // shards),), dtype, entries)
    new.meta_shape = shape
    new._shards = shards
    return new


def remote_replica_sharded_variable(
    data: HostScalarTensor,
    remote_buffer: RemoteBuffer,
    offset: int = 0,
    dtype: dtypes.dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """A variable whose shards lie in the replicas' remote buffers, flat and padded with zeros.

    `remote_load` loads the shard, and `replicated_all_gather` joins the shards. The session takes
    and returns whole tensors. Arguments and errors as in `remote_variable`; also ValueError: for an
    Ir of one replica, or a buffer for tensors of another shape.
    """
    array = _variable_data(data, dtype, downcast, log2_scale, nan_on_overflow)
    shards = _shard_count(replica_grouping, remote_buffer._shards)
    shape = _shape_on_replica(array.shape, replica_grouping)
    if remote_buffer.meta_shape and not _differ_by_ones(remote_buffer.meta_shape, shape):
        raise ValueError(
            f"Cannot use RemoteBuffer[id={remote_buffer.remote_buffer_id}] for replica sharded "
            f"variable of shape {shape}. The buffer's meta_shape has already been set to: "
            f"{remote_buffer.meta_shape}."
        )
    new = _new_variable(array, name, replica_grouping, retrieval_mode, shards)
    remote_buffer.validate_tensor_matches_buffer(new, shards)
    remote_buffer.meta_shape, remote_buffer._shards = remote_buffer.meta_shape or shape, shards
    return _place(new, remote_buffer, offset)


def replica_sharded_variable(
    data: HostScalarTensor,
    dtype: dtypes.dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    shard_over: int | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> tuple[Variable, Tensor]:
    """A variable in shards: each replica holds one, flat and padded with zeros.

    **Arguments**: as in `variable`; `shard_over`: the number of neighbours of a group with one
    shard each, by default all of the group.

    **Returns** the variable, for the session, and the shard, for ops: 1-D, of ceil(elements /
    shard_over) elements, with the variable's shape as its meta_shape.

    **Raises**: as `variable`; also ValueError: for an Ir of one replica, or if `shard_over` does
    not divide the group.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir(replication=4).main_graph:
    ...     whole, shard = popxl.replica_sharded_variable([[0.0] * 3] * 3)
    >>> whole.shape_on_host, shard.shape, shard.meta_shape
    ((3, 3), (3,), (3, 3))
    """
    array = _variable_data(data, dtype, downcast, log2_scale, nan_on_overflow)
    shards = _shard_count(replica_grouping, shard_over)
    new = _new_variable(array, name, replica_grouping, retrieval_mode, shards)
    spec = TensorSpec((-(-new.nelms // shards),), new.dtype, new.shape)
    id = new._graph._new_id(f"{name or 't'}_shard")
    shard: Tensor = Tensor._create(new._graph, id, spec)
    new._shard = shard
    return new, shard


def _variable_data(
    data: HostScalarTensor,
    dtype: dtypes.dtype | None,
    downcast: bool,
    log2_scale: int | None,
    nan_on_overflow: bool | None,
) -> NDArray[Any]:
    graph = get_current_graph()
    if graph is not graph.main_graph:
        raise ValueError(
            "You cannot initialise a variable tensor within a graph. It can only be initialised "
            "within the main graph. Please create a graph input for this variable "
            "(`popxl.graph_input`) or use a constant tensor (`popxl.constant`). See popxl user "
            "guide for more details."
        )
    return to_numpy(data, dtype, downcast, log2_scale=log2_scale, nan_on_overflow=nan_on_overflow)


def _shape_on_replica(shape: tuple[int, ...], grouping: ReplicaGrouping | None) -> tuple[int, ...]:
    """The shape without the axis of groups, which exists if there are several."""
    if grouping is None or grouping.num_groups == 1:
        return shape
    if shape[:1] != (grouping.num_groups,):
        raise ValueError(
            f"The data of a variable with {grouping.num_groups} replica groups must have shape "
            f"({grouping.num_groups}, ...), a value for each group. Got shape {shape}"
        )
    return shape[1:]


def _shard_count(grouping: ReplicaGrouping | None, shard_over: int | None) -> int:
    replicas = get_current_graph().ir.replication_factor
    if replicas <= 1:
        raise ValueError(
            f"The IR's global replication factor is {replicas}. It must be greater than 1 to "
            "create a replica sharded variable."
        )
    size = replicas if grouping is None else grouping.group_size
    shards = size if shard_over is None else shard_over
    note = (
        "replica grouping was passed, the replica group size defaults to the IR's global "
        "replication factor; and if no sharding group size was passed, it defaults to the replica "
        "group size."
    )
    if shards > size:
        raise ValueError(
            f"The sharding group size ({shards}) must be less than or equal to the replica group "
            f"size ({size}). Note that if no {note}"
        )
    if shards < 1 or size % shards:
        raise ValueError(
            f"The replica group size ({size}) must be divisible by the sharding group size "
            f"({shards}). Note that if no{note}"  # as PopXL says it
        )
    return shards


def _new_variable(
    array: NDArray[Any],
    name: str | None,
    grouping: ReplicaGrouping | None,
    retrieval_mode: RetrievalMode | None,
    shards: int = 0,
) -> Variable:
    graph = get_current_graph()
    mode = retrieval_mode or "one_per_group"
    if mode not in ("one_per_group", "all_replicas"):
        raise ValueError(f"Invalid retrieval_mode: {mode}")
    shape = _shape_on_replica(array.shape, grouping)
    dtype = dtypes.dtype.as_dtype(array.dtype)
    spec = TensorSpec(shape, dtype)
    new: Variable = Variable._create(graph, graph._new_id(name or "t"), spec)
    new._host, new._every = array, None
    new._grouping = grouping
    new._retrieval_mode = mode
    new._remote, new._offset, new._stale = None, 0, False
    new._shards, new._shard = shards, None
    return new


def _differ_by_ones(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes are the same but for axes of length 1."""
    return [n for n in shape if n != 1] == [n for n in other if n != 1]


def _place(new: Variable, remote_buffer: RemoteBuffer, offset: int) -> Variable:
    """The variable with its place in a buffer."""
    if not 0 <= offset < remote_buffer.entries:
        raise ValueError(
            f"offset={offset}: RemoteBuffer[id={remote_buffer.remote_buffer_id}] has the entries 0 "
            f"to {remote_buffer.entries - 1}"
        )
    new._remote, new._offset = remote_buffer, offset
    return new


def graph_input(
    shape: Iterable[int],
    dtype: dtypes.dtype,
    name: str | None = None,
    by_ref: bool = False,
    meta_shape: Iterable[int] | None = None,
) -> Tensor:
    """A new input of the current graph, after its other inputs.

    With `by_ref`, calls of the graph change the caller's tensor.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().create_empty_graph("scale"):
    ...     popxl.graph_input((2,), popxl.float32, "factor")
    Tensor[scale_subgraph(0)/factor popxl.dtypes.float32 (2,)]
    """
    graph = get_current_graph()
    spec = TensorSpec(shape, dtype, () if meta_shape is None else meta_shape)
    new: Tensor = Tensor._create(graph, graph._new_id(name or "t"), spec)
    new._by_ref = by_ref
    graph._inputs.append(new)
    return new


def graph_output(t: Tensor) -> None:
    """Make a tensor of the current graph its next output.

    **Raises**

    - TypeError: if `t` is not a Tensor.
    - ValueError: if it is in another graph.
    """
    graph = get_current_graph()
    if not isinstance(t, Tensor):
        raise TypeError(f"The input `t` is not a Tensor. Type: {type(t)}. Value: {t}.")
    if t._graph is not graph:
        raise ValueError(f"The input tensor `t` is not in the current Graph {graph.name}.")
    graph._outputs.append(t)
