"""Ir: a main graph, the graphs that it calls, and the number of replicas."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import index as as_index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpusim import popdist

from ._dot import checkpoint
from ._options import SessionOptions
from ._tracing import trace
from .graph import Graph
from .module import Module
from .replica_grouping import ReplicaGrouping
from .tensor import Tensor

if TYPE_CHECKING:
    from .remote_buffer import RemoteBuffer
    from .streams import DeviceToHostStream, HostToDeviceStream

__all__ = ["Ir"]

_ids = itertools.count()


class Ir:
    """A program: its main graph, and the graphs that it calls.

    **Arguments**: `replication`: the number of replicas; or "popdist" for as many as poprun has
    started, and this instance runs its share.

    **Raises**: ValueError: for fewer than one replica.

    >>> ir = Ir(replication=2)
    >>> ir.main_graph, ir.replication_factor
    (Graph[id= name=main_graph], 2)
    """

    def __init__(self, replication: int | Literal["popdist"] = 1) -> None:
        self._id = next(_ids)
        self._graphs: dict[str, Graph] = {}
        self._numbers: Counter[str] = Counter()
        self._remote_buffers: list[RemoteBuffer] = []
        self._options = SessionOptions()
        self._replication: int | None = None  # None: popdist decides
        self._prepared = False
        self._transfers = 1
        self._version = 0  # increases with every op and every other change of a graph
        if isinstance(replication, str):
            if replication != "popdist":
                raise ValueError(f"replication={replication!r}: expected a number, or 'popdist'")
            popdist.popart.configureSessionOptions(self._options)
        else:
            self._replication = _positive("replication", replication)
        self._main = self._new_graph("")

    # Graphs

    @property
    def main_graph(self) -> Graph:
        """The graph that a session runs."""
        return self._main

    def create_graph(
        self,
        fn: Callable[..., Tensor | Iterable[Tensor] | None] | Module,
        *args: Any,
        **kwargs: Any,
    ) -> Graph:
        """Make a graph by calling a function, or a Module's `build`.

        For tensors and TensorSpecs in `args` and `kwargs`, also in lists and tuples, the graph gets
        inputs of their shapes and dtypes, in the order of the function's signature. Other arguments
        are passed on. Inputs that the function makes by `popxl.graph_input` follow. The outputs are
        what it returns: a tensor, an iterable of tensors or None.

        An input annotated as `popxl.TensorByRef` or `list[popxl.TensorByRef]` is the caller's own
        tensor, which the graph may change.

        **Raises**

        - TypeError: if `fn` is neither a function nor a Module, or if a list, *args or **kwargs
          mixes tensors with other values.
        - ValueError: if the arguments do not fit the signature, or a result is not a tensor.

        >>> import gpusim.popxl as popxl
        >>> def scale(x: popxl.Tensor, factor: float) -> popxl.Tensor:
        ...     return x * factor
        >>> vector = popxl.TensorSpec((4,), popxl.float32)
        >>> graph = popxl.Ir().create_graph(scale, vector, factor=2.0)
        >>> graph.id, [tensor.name for tensor in graph.inputs], len(graph.outputs)
        ('scale_subgraph(0)', ['x'], 1)
        """
        return trace(self, fn, args, kwargs)

    def create_empty_graph(self, name: str | None = None) -> Graph:
        """A new, empty graph. Its name begins with `name`, by default "graph"."""
        return self._new_graph(self._subgraph_id(name or "graph"))

    def _mark_changed(self) -> None:
        self._version += 1

    def _new_graph(self, id: str) -> Graph:
        graph = self._graphs[id] = Graph._create(self, id)
        return graph

    def _subgraph_id(self, name: str) -> str:
        stem = f"{name.replace('.<locals>', '')}_subgraph"
        return f"{stem}({self._next_number(stem)})"

    def _next_number(self, stem: str) -> int:
        number = self._numbers[stem]
        self._numbers[stem] += 1
        return number

    def _stream_id(self, name: str) -> str:
        number = self._next_number(f"stream {name}")
        return f"{name}__t{number - 1}" if number else name

    # Replicas

    @property
    def replication_factor(self) -> int:
        """The number of replicas of all instances. It can be set until there is a session.

        **Raises**: RuntimeError: if it is set later; ValueError: for a number below 1.
        """
        if self._replication is None:
            return popdist.getNumTotalReplicas()
        return self._replication

    @replication_factor.setter
    def replication_factor(self, value: int) -> None:
        if self._prepared:
            raise RuntimeError(
                f"The `Ir` {self.id} is already prepared, you probably have created a session "
                "associated with this ir and cannot change the replication_factor after this."
            )
        self._replication = _positive("replication_factor", value)

    @property
    def instance_replication_factor(self) -> int:
        """The number of replicas of this instance; all of them, unless popdist sets it."""
        if self._replication is None:
            return popdist.getNumLocalReplicas()
        return self._replication

    def replica_grouping(self, stride: int = 1, group_size: int | None = None) -> ReplicaGrouping:
        """Groups of `group_size` replicas at a distance of `stride`.

        **Arguments**: `group_size` is by default the largest size: replicas // stride.

        **Raises**: ValueError: if the numbers do not divide the replicas.

        >>> Ir(replication=8).replica_grouping(2, 4).assignment
        [0, 1, 0, 1, 0, 1, 0, 1]
        """
        return ReplicaGrouping._from_stride(self, stride, group_size)

    def replica_grouping_from_assignments(self, assignment: Sequence[int]) -> ReplicaGrouping:
        """Groups of replicas from a list of each replica's group.

        Without a constant stride the groups are for variables only, and not for collectives.

        **Raises**: ValueError: if group sizes differ, if group numbers do not begin at 0 and appear
        in order, or if there is not a number for each replica.

        >>> Ir(replication=4).replica_grouping_from_assignments([0, 1, 1, 0])
        ReplicaGrouping(assignment=[0, 1, 1, 0])
        """
        return ReplicaGrouping._from_assignment(self, assignment)

    # Streams

    @property
    def num_host_transfers(self) -> int:
        """The number of tensors of each stream in one run, 1 unless set before a session."""
        return self._transfers

    @num_host_transfers.setter
    def num_host_transfers(self, value: int) -> None:
        self._transfers = _positive("num_host_transfers", value)

    def get_all_h2d_streams(self) -> set[HostToDeviceStream]:
        """The streams that a host_load in some graph reads."""
        return set(self._streams("HostLoad"))

    def get_all_d2h_streams(self) -> set[DeviceToHostStream]:
        """The streams that a host_store in some graph writes."""
        return set(self._streams("HostStore"))

    def _streams(self, op_type: str) -> list[Any]:
        ops = (op for graph in self._graphs.values() for op in graph._ops)
        single = (each for op in ops for each in op.attributes.get("exchanges", (op,)))
        return [op.attributes["stream"] for op in single if op.opType() == op_type]

    # The rest

    @property
    def id(self) -> int:
        """Its number among the Irs of this process."""
        return self._id

    def dot_checkpoint(self, check: str, save_dir: Path | str | None = None) -> None:
        """Write each graph as a Graphviz file `<check>.<graph>.dot`.

        It does nothing if the session options' `dotChecks`, or the variable POPART_DOT_CHECKS, name
        only other checks. If both are empty, this turns on all checks. `save_dir` applies to later
        checks too; by default it is the session options' `logDir`. If the graphviz package is
        installed, each file is rendered as well.
        """
        checkpoint(self, check, save_dir)

    @property
    def _pb_ir(self) -> Ir:
        """PopART's Ir behind PopXL's: here the same object."""
        return self

    def getSessionOptions(self) -> SessionOptions:
        """The options of its sessions. They can be changed until there is a session."""
        return self._options

    def logIr(self) -> None:
        """Do nothing; PopART logs the Ir."""

    def getAllGraphs(self) -> list[Graph]:
        """All its graphs, the main graph first."""
        return list(self._graphs.values())

    def getGraph(self, id: str) -> Graph:
        """The graph with an id."""
        return self._graphs[id]

    def __eq__(self, other: object) -> bool:
        """Whether it is the same Ir; TypeError for other values."""
        if not isinstance(other, Ir):
            raise TypeError(f"Value must be of type popxl.Ir. Type: {type(other)}. Value: {other}.")
        return self is other

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"Ir[id={self._id}]"


def _positive(name: str, value: int) -> int:
    number = as_index(value)
    if number < 1:
        raise ValueError(f"{name}={value!r}: expected an integer of at least 1")
    return number
