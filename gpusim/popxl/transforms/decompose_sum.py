"""decompose_sum: sums of many tensors as a chain of additions in place."""

from __future__ import annotations

from .._definition import add_op
from .._op import Op
from ..context import get_current_context, in_sequence
from ..graph import Graph
from ..ops.arithmetic import ADD_LHS_INPLACE, SUM
from ..ops.transfers import INIT
from ..tensor import TensorSpec

__all__ = ["decompose_sum"]


def decompose_sum(graph: Graph) -> Graph:
    """Replace each sum of N tensors that `autodiff` makes by zeros and N additions in place.

    An IPU then does not need to hold all N at the same time. Additions of float16 are each rounded.
    The graph itself is changed, and returned. Its tensors keep their ids.

    >>> import gpusim.popxl as popxl
    >>> ir = popxl.Ir()
    >>> graph = ir.create_graph(lambda x: x * x, popxl.TensorSpec((2,), popxl.float32))
    >>> gradients = popxl.transforms.autodiff(graph).graph
    >>> [op.opType() for op in popxl.transforms.decompose_sum(gradients)._pb_graph.getOps()]
    ['MulArg0Grad', 'MulArg1Grad', 'Init', 'AddLhsInplace', 'AddLhsInplace']
    """
    for op in list(graph._ops):
        if op.definition is SUM:
            _decompose(graph, op)
    return graph


def _decompose(graph: Graph, op: Op) -> None:
    count = len(graph._ops)
    (out,) = op.outputs
    spec = TensorSpec(out.shape, out.dtype)
    context = get_current_context()
    inside = bool(context._graphs) and context.graph is graph
    with in_sequence(False):
        if inside:
            _add_chain(op, spec)
        else:
            with graph:
                _add_chain(op, spec)
    chain = graph._ops[count:]
    del graph._ops[count:]
    place = next(index for index, each in enumerate(graph._ops) if each is op)
    graph._ops[place : place + 1] = chain
    # The last addition's result is the sum's own tensor.
    last = chain[-1]
    del graph._tensors[last.outputs[0]._id]
    last.outputs = [out]
    out._producer = last
    for each in (*graph._ops, *chain):
        each.after = [last if earlier is op else earlier for earlier in each.after]
    chain[0].after = list(op.after)
    if graph._last_in_sequence is op:
        graph._last_in_sequence = last
    graph.ir._mark_changed()


def _add_chain(op: Op, spec: TensorSpec) -> None:
    (total,) = add_op(INIT, [], {"spec": spec, "init_type": "zero"})
    for tensor in op.inputs:
        (total,) = add_op(ADD_LHS_INPLACE, [total, tensor])
