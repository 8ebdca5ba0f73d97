"""conditional: an op that runs one of two graphs, chosen by a tensor, and its call site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .._definition import Arrays, Attributes, Definition, Specs, add_op, only_compiled
from .._op import Op
from .._sites import site_inputs
from ..context import get_current_graph
from ..exceptions import popart_exception
from ..graph import Graph
from ..tensor import Tensor
from .calling import CallSiteInfo, arguments_of, index_of

if TYPE_CHECKING:
    from ..execution.compiler import GraphCompiler
    from ..execution.program import CompiledGraph, Step

__all__ = ["conditional", "conditional_with_info", "ConditionalSiteInfo"]


def branch_specs(inputs: Specs, attributes: Attributes) -> Specs:
    return [tensor.spec for tensor in attributes["then_branch"].outputs]


def compile_conditional(compiler: GraphCompiler, op: Op) -> Step:
    machine, attributes = compiler.machine, op.attributes
    condition, outputs = compiler.slot(op.inputs[0]), compiler.slots(op.outputs)
    branches = []
    first = 1
    for name in ("then", "else"):
        graph, called = attributes[f"{name}_branch"], attributes[f"{name}_inputs"]
        slots, _ = arguments_of(compiler, op, graph, called, first)
        branches.append((compiler.compiler.program(graph), slots))
        first += len(called)

    def step(values: list[Any]) -> None:
        chosen = machine.download(values[condition]).reshape(-1).astype(np.bool_)
        if chosen.all() or not chosen.any():
            program, slots = branches[0 if chosen[0] else 1]
            results = program.run(copy_modified(program, [values[slot] for slot in slots]))
        else:
            results = diverge(chosen, values)
        for slot, result in zip(outputs, results, strict=False):
            values[slot] = result

    def diverge(chosen: Any, values: list[Any]) -> Arrays:
        """Run each branch for the replicas that take it, and join their results."""
        results: Arrays = []
        for take, (program, slots) in zip((chosen, ~chosen), branches, strict=True):
            rows = np.flatnonzero(take)
            at = machine.upload(rows)
            with machine.restrict(rows):
                parts = program.run([values[slot][at] for slot in slots])[: len(outputs)]
            if not results:
                results = [machine.xp.empty((len(chosen), *p.shape[1:]), p.dtype) for p in parts]
            for result, part in zip(results, parts, strict=True):
                result[at] = part
        return results

    return step


def copy_modified(program: CompiledGraph, arguments: Arrays) -> Arrays:
    """Copy the arguments that a graph changes in place."""
    for index in program.modified:
        arguments[index] = arguments[index].copy()
    return arguments


CONDITIONAL = Definition("If", branch_specs, only_compiled, compile=compile_conditional)


def conditional(
    cond: Tensor,
    then_branch: Graph,
    else_branch: Graph,
    then_inputs: Iterable[Any] | None = None,
    else_inputs: Iterable[Any] | None = None,
    then_inputs_dict: Mapping[Tensor, Any] | None = None,
    else_inputs_dict: Mapping[Tensor, Any] | None = None,
) -> tuple[Tensor, ...]:
    """Run `then_branch` where `cond` is true, else `else_branch`, and return the outputs.

    Replicas may take different branches, which then cannot contain collectives.

    **Arguments**

    - `cond`: a bool tensor of one element.
    - `then_branch`, `else_branch`: graphs with outputs of the same number, shapes and dtypes.
    - `then_inputs`, `else_inputs`, and the dicts: the inputs of the branches, as for `call`.

    **Raises**: as `call`; also ValueError: if the outputs of the branches differ, and
    NotImplementedError: for inputs by reference.
    """
    return conditional_with_info(
        cond, then_branch, else_branch, then_inputs, else_inputs, then_inputs_dict, else_inputs_dict
    ).outputs


def conditional_with_info(
    cond: Tensor,
    then_branch: Graph,
    else_branch: Graph,
    then_inputs: Iterable[Any] | None = None,
    else_inputs: Iterable[Any] | None = None,
    then_inputs_dict: Mapping[Tensor, Any] | None = None,
    else_inputs_dict: Mapping[Tensor, Any] | None = None,
    check_inputs: bool = True,
) -> ConditionalSiteInfo:
    """As `conditional`, but return the call site. Without `check_inputs`, inputs may be missing."""
    check_branches(then_branch, else_branch)
    if isinstance(cond, Tensor) and cond.nelms != 1:
        raise ValueError(f"cond must have one element, got {cond}")
    taken, then_called = site_inputs(
        then_branch, then_inputs or (), then_inputs_dict, check_inputs, "then_branch"
    )
    other, else_called = site_inputs(
        else_branch, else_inputs or (), else_inputs_dict, check_inputs, "else_branch"
    )
    here = get_current_graph()
    attributes = {
        "then_branch": then_branch,
        "else_branch": else_branch,
        "then_inputs": then_called,
        "else_inputs": else_called,
    }
    names = [tensor.name for tensor in then_branch.outputs]
    add_op(CONDITIONAL, [cond, *taken, *other], attributes, output_names=names)
    return ConditionalSiteInfo(here._ops[-1])


def check_branches(then_branch: Graph, else_branch: Graph) -> None:
    """Raise ValueError if outputs differ, and NotImplementedError for inputs by reference."""
    counts = len(then_branch.outputs), len(else_branch.outputs)
    if counts[0] != counts[1]:
        raise ValueError(
            "`then_branch` graph and `else_branch` graph must have the same number of outputs: "
            f"{counts[0]} != {counts[1]}"
        )
    for taken, other in zip(then_branch.outputs, else_branch.outputs, strict=True):
        if (taken.shape, taken.dtype) != (other.shape, other.dtype):
            raise ValueError(
                "`then_branch` graph and `else_branch` graph must have outputs of the same shapes "
                f"and dtypes: {taken} and {other}"
            )
    for name, graph in (("then_branch", then_branch), ("else_branch", else_branch)):
        for tensor in graph.inputs:
            if tensor._by_ref:
                raise NotImplementedError(
                    "TensorByRef is not implemented for the conditional op. You cannot call this "
                    f"input to the {name} graph by ref: {tensor}"
                )


class ConditionalSiteInfo(CallSiteInfo):
    """A conditional: the pairs of tensors of the caller and of the two branches.

    The op's inputs are the condition, those of the then-branch, and those of the else-branch.
    """

    @property
    def called_graph(self) -> tuple[Graph, Graph]:  # type: ignore[override]  # as PopXL's
        """The two branches."""
        return self._op.attributes["then_branch"], self._op.attributes["else_branch"]

    def _branch(self, then_branch: bool) -> tuple[Graph, list[Tensor], int]:
        """A branch, its inputs that the op has, and the number of the first of them in the op."""
        called = self._op.attributes["then_inputs"]
        if then_branch:
            return self.called_graph[0], called, 1
        return self.called_graph[1], self._op.attributes["else_inputs"], 1 + len(called)

    def graph_to_parent_input_index(self, idx: int, then_branch: bool = True) -> int:
        """The number of the op's input for an input of a branch; IndexError if there is none."""
        graph, called, first = self._branch(then_branch)
        if not 0 <= idx < len(graph.inputs):
            raise IndexError("Invalid graph input index")
        return first + index_of(called, graph.inputs[idx])

    def parent_to_graph_input_index(self, idx: int) -> int:
        """The number, in its branch, of an input of the op.

        **Raises**

        - IndexError: if the op has no such input.
        - popart_exception: for the condition.
        """
        if idx == 0:
            raise popart_exception("Invalid parent graph input index")
        graph, called, first = self._branch(self.is_parent_index_in_then_branch(idx))
        return index_of(graph.inputs, called[idx - first])

    def is_parent_index_in_then_branch(self, idx: int) -> bool:
        """Whether an input of the op belongs to the then-branch.

        **Raises**: IndexError: if the op has no such input.
        """
        if not 0 <= idx < len(self._op.inputs):
            raise IndexError("Invalid parent graph input index")
        return 1 <= idx < 1 + len(self._op.attributes["then_inputs"])

    def graph_to_parent_output_index(self, idx: int, then_branch: bool = True) -> int:
        """The number of the op's output for an output of a branch; IndexError if there is none."""
        return super().graph_to_parent_output_index(idx)

    def parent_to_graph_output_index(self, idx: int, then_branch: bool = True) -> int:
        """The number of the branch's output for the op's output; IndexError if there is none."""
        return super().graph_to_parent_output_index(idx)

    def graph_to_parent(self, graph_tensor: Tensor) -> Tensor:
        """The caller's tensor for an input or output of a branch; ValueError for other tensors."""
        for then_branch in (True, False):
            graph, called, first = self._branch(then_branch)
            for index, tensor in enumerate(called):
                if tensor is graph_tensor:
                    return self._op.inputs[first + index]
            for tensor, parent in zip(graph.outputs, self._op.outputs, strict=False):
                if tensor is graph_tensor:
                    return parent
        raise ValueError(
            f"Tensor {graph_tensor.name} is not an input or output of the called graph(s)."
        )

    def parent_to_graph(self, parent_tensor: Tensor) -> Tensor:
        """The branch's tensor for an input of the op; ValueError for other tensors.

        For a tensor that both branches take this is the then-branch's.
        """
        for index, tensor in enumerate(self._op.inputs[1:], start=1):
            if tensor is parent_tensor:
                _, called, first = self._branch(self.is_parent_index_in_then_branch(index))
                return called[index - first]
        raise ValueError(
            f"Tensor {parent_tensor.name} is not a parent graph input of the call site."
        )

    def set_parent_input_modified(
        self, parent_tensor: Tensor, infer_modified_regions: bool = True
    ) -> None:
        """Raise NotImplementedError: branches always work on copies."""
        raise NotImplementedError(
            "Parent input modification is not yet implemented for the conditional op."
        )
