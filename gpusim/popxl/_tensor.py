"""Tensor: a value of a graph, with the operators and methods that make ops of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from . import dtypes
from .errors import UndefinedValue
from .tensorlocation import TensorLocation
from .typing_ import NewAliasAnnotation, is_numbers

if TYPE_CHECKING:
    from ._ops.op import Op
    from .graph import Graph
    from .ir import Ir

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
        """The three by name."""
        return {"shape": self.shape, "dtype": self.dtype, "meta_shape": self.meta_shape}

    def to_tuple(self) -> tuple[tuple[int, ...], dtypes.dtype, tuple[int, ...]]:
        """The three in order."""
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


def _ops() -> Any:
    """The ops, which need this module themselves."""
    from . import ops

    return ops


def _operator(function: str, reverse: bool = False) -> Callable[[Tensor, Any], Tensor]:
    """A method for an operator; numbers become constants of the tensor's dtype."""

    def apply(self: Tensor, other: Any) -> Tensor:
        if not (isinstance(other, Tensor) or is_numbers(other)):
            return NotImplemented
        other = self._like(other)
        made: Tensor = getattr(_ops(), function)(*((other, self) if reverse else (self, other)))
        return made

    return apply


class Tensor:
    """A value of a graph: it has a shape and a dtype, and numbers only while a session runs.

    Operators make ops in the current graph: ``+ - * / @ ** % & | ~``, indexing, and in place
    ``+=``. Tensors are equal if they are the same one of the same Ir.
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
    def _made(
        cls, graph: Graph, id: str, spec: TensorSpec, producer: Op | None = None, index: int = 0
    ) -> Any:
        tensor = object.__new__(cls)
        tensor._graph, tensor._id, tensor._spec = graph, id, spec
        tensor._producer, tensor._index, tensor._by_ref = producer, index, False
        graph._add_tensor(tensor)
        return tensor

    # What it is

    @property
    def id(self) -> str:
        """Its id in the Ir: the graph's id, a slash and the name; outside the main graph."""
        return self._id

    @property
    def name(self) -> str:
        """The id without the graph and the name scopes."""
        return self._id.rpartition("/")[2].rpartition(".")[2]

    @property
    def scope(self) -> str:
        """What of the id comes before the name: the graph's id and name scopes."""
        return self._id[: -len(self.name)].rstrip("./")

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
        """The shape of the whole of which it is a shard; () if it is none."""
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
        """The memory its data lies in."""
        return TensorLocation()

    def strides(self, shape: Iterable[int] | None = None) -> tuple[int, ...]:
        """How many elements lie between neighbours along each axis, in C order."""
        sizes = self.shape if shape is None else tuple(shape)
        return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))

    @property
    def ir(self) -> Ir:
        """The Ir it belongs to."""
        return self._graph.ir

    @property
    def in_sync_with_ipu(self) -> bool:
        """Whether what the host holds of it is what the device holds."""
        return True

    @property
    def ipu(self) -> int:
        """The IPU of the op that makes it, else of the first that takes it.

        UndefinedValue where none has been placed.
        """
        for op in self._neighbours():
            if op.ipu is not None:
                return op.ipu
        raise UndefinedValue("Tensor's IPU is undefined.")

    @property
    def tile_set(self) -> Literal["compute", "io"]:
        """The tiles of the op that makes it, else of the first that takes it.

        UndefinedValue where there is no op.
        """
        for op in self._neighbours():
            return "io" if op.tile_set == "io" else "compute"
        raise UndefinedValue("Tensor's tile set is undefined.")

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

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __contains__(self, other: object) -> bool:
        raise TypeError("a Tensor has no values yet: `in` can only be asked of a session's arrays")

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self} has no values yet: use popxl.ops.conditional, or a session's arrays"
        )

    # What is made of it

    @property
    def T(self) -> Tensor:
        """Transposed."""
        return self.transpose()

    @property
    def T_(self) -> Tensor:
        """Transposed, as a view."""
        return self.transpose_()

    def transpose(self, permutation: Iterable[int] | None = None) -> Tensor:
        """Its axes permuted, by default reversed."""
        return _ops().transpose(self, permutation)

    def transpose_(self, permutation: Iterable[int] | None = None) -> Tensor:
        """Its axes permuted, by default reversed, as a view."""
        return _ops().transpose_(self, permutation)

    def reshape(self, shape: Iterable[int]) -> Tensor:
        """In another shape; one axis may be -1."""
        return _ops().reshape(self, shape)

    def reshape_(self, shape: Iterable[int]) -> Tensor:
        """In another shape, as a view; one axis may be -1."""
        return _ops().reshape_(self, shape)

    def flatten(self) -> Tensor:
        """With one axis."""
        return _ops().flatten(self)

    def flatten_(self) -> Tensor:
        """With one axis, as a view."""
        return _ops().flatten_(self)

    def detach(self) -> Tensor:
        """The same values, through which no gradient goes."""
        return _ops().detach(self)

    def detach_(self) -> Tensor:
        """The tensor as a view through which no gradient goes."""
        return _ops().detach_(self)

    def diag(self) -> Tensor:
        """The diagonal of a matrix; ValueError for other ranks."""
        if self.rank != 2:
            raise ValueError("Diag expected a 2d tensor.")
        count = min(self.shape)
        rows = _ops().flatten(self[:count, :count])
        return _ops().subsample(rows, count + 1)

    def copy_to_ipu(self, destination: int, source: int | None = None) -> Tensor:
        """Copied to another IPU of the replica."""
        return _ops().ipu_copy(self, destination, source)

    def __getitem__(self, key: Any) -> Tensor:
        from ._indexing import indexed

        return indexed(self, key)

    def _like(self, value: Any) -> Tensor:
        """A number or array as a constant of this tensor's dtype."""
        from ._sources import constant

        return value if isinstance(value, Tensor) else constant(value, self.dtype)

    def __neg__(self) -> Tensor:
        return _ops().negate(self)

    def __invert__(self) -> Tensor:
        return _ops().logical_not(self)

    def __abs__(self) -> Tensor:
        return _ops().abs(self)

    __add__, __radd__ = _operator("add"), _operator("add", True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", True)
    __matmul__, __rmatmul__ = _operator("matmul"), _operator("matmul", True)
    __pow__, __rpow__ = _operator("pow"), _operator("pow", True)
    __mod__, __rmod__ = _operator("fmod"), _operator("fmod", True)
    __and__, __rand__ = _operator("logical_and"), _operator("logical_and", True)
    __or__, __ror__ = _operator("logical_or"), _operator("logical_or", True)
    __gt__, __lt__ = _operator("greater"), _operator("greater", True)
    __iadd__ = _operator("add_")


#: As an annotation of a graph's function: the graph works on the caller's own tensor.
TensorByRef = NewAliasAnnotation("TensorByRef", Tensor)
