"""ops.repeat: run another graph several times, each on what the last has made."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index as as_index
from typing import Any

from .._ops.calling import REPEAT
from ..graph import Graph
from ..tensor import Tensor
from .call import CallSiteInfo, subgraph_op

__all__ = ["repeat", "repeat_with_info"]


def repeat(
    graph: Graph,
    repeat_count: int,
    *inputs: Any,
    inputs_dict: Mapping[Tensor, Any] | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of a graph after `repeat_count` runs.

    Each run's N outputs are the next one's first N inputs; all other inputs are the same each time.
    With `repeat_count` 0 the first inputs themselves come back.

    Raises as `call`; also ValueError for a negative count, and for a graph with more outputs than
    inputs, or whose outputs have other shapes or dtypes than the inputs they become.
    """
    return repeat_with_info(graph, repeat_count, *inputs, inputs_dict=inputs_dict).outputs


def repeat_with_info(
    graph: Graph,
    repeat_count: int,
    *inputs: Any,
    inputs_dict: Mapping[Tensor, Any] | None = None,
    check_inputs: bool = True,
) -> CallSiteInfo:
    """As `repeat`; returns the call site. Inputs may be missing if not `check_inputs`."""
    if as_index(repeat_count) < 0:
        raise ValueError(f"Repeat count must be >= 0. Repeat count: {repeat_count}. Graph: {graph}")
    if len(graph.inputs) < len(graph.outputs):
        raise ValueError(
            f"To repeat the subgraph ({graph.id}) the number of inputs must be greater than or "
            f"equal to the number of outputs. {len(graph.inputs)} < {len(graph.outputs)}"
        )
    for into, out in zip(graph.inputs, graph.outputs, strict=False):
        if (into.shape, into.dtype) != (out.shape, out.dtype):
            raise ValueError(
                f"To repeat the subgraph ({graph.id}) its output {out} must have the shape and "
                f"dtype of the input that it becomes, {into}"
            )
    attributes = {"count": as_index(repeat_count)}
    return CallSiteInfo(subgraph_op(REPEAT, graph, inputs, inputs_dict, check_inputs, attributes))
