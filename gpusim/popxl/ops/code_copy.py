"""`remote_code_load`, `code_copy`: where a graph's code lies, which here makes no difference."""

from __future__ import annotations

from typing import Any, Literal

from .._ops.definition import Definition, add_op
from ..context import get_current_graph
from ..graph import Graph

__all__ = ["CODE_LOCATION", "code_copy", "remote_code_load"]

CODE_LOCATION = Literal["executable", "buffer"]
_LOCATIONS = ("executable", "buffer")


def _nothing(*arguments: Any) -> list[Any]:
    return []


_REMOTE_CODE_LOAD = Definition("RemoteCodeLoad", infer=_nothing, run=_nothing, effect=True)


def remote_code_load(graph: Graph, destination: CODE_LOCATION) -> None:
    """Says that the code of `graph` comes from remote memory; here code lies nowhere.

    **Arguments**: `destination`: "executable".

    Raises:
        ValueError: for another destination, and for the graph that the op is in.
        NotImplementedError: for "buffer", as in PopXL.

    >>> import gpusim.popxl as popxl
    >>> ir = popxl.Ir()
    >>> graph = ir.create_empty_graph()
    >>> with ir.main_graph:
    ...     popxl.ops.remote_code_load(graph, "executable")
    """
    current = get_current_graph()
    if destination not in _LOCATIONS:
        raise ValueError(
            f"Not a valid location: {destination}. Must choose from: {', '.join(_LOCATIONS)}"
        )
    if graph == current:
        raise ValueError(
            "The remote_code_load op cannot load the code for the graph it resides in "
            f"({current.id})."
        )
    if destination == "buffer":
        raise NotImplementedError(
            f"destination == '{destination}' for remote_code_load op, graph {graph.id} not "
            "supported."
        )
    add_op(_REMOTE_CODE_LOAD, [], {"loaded": graph.id, "destination": destination})


def code_copy(graph: Graph, source: CODE_LOCATION, destination: CODE_LOCATION) -> None:
    """Not in PopXL either: NotImplementedError."""
    raise NotImplementedError(f"{__name__} op is not yet implemented.")
