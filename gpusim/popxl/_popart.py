"""PopART's graphs, tensors and ops below PopXL's, as libraries above PopXL use them.

`graph._pb_graph`, `tensor._pb_tensor` and `ir._pb_ir` are PopXL's own objects, and an op has one
class for both. `install` gives them PopART's methods. Ids are names. Patterns and hints for the
compiler are accepted and have no effect; cloning and connecting ops changes the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import FunctionType
from typing import Any

from ._definition import output_specs
from ._op import Op, op_class
from .context import ExecutionContext
from .dtypes import float32
from .exceptions import popart_exception
from .execution.aliasing import Aliasing, changed_by
from .graph import Graph, GraphId
from .ir import Ir
from .tensor import Constant, Tensor, TensorSpec, Variable
from .transforms.autodiff import BwdGraphInfo, ExpectedConnectionType, PbConnection

__all__ = [
    "BwdGraphInfo",
    "ExecutionContext",
    "ExpectedConnectionType",
    "GraphId",
    "Patterns",
    "PatternsLevel",
    "PbConnection",
    "Region",
    "TensorType",
    "TopoCons",
    "install",
]


class TensorType(Enum):
    """The source of a tensor's values."""

    ActGrad = "ActGrad"  #: an op, or the caller of the graph
    Const = "Const"
    Stream = "Stream"
    Unknown = "Unknown"
    Variable = "Variable"


class PatternsLevel(Enum):
    """How many of PopART's rewriting patterns apply. It has no effect here."""

    NoPatterns = 0
    Minimal = 1
    Default = 2
    All = 3


class Patterns:
    """A choice of PopART's rewriting patterns. It has no effect: ops run as they are.

    >>> Patterns(PatternsLevel.Minimal).enablePattern("OpToIdentity", True).level.name
    'Minimal'
    """

    def __init__(self, level: PatternsLevel = PatternsLevel.Default) -> None:
        self.level = level

    def enablePattern(self, name: str, enabled: bool) -> Patterns:
        """Accept a pattern's name."""
        return self


class Region:
    """A part of a tensor: here all of it, or nothing.

    >>> Region.getFull((2, 3)), Region.getEmpty(2).isEmpty()
    (Region(2, 3), True)
    """

    def __init__(self, shape: Iterable[int], empty: bool = False) -> None:
        self.shape, self._empty = tuple(shape), empty

    @classmethod
    def getFull(cls, shape: Iterable[int], access: object = None) -> Region:
        """All of a tensor of this shape."""
        return cls(shape)

    @classmethod
    def getEmpty(cls, rank: int) -> Region:
        """Nothing of a tensor of this rank."""
        return cls((0,) * rank, True)

    def isEmpty(self) -> bool:
        """Whether it is nothing."""
        return self._empty

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.shape)

    def __repr__(self) -> str:
        return "Region()" if self._empty else f"Region{self.shape}"


