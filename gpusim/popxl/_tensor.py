"""Tensor: a value of a graph. `ops` attaches the methods that add ops (see `ops._operators`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from . import dtypes
from .errors import UndefinedValue
from .tensorlocation import TensorLocation
from .typing_ import NewAliasAnnotation

if TYPE_CHECKING:
    from ._op import Op
    from .graph import Graph
    from .ir import Ir
    from .ops._operators import Operators
else:
    Operators = object

__all__ = ["Tensor", "TensorByRef", "TensorSpec"]


class TensorSpec(Mapping[str, Any]):
    """Shape, dtype and meta_shape of a tensor; `**spec` passes them on as arguments.

    >>> TensorSpec((2, 3), dtypes.float16).to_dict()
    {'shape': (2, 3), 'dtype': popxl.dtypes.float16, 'meta_shape': ()}
    """

    __slots__ = ("dtype", "meta_shape", "shape")

    def __init__(
        self, shape: Iterable[int], dtype: dtypes.dtype, meta_shape: Iterable[int] = ()
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.meta_shape = tuple(meta_shape)

    def to_dict(self) -> dict[str, Any]:
        """The three fields by name."""
        return {"shape": self.shape, "dtype": self.dtype, "meta_shape": self.meta_shape}

    def to_tuple(self) -> tuple[tuple[int, ...], dtypes.dtype, tuple[int, ...]]:
        """The three fields in order."""
        return self.shape, self.dtype, self.meta_shape

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return 3

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and self.to_tuple() == other.to_tuple()

    def __hash__(self) -> int:
        return hash(self.to_tuple())

    def __repr__(self) -> str:
        meta = f", meta_shape={self.meta_shape}" if self.meta_shape else ""
        return f"TensorSpec(shape={self.shape}, dtype={self.dtype}{meta})"


class Tensor(Operators):
    """A value of a graph: it has a shape and a dtype, and numbers only while a session runs.

    Operators add ops to the current graph: ``+ - * / @ ** % & | ~``, indexing, and in place ``+=``.
    Tensors are equal if they have the same id in the same Ir.
    """

    _graph: Graph
    _id: str
    _spec: TensorSpec
    _producer: Op | None
    _index: int
    _by_ref: bool

    def __init__(self) -> None:
        raise RuntimeError("popxl.Tensor cannot be constructed directly.")

    @classmethod
    def _create(
        cls, graph: Graph, id: str, spec: TensorSpec, producer: Op | None = None, index: int = 0
    ) -> Any:
        tensor = object.__new__(cls)
        tensor._graph, tensor._id, tensor._spec = graph, id, spec
        tensor._producer, tensor._index, tensor._by_ref = producer, index, False
        graph._add_tensor(tensor)
        return tensor

    @property
    def id(self) -> str:
        """Its id in the Ir: its name; outside the main graph after the graph's id and a slash."""
        return self._id

    @property
    def name(self) -> str:
        """The id without the graph's: the name scopes and the name, separated by slashes."""
        return self._id.removeprefix(f"{self.scope}/") if self.scope else self._id

    @property
    def scope(self) -> str:
        """The graph's part of the id, "" in the main graph."""
        return self._graph._id

    @property
    def dtype(self) -> dtypes.dtype:
        """Its data type."""
        return self._spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape on one replica."""
        return self._spec.shape

    @property
    def meta_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor if it is a shard, else ()."""
        return self._spec.meta_shape

    @property
    def spec(self) -> TensorSpec:
        """Shape, dtype and meta_shape."""
        return self._spec

    @property
    def rank(self) -> int:
        """The number of its axes."""
        return len(self.shape)

    @property
    def nelms(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def location_info(self) -> TensorLocation:
        """The memory that holds its data."""
        return TensorLocation()

    def strides(self, shape: Iterable[int] | None = None) -> tuple[int, ...]:
        """The number of bytes between neighbours along each axis, in C order.

        **Arguments**: `shape`: by default the tensor's own.
        """
        sizes = self.shape if shape is None else tuple(shape)
        itemsize = self.dtype.as_numpy().itemsize
        return tuple(itemsize * math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))

    @property
    def ir(self) -> Ir:
        """The Ir it belongs to."""
        return self._graph.ir

    @property
    def in_sync_with_ipu(self) -> bool:
        """Whether the host and the device hold the same values."""
        return True

    @property
    def ipu(self) -> int:
        """The IPU of the op that makes it, else of the first op that takes it.

        **Raises**: UndefinedValue: if there is no such op.
        """
        op = next(self._neighbours(), None)
        if op is None:
            raise UndefinedValue("Tensor's IPU is undefined.")
        return op.ipu

    @property
    def tile_set(self) -> Literal["compute", "io"]:
        """The tiles of the op that makes it, else of the first op that takes it.

        **Raises**: UndefinedValue: if there is no such op.
        """
        op = next(self._neighbours(), None)
        if op is None:
            raise UndefinedValue("Tensor's tile set is undefined.")
        return "io" if op.tile_set == "io" else "compute"

    def _neighbours(self) -> Iterator[Op]:
        if self._producer is not None:
            yield self._producer
        for op in self._graph._ops:
            if any(tensor is self for tensor in op.inputs):
                yield op

    def _get_ipu(self) -> int | None:
        try:
            return self.ipu
        except UndefinedValue:
            return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and self._id == other._id and self.ir == other.ir

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}[{self.id} {self.dtype} {self.shape}]"

    def __len__(self) -> int:
        if not self.shape:
            raise ValueError("Tensor is a scalar and doesn't have a length.")
        return self.shape[0]

    # Without these, `array + tensor` makes an object array of slices, and `list(tensor)` a list.
    __array_ufunc__ = None
    __iter__ = None

    def __contains__(self, other: object) -> bool:
        raise TypeError("a Tensor has no values yet: `in` can only be asked of a session's arrays")

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self} has no values yet: use popxl.ops.conditional, or a session's arrays"
        )


#: An annotation for an argument of a graph's function: the graph changes the caller's tensor.
TensorByRef = NewAliasAnnotation("TensorByRef", Tensor)
