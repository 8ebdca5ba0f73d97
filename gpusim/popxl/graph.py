"""Graph: inputs, ops in the order of their addition, and outputs."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from .context import OpHooks, get_current_context
from .tensor import Constant, Tensor, Variable

if TYPE_CHECKING:
    from ._op import Op
    from .ir import Ir

__all__ = ["Graph", "GraphId"]


class GraphId(str):
    """The id of a graph, which PopART's `str()` gives too."""

    def str(self) -> str:
        """The id."""
        return f"{self}"


class Graph(OpHooks):
    """A main graph, or a graph that others call. `with graph:` makes it the current one."""

    _ir: Ir
    _id: str
    _ops: list[Op]
    _inputs: list[Tensor]
    _outputs: list[Tensor]
    _tensors: dict[str, Tensor]
    _last_in_sequence: Op | None
    _modified: tuple[int, frozenset[str]]
    _effect: tuple[int, bool]
    _differentiable: bool
    _in_order_of_creation: bool

    def __init__(self) -> None:
        raise TypeError("Cannot create popxl.graph.Graph instances using the constructor.")

    @classmethod
    def _create(cls, ir: Ir, id: str) -> Graph:
        graph = object.__new__(cls)
        graph._ir, graph._id = ir, GraphId(id)
        graph._differentiable = graph._in_order_of_creation = True
        graph._ops, graph._inputs, graph._outputs = [], [], []
        graph._tensors, graph._hooks = {}, {}
        graph._last_in_sequence = None
        graph._modified, graph._effect = (-1, frozenset()), (-1, False)
        return graph

    @property
    def name(self) -> str:
        """The id; "main_graph" for the main graph."""
        return self._id or "main_graph"

    @property
    def id(self) -> str:
        """Its id in the Ir; "" for the main graph."""
        return self._id

    @property
    def ir(self) -> Ir:
        """The Ir it belongs to."""
        return self._ir

    @property
    def main_graph(self) -> Graph:
        """The Ir's main graph."""
        return self._ir.main_graph

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs: the function's, in the order of its signature, then those of graph_input."""
        return tuple(self._inputs)

    @property
    def inputs_by_name(self) -> dict[str, Tensor]:
        """Its inputs by name."""
        return {tensor.name: tensor for tensor in self._inputs}

    @property
    def _by_ref_inputs(self) -> set[Tensor]:
        """The inputs that are taken by reference."""
        return {tensor for tensor in self._inputs if tensor._by_ref}

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Its outputs."""
        return tuple(self._outputs)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All its tensors."""
        return tuple(self._tensors.values())

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Its variables; only the main graph has any."""
        return tuple(t for t in self._tensors.values() if isinstance(t, Variable))

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Its constants."""
        return tuple(t for t in self._tensors.values() if isinstance(t, Constant))

    @property
    def called_graphs(self) -> tuple[Graph, ...]:
        """The graphs that its ops call, each once, in the order of the first call."""
        return tuple(
            {graph.id: graph for op in self._ops for graph in op.getCalledGraphs()}.values()
        )

    def get_tensor(self, tensor_id: str) -> Tensor:
        """The tensor with an id; ValueError if there is none."""
        try:
            return self._tensors[tensor_id]
        except KeyError:
            raise ValueError(f"Graph {self.name} has no tensor with the id {tensor_id}") from None

    def __contains__(self, value: object) -> bool:
        """Whether a tensor belongs to the graph; TypeError for other values."""
        if not isinstance(value, Tensor):
            raise TypeError(
                f"Value must be of type popxl.Tensor. Value: {value}. Type: {type(value)}"
            )
        return value._graph is self

    def __enter__(self) -> Graph:
        get_current_context().push_graph(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        get_current_context().pop_graph()

    def __eq__(self, other: object) -> bool:
        """Whether it is the same graph; TypeError for other values."""
        if not isinstance(other, Graph):
            raise TypeError(
                f"Value must be of type popxl.Graph. Value: {other}. Type: {type(other)}"
            )
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Graph[id={self.id} name={self.name}]"

    # PopART's interface, and construction

    @property
    def _pb_graph(self) -> Graph:
        """PopART's graph behind PopXL's: here the same object."""
        return self

    def getOps(self) -> list[Op]:
        """The ops in the order of their addition."""
        return list(self._ops)

    def getInputIds(self) -> list[str]:
        """The ids of its inputs."""
        return [tensor.id for tensor in self._inputs]

    def getOutputIds(self) -> list[str]:
        """The ids of its outputs."""
        return [tensor.id for tensor in self._outputs]

    def _new_id(self, name: str) -> str:
        """A unique id for a tensor: the graph's id, the name scopes and the name."""
        scopes = (self._id,) if self._id else ()
        stem = "/".join((*scopes, *get_current_context().name_scopes, name))
        candidate = stem
        while candidate in self._tensors:
            number = self._ir._next_number(stem)
            candidate = f"{stem}__t{number}"
        return candidate

    def _add_tensor(self, tensor: Tensor) -> None:
        self._tensors[tensor._id] = tensor

    def _append(self, op: Op) -> None:
        self._ops.append(op)
        self._ir._mark_changed()