class TopoCons:
    """The order of a graph's ops beyond that of their tensors; `graph.topoCons()` gives it too."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __call__(self) -> TopoCons:
        return self

    def insert(self, before: Op, after: Op, tied: bool = False) -> None:
        """Run an op before another one."""
        if not any(before is each for each in after.after):
            after.after.append(before)
        keep_order(after, before)

    def remove(self, before: Op, after: Op | None = None) -> None:
        """Take back an order, or all orders with an op."""
        for op in self._graph._ops if after is None else [after]:
            op.after = [each for each in op.after if each is not before]
        if after is None:
            before.after = []

    def contains(self, before: Op, after: Op) -> bool:
        """Whether the order was inserted."""
        return any(before is each for each in after.after)

    def getBefores(self, op: Op) -> list[Op]:
        """The ops that are to run before an op."""
        return list(op.after)

    def getAfters(self, op: Op) -> list[Op]:
        """The ops that are to run after an op."""
        return [each for each in self._graph._ops if self.contains(op, each)]


def sort(graph: Graph) -> None:
    """Order a graph's ops by their tensors and orders, each where it was or before its first user.

    **Raises**: popart_exception: if they go round in a circle.
    """
    inside = {op.id for op in graph._ops}
    opened: set[int] = set()
    ordered: dict[int, Op] = {}
    for root in graph._ops:
        stack = [root]
        while stack:
            op = stack[-1]
            made_by = (tensor._producer for tensor in op.inputs)
            first = [each for each in (*made_by, *op.after) if each is not None]
            waiting = [each for each in first if each.id in inside and each.id not in ordered]
            if op.id in ordered:
                stack.pop()
            elif not waiting:
                ordered[op.id] = stack.pop()
            elif op.id in opened:
                raise popart_exception(f"{op.debugName()} in graph {graph.name} depends on itself")
            else:
                opened.add(op.id)
                stack += reversed(waiting)
    graph._ops = list(ordered.values())
    graph._in_order_of_creation = False
    graph.ir._mark_changed()


def keep_order(op: Op, earlier: Op | None) -> None:
    """Sort the ops of a graph if one may come before another that it has come to depend on."""
    op.graph.ir._mark_changed()
    if earlier is not None and not (op.graph._in_order_of_creation and earlier.id < op.id):
        sort(op.graph)


def index_among(ids: Sequence[str], id: str, what: str) -> int:
    if id not in ids:
        raise popart_exception(f"There is no {what} {id!r} among {list(ids)}")
    return list(ids).index(id)


class TensorMethods:
    """PopART's methods of tensors."""

    @property
    def _pb_tensor(self: Any) -> Tensor:
        """PopART's tensor behind PopXL's: here the same object."""
        return self

    @staticmethod
    def _from_pb_tensor(pb_tensor: Tensor) -> Tensor:
        """PopXL's tensor for PopART's."""
        return pb_tensor

    def getGraph(self: Any) -> Graph:
        """The graph it is in."""
        graph: Graph = self._graph
        return graph

    def hasProducer(self: Any) -> bool:
        """Whether an op makes it."""
        return self._producer is not None

    def getProducer(self: Any) -> Op:
        """The op that makes it; popart_exception if there is none."""
        if self._producer is None:
            raise popart_exception(f"No producer for tensor {self.id}")
        producer: Op = self._producer
        return producer

    def tensorType(self: Any) -> TensorType:
        """The source of its values."""
        kinds = {Variable: TensorType.Variable, Constant: TensorType.Const}
        return kinds.get(type(self), TensorType.ActGrad)

    def modifiedRegionsByOps(self: Any, ops: Iterable[Op], aliases: object = None) -> list[Region]:
        """The whole tensor if one of the ops changes its memory, else nothing."""
        aliasing = Aliasing(self._graph)
        root = aliasing.root(self)
        changed = any(aliasing.root(op.inputs[i]) == root for op in ops for i in changed_by(op))
        return [Region.getFull(self.shape)] if changed else []


