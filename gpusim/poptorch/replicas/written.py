"""Graphs of torch operators as JSON, and back; graphs of anything else have no such form."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

__all__ = ["Unwritable", "graph_of", "written"]

NAMESPACES = ("aten", "prims")
OWN = ("gpusim::draw",)
NEVER = ("aten::from_file",)  # what is read must not reach for files


class Unwritable(Exception):
    """A graph has no such form; says why."""


def written(module: GraphModule, functions: Collection[Callable[..., Any]] = ()) -> dict[str, Any]:
    """A graph as JSON: equal texts are equal graphs.

    **Arguments**

    - `functions`: those that may be in it beside operators, by their names. Such a text identifies
      a graph, and `graph_of` does not read it.

    Raises Unwritable.
    """
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    nodes: list[list[Any]] = []
    constants: list[list[Any]] = []
    for node in module.graph.nodes:
        target: Any = None
        if node.op == "call_function":
            target = target_name(node.target, functions)
        elif node.op == "get_attr":
            target = len(constants)
            constants.append(constant(getattr(module, str(node.target), None)))
        elif node.op not in ("placeholder", "output"):
            raise Unwritable(f"it has a node of the kind {node.op}")
        args, kwargs = value(node.args, places), value(node.kwargs, places)
        nodes.append([node.op, target, args, kwargs])
    return {"nodes": nodes, "constants": constants}


def graph_of(found: Any) -> GraphModule:
    """The graph of what `written` gave, without `functions`.

    Its operators are torch's, and that of random numbers, whatever the text says. Raises
    ValueError, KeyError, TypeError, AttributeError, IndexError or RuntimeError for another text.
    """
    root = nn.Module()
    for number, described in enumerate(found["constants"]):
        setattr(root, f"constant{number}", tensor_of(described))
    graph = Graph()
    nodes: list[Node] = []
    for number, (op, target, args, kwargs) in enumerate(found["nodes"]):
        given, named = value_of(args, nodes), value_of(kwargs, nodes)
        if op == "call_function":
            node = graph.call_function(function_of(target), given, named)
        elif op == "placeholder":
            node = graph.placeholder(f"input{number}")
        elif op == "get_attr":
            node = graph.get_attr(f"constant{int(target)}")
        elif op == "output":
            node = graph.output(given[0])
        else:
            raise ValueError(f"a node of the kind {op!r}")
        nodes.append(node)
    return GraphModule(root, graph)


# ---------------------------------------------------------------- targets


def target_name(target: Any, functions: Collection[Callable[..., Any]]) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload) and is_known(target._schema.name):
        return f"{target._schema.name}.{target._overloadname}"
    if target in functions:
        return f"{target.__module__}:{target.__qualname__}"
    raise Unwritable(f"it calls {target}")


def is_known(name: str) -> bool:
    return name in OWN or (name.split("::")[0] in NAMESPACES and name not in NEVER)


def function_of(target: str) -> Callable[..., Any]:
    if target == "getitem":
        return operator.getitem
    name, _, overload = target.rpartition(".")
    namespace, _, operation = name.partition("::")
    if not is_known(name):
        raise ValueError(f"an operator {name!r}")
    found = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"no operator {target!r}")
    return found


# ---------------------------------------------------------------- arguments

AS_THEY_ARE = (type(None), bool, int, str)
#: torch's constants by their kinds; str() of each is torch.NAME.
NAMED = (torch.dtype, torch.layout, torch.memory_format)


def value(given: Any, places: dict[Node, int]) -> Any:
    """Lists of a kind and what it holds stand for what JSON has not."""
    if type(given) in AS_THEY_ARE:
        return given
    if isinstance(given, Node):
        return ["node", places[given]]
    if isinstance(given, (tuple, list)):
        kind = "tuple" if isinstance(given, tuple) else "list"
        return [kind, [value(item, places) for item in given]]
    if isinstance(given, dict):
        return ["dict", {str(key): value(item, places) for key, item in given.items()}]
    if isinstance(given, slice):
        return ["slice", [value(x, places) for x in (given.start, given.stop, given.step)]]
    if type(given) is float:
        return ["float", given.hex()]
    if isinstance(given, NAMED):
        return ["torch", str(given).removeprefix("torch.")]
    if isinstance(given, torch.device):
        return ["device", str(given)]
    raise Unwritable(f"it has an argument of type {type(given).__name__}")


def value_of(found: Any, nodes: list[Node]) -> Any:
    if type(found) in AS_THEY_ARE:
        return found
    kind, content = found
    return READERS[kind](content, nodes)


def named(content: str, nodes: list[Node]) -> Any:
    found = getattr(torch, content)
    if not isinstance(found, NAMED):
        raise ValueError(f"no constant torch.{content}")
    return found


READERS: dict[str, Callable[[Any, list[Node]], Any]] = {
    "node": lambda content, nodes: nodes[content],
    "tuple": lambda content, nodes: tuple(value_of(item, nodes) for item in content),
    "list": lambda content, nodes: [value_of(item, nodes) for item in content],
    "dict": lambda content, nodes: {key: value_of(content[key], nodes) for key in content},
    "slice": lambda content, nodes: slice(*(value_of(item, nodes) for item in content)),
    "float": lambda content, nodes: float.fromhex(content),
    "torch": named,
    "device": lambda content, nodes: torch.device(content),
}


# ---------------------------------------------------------------- constants

LARGEST = 1 << 20  # bytes of a constant that is worth a text


def constant(tensor: Any) -> list[Any]:
    """A tensor's dtype, shape, device and bytes."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if not plain or tensor.requires_grad or tensor.numel() * tensor.element_size() > LARGEST:
        raise Unwritable("it has a constant that is no small plain tensor")
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, [*tensor.shape], str(tensor.device), flat.numpy().tobytes().hex()]


def tensor_of(described: Any) -> Tensor:
    dtype, shape, device, content = described
    data = bytearray.fromhex(content)
    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, dtype))
    return flat.reshape(shape).to(device)
