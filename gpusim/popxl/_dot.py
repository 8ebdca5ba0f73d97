"""Graphs as Graphviz files: ops are boxes, tensors are arrows."""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._op import Op
    from .graph import Graph
    from .ir import Ir
    from .tensor import Tensor

__all__ = ["checkpoint", "dot_source"]


def checkpoint(ir: Ir, check: str, save_dir: Path | str | None) -> None:
    """Write an Ir's graphs, if this check is activated."""
    options = ir.getSessionOptions()
    if save_dir is not None:
        options.logDir = str(save_dir)
    active = set(options.dotChecks) | set(filter(None, _from_environment()))
    if not active:
        options.dotChecks = active = {"ALL"}
    if not active & {check, "ALL"}:
        return
    folder = Path(options.logDir)
    folder.mkdir(parents=True, exist_ok=True)
    for stem, graph in file_stems(ir).items():
        path = folder / f"{file_stem(check)}.{stem}.dot"
        path.write_text(dot_source(graph), encoding="utf-8")
        render(path)


def _from_environment() -> list[str]:
    return re.split(r"[\s:,;]+", os.environ.get("POPART_DOT_CHECKS", ""))


def file_stem(name: str) -> str:
    """A name as part of a file name.

    >>> file_stem("Linear.build_subgraph(0)")
    'Linear.build_subgraph_0'
    """
    return re.sub(r"[^\w.]+", "_", name).strip("_")


def file_stems(ir: Ir) -> dict[str, Graph]:
    """An Ir's graphs by the stems of their files; a number distinguishes equal ones."""
    stems: dict[str, Graph] = {}
    for graph in ir.getAllGraphs():
        stem = name = file_stem(graph.name)
        for number in itertools.count(1):
            if stem not in stems:
                break
            stem = f"{name}.{number}"
        stems[stem] = graph
    return stems


def render(path: Path) -> None:
    """Render a picture beside the file, if the graphviz package and its program are installed."""
    try:
        graphviz = importlib.import_module("graphviz")
    except ImportError:
        return
    try:
        graphviz.render("dot", "svg", path)
    except graphviz.ExecutableNotFound:
        return


def dot_source(graph: Graph) -> str:
    """A graph in Graphviz's language.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph as graph:
    ...     _ = popxl.ops.add(popxl.constant(1.0, name="one"), popxl.constant(2.0, name="two"))
    >>> print(dot_source(graph))
    digraph "main_graph" {
      rankdir=TB;
      node [shape=box];
      "tensor one" [label="one\\nfloat32 ()", shape=ellipse];
      "tensor two" [label="two\\nfloat32 ()", shape=ellipse];
      "op 0" [label="Add"];
      "tensor one" -> "op 0" [label="one"];
      "tensor two" -> "op 0" [label="two"];
    }
    <BLANKLINE>
    """
    lines = ["rankdir=TB;", "node [shape=box];", *statements(graph)]
    body = "\n".join(f"  {line}" for line in lines)
    return f"digraph {quote(graph.name)} {{\n{body}\n}}\n"


def statements(graph: Graph) -> Iterator[str]:
    number = {op.id: place for place, op in enumerate(graph._ops)}
    for tensor in graph.tensors:
        if tensor._producer is None:
            about = f"{tensor.name}\n{tensor.dtype.name} {tensor.shape}"
            yield f"{source_of(tensor, number)} [label={quote(about)}, shape=ellipse];"
    for op in graph._ops:
        yield f"{quote(f'op {number[op.id]}')} [label={quote(title(op))}];"
    for op in graph._ops:
        target = quote(f"op {number[op.id]}")
        for tensor in op.inputs:
            yield f"{source_of(tensor, number)} -> {target} [label={quote(tensor.name)}];"
        for earlier in op.after:
            yield f"{quote(f'op {number[earlier.id]}')} -> {target} [style=dotted];"
    for place, tensor in enumerate(graph.outputs):
        name = quote(f"output {place}")
        yield f"{name} [label={quote(f'output {place}')}, shape=ellipse];"
        yield f"{source_of(tensor, number)} -> {name} [label={quote(tensor.name)}];"


def source_of(tensor: Tensor, number: dict[int, int]) -> str:
    """The node where a tensor comes from."""
    if tensor._producer is None:
        return quote(f"tensor {tensor.id}")
    return quote(f"op {number[tensor._producer.id]}")


def title(op: Op) -> str:
    """An op's type, its name, and the graphs that it calls."""
    lines = [op.opType(), op.name(), *(graph.name for graph in op.getCalledGraphs())]
    return "\n".join(filter(None, lines))


def quote(text: str) -> str:
    """Text as a string of Graphviz's language."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