class OpMethods:
    """PopART's methods of ops."""

    def inTensor(self: Any, index: int) -> Tensor:
        """The input with an index."""
        tensor: Tensor = self.inputs[index]
        return tensor

    def outTensor(self: Any, index: int) -> Tensor:
        """The output with an index."""
        tensor: Tensor = self.outputs[index]
        return tensor

    def getInputIndexMap(self: Any) -> dict[int, Tensor]:
        """The inputs by index."""
        return dict(enumerate(self.inputs))

    def getOutputIndexMap(self: Any) -> dict[int, Tensor]:
        """The outputs by index."""
        return dict(enumerate(self.outputs))

    def hasInput(self: Any, index: int) -> bool:
        """Whether there is an input with an index."""
        return 0 <= index < len(self.inputs)

    def hasOutput(self: Any, index: int) -> bool:
        """Whether there is an output with an index."""
        return 0 <= index < len(self.outputs)

    def hasInputTensor(self: Any, tensor: Tensor) -> bool:
        """Whether a tensor is an input."""
        return any(tensor is each for each in self.inputs)

    def getVirtualGraphId(self: Any) -> int:
        """Its IPU."""
        return int(self.ipu)

    def getSourceIpu(self: Any, tensor_id: str | None = None) -> int:
        """The IPU that an IpuCopy copies from."""
        return int(self.attributes["source"])

    def getDestIpu(self: Any) -> int:
        """The IPU that an IpuCopy copies to."""
        return int(self.attributes["destination"])

    def getTripCountValue(self: Any) -> int:
        """The number of a loop's runs."""
        return int(self.attributes["count"])

    def getNumExplicitInputs(self: Any) -> int:
        """The number of a loop's inputs that its outputs replace for the next run."""
        return len(self.outputs)

    # Changes

    def cloneIntoGraph(self: Any, graph: Graph) -> Op:
        """An op of the same kind at the end of a graph, without inputs and outputs.

        `connectInTensor`, `createAndConnectOutTensor` and then `setup` complete it.
        """
        copied = {
            key: list(value) if isinstance(value, list) else value
            for key, value in self.attributes.items()
        }
        clone = op_class(self.opType())(
            graph,
            self.definition,
            [],
            copied,
            self.name(),
            ipu=self.ipu,
            tile_set=self.tile_set,
            location=self.location,
        )
        clone.execution_context = self.execution_context
        graph._append(clone)
        return clone

    def connectInTensor(self: Any, index: int, tensor_id: str, *_: int) -> None:
        """Make a tensor of the graph an input: a new one, or in the place of another."""
        tensor = self.graph.get_tensor(tensor_id)
        if not 0 <= index <= len(self.inputs):
            raise IndexError(f"{self.debugName()} has {len(self.inputs)} inputs, got index {index}")
        self.inputs[index : index + 1] = [tensor]
        keep_order(self, tensor._producer)

    def createAndConnectOutTensor(self: Any, index: int, tensor_id: str) -> None:
        """Make a new tensor an output. `setup` gives it its shape and dtype."""
        graph: Graph = self.graph
        if tensor_id in graph._tensors or index != len(self.outputs):
            raise popart_exception(
                f"Output {index} of {self.debugName()} cannot become a new tensor {tensor_id}: it "
                f"has {len(self.outputs)} outputs, and the id is "
                f"{'taken' if tensor_id in graph._tensors else 'free'}"
            )
        spec = self.inputs[0].spec if self.inputs else TensorSpec((), float32)
        self.outputs.append(Tensor._create(graph, tensor_id, spec, self, index))
        graph.ir._mark_changed()

    def connectOutTensor(self: Any, index: int, tensor_id: str) -> None:
        """Make a tensor that no op makes an output."""
        tensor = self.graph.get_tensor(tensor_id)
        if tensor._producer is not None or index != len(self.outputs):
            raise popart_exception(f"{tensor} cannot be output {index} of {self.debugName()}")
        tensor._producer, tensor._index = self, index
        self.outputs.append(tensor)
        sort(self.graph)  # others may take it already

    def disconnectAllInputs(self: Any) -> None:
        """Take all inputs away."""
        self.inputs.clear()
        self.graph.ir._mark_changed()

    def disconnectAllOutputs(self: Any) -> None:
        """Take all outputs away. They stay in the graph, and no op makes them."""
        for tensor in self.outputs:
            tensor._producer = None
        self.outputs.clear()
        self.graph.ir._mark_changed()

    def setup(self: Any) -> None:
        """Infer the outputs' shapes and dtypes from the inputs, and make missing outputs."""
        specs = output_specs(self.definition, self.inputs, self.attributes)
        for number, spec in enumerate(specs):
            if number < len(self.outputs):
                self.outputs[number]._spec = spec
            else:
                id = self.graph._new_id(f"{self.name() or self.opType().lower()}_out")
                self.outputs.append(Tensor._create(self.graph, id, spec, self, number))
        self.graph.ir._mark_changed()

    # Hints for a compiler, which are kept and have no effect

    def setAvailableMemoryProportion(self: Any, proportion: float | None) -> None:
        """Keep the proportion of memory that the op may use."""
        self.hints["availableMemoryProportion"] = proportion

    def setUseFullyConnectedPass(self: Any, use: bool) -> None:
        """Keep whether a product shares its plan with its gradients."""
        self.hints["useFullyConnectedPass"] = use

    def getConvOptions(self: Any) -> dict[str, str]:
        """The options of a convolution."""
        return dict(self.hints.get("convOptions", {}))

    def setConvOptions(self: Any, options: Mapping[str, str]) -> None:
        """Keep the options of a convolution."""
        self.hints["convOptions"] = dict(options)


class GraphMethods:
    """PopART's methods of graphs."""

    @staticmethod
    def _from_pb(pb_graph: Graph) -> Graph:
        """PopXL's graph for PopART's."""
        return pb_graph

    def getInputId(self: Any, index: int) -> str:
        """The id of the input with an index."""
        return str(self._inputs[index].id)

    def getInputTensor(self: Any, index: int) -> Tensor:
        """The input with an index."""
        tensor: Tensor = self._inputs[index]
        return tensor

    def getInputIndex(self: Any, tensor_id: str) -> int:
        """The index of an input; popart_exception if there is none with the id."""
        return index_among(self.getInputIds(), tensor_id, "input")

    def getOutputId(self: Any, index: int) -> str:
        """The id of the output with an index."""
        return str(self._outputs[index].id)

    def getOutputTensor(self: Any, index: int) -> Tensor:
        """The output with an index."""
        tensor: Tensor = self._outputs[index]
        return tensor

    def getOutputIndex(self: Any, tensor_id: str) -> int:
        """The index of an output; popart_exception if there is none with the id."""
        return index_among(self.getOutputIds(), tensor_id, "output")

    def getOpSchedule(self: Any, requireOptimalSchedule: bool = False) -> list[Op]:
        """The ops in the order in which they run."""
        return list(self._ops)

    def eraseOp(self: Any, op_id: int) -> None:
        """Remove an op. Its outputs stay, and no op makes them."""
        (op,) = [each for each in self._ops if each.id == op_id] or [None]
        if op is None:
            raise popart_exception(f"There is no op {op_id} in graph {self.name}")
        op.disconnectAllOutputs()
        self._ops = [each for each in self._ops if each is not op]
        for each in self._ops:
            if any(op is earlier for earlier in each.after):
                rest = [earlier for earlier in each.after if earlier is not op]
                each.after = [*rest, *op.after]
        if self._last_in_sequence is op:
            self._last_in_sequence = op.after[-1] if op.after else None
        self.ir._mark_changed()

    def removeOutput(self: Any, output: int | str) -> None:
        """Remove an output, by index or id. The tensor stays.

        An index past the end removes the last output, as in PopART's vector: programs remove
        several by the indices that they had before. popart_exception for a negative index, and
        for one of a graph without outputs.
        """
        index = output if isinstance(output, int) else self.getOutputIndex(output)
        if index < 0 or not self._outputs:
            raise popart_exception(
                f"removeOutput({output!r}): graph {self.name} has {len(self._outputs)} outputs"
            )
        del self._outputs[min(index, len(self._outputs) - 1)]
        self.ir._mark_changed()

    def removeIsolatedTensors(self: Any, *_: bool) -> None:
        """Remove the tensors that no op makes or takes, but for inputs, outputs and variables."""
        kept = {id(tensor) for tensor in (*self._inputs, *self._outputs, *self.variables)}
        kept |= {id(v._shard) for v in self.variables}
        kept |= {id(tensor) for op in self._ops for tensor in (*op.inputs, *op.outputs)}
        self._tensors = {key: t for key, t in self._tensors.items() if id(t) in kept}
        self.ir._mark_changed()

    @property
    def topoCons(self: Any) -> TopoCons:
        """The order of the ops beyond that of their tensors."""
        return TopoCons(self)

    def setCanBeRecursivelyAutodiffed(self: Any, enabled: bool) -> None:
        """Whether `autodiff` of a graph that calls this one may differentiate it as well."""
        self._differentiable = enabled


class IrMethods:
    """PopART's methods of Irs."""

    @staticmethod
    def _from_pb(pb_ir: Ir) -> Ir:
        """PopXL's Ir for PopART's."""
        return pb_ir

    def setPatterns(self, patterns: Patterns) -> None:
        """Accept a choice of patterns."""

    def setDataFlow(self: Any, dataFlow: Any) -> None:
        """Set `num_host_transfers` to the number of batches of a step."""
        self.num_host_transfers = dataFlow.batchesPerStep()

    def updateVertices(self) -> None:
        """Do nothing: ops run as they are."""

    def setIsPrepared(self) -> None:
        """Do nothing: a session prepares the Ir."""

    def applyPreAliasPatterns(self, graph: Graph) -> None:
        """Do nothing: ops run as they are."""

    def applyInplacePattern(self, graph: Graph) -> None:
        """Do nothing: ops change in place what the program says."""


def install() -> None:
    """Give PopXL's classes PopART's methods."""
    pairs = ((Tensor, TensorMethods), (Op, OpMethods), (Graph, GraphMethods), (Ir, IrMethods))
    for target, methods in pairs:
        for name, member in vars(methods).items():
            if isinstance(member, (FunctionType, property, staticmethod)):
                setattr(target, name, member)
