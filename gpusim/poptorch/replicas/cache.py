"""A cache of graphs in a folder: one file for each graph that `Lockstep` builds.

A model is traced each time. The file's name is a digest of everything that its graph depends on:
the trace, the shapes, and the versions of the software. A file holds a checksum and a JSON line for
each node of the graph. It names operators of torch only: reading a file cannot call other code, as
reading a pickle or a file of `torch.export` can.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import gpusim
from gpusim.files import atomic_write

from ...torch.private import OpOverload, schema_of
from .._logging import logger

__all__ = ["Cache", "Unwritable", "graph_of", "text_of"]

SUFFIX = ".graph.json"
CHECKSUM = 64  # hexadecimal digits of SHA-256
#: What `graph_of` raises for a text that is not a graph.
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, RecursionError)


class Cache:
    """A folder of graphs. It is created if it does not exist; None stands for no cache.

    **Raises**: AssertionError if the folder cannot be written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            raise AssertionError(f"Cache folder {folder} is not writable") from None
        assert os.access(folder, os.W_OK), f"Cache folder {folder} is not writable"

    @classmethod
    def from_options(cls, options: Any) -> Cache:
        """The cache that `Options.enableExecutableCaching` has chosen."""
        popart = {} if options is None else options._Popart.options
        enabled = popart.get("enableEngineCaching") and popart.get("cachePath")
        return cls(Path(popart["cachePath"]) if enabled else None)

    def graph(
        self, trace: GraphModule, about: dict[str, Any], build: Callable[[], GraphModule]
    ) -> GraphModule:
        """Read a graph from the cache, or build it and write it there.

        **Arguments**

        - `trace`, `about`: what the graph is built from; `about` is written as JSON.
        - `build`: builds the graph.
        """
        if self._folder is None:
            return build()
        try:
            key = digest_of({**about, **ambient(), "trace": text_of(trace)})
        except Unwritable as reason:
            logger.info("The graph is not kept, as %s", reason)
            return build()
        path = self._folder / f"{key}{SUFFIX}"
        graph = _read(path)
        if graph is not None:
            logger.info("Graph from the cache: %s", path)
            return graph
        graph = build()
        _write(path, graph)
        return graph


def _read(path: Path) -> GraphModule | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read, and is built again: %s", path, error)
        return None
    checksum, text = content[:CHECKSUM], content[CHECKSUM:]
    try:
        if hashlib.sha256(text).hexdigest().encode() != checksum:
            raise ValueError("the checksum does not match")
        return graph_of(text.decode())
    except DAMAGE as error:
        logger.warning("%s is damaged, and is built again: %s", path, error)
        return None


def _write(path: Path, graph: GraphModule) -> None:
    try:
        text = text_of(graph).encode()
        with atomic_write(path, "wb") as file:
            file.write(hashlib.sha256(text).hexdigest().encode() + text)
    except Unwritable as reason:
        logger.info("The graph is not kept, as %s", reason)
    except OSError as error:
        logger.warning("%s is not kept: %s", path, error)


# ---------------------------------------------------------------- the key


def digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def ambient() -> dict[str, Any]:
    """The circumstances of tracing beside the model: software, processors and torch's switches."""
    cuda = torch.cuda.is_available()
    backends = torch.backends
    return {
        "python": sys.version,
        "torch": [torch.__version__, backends.cpu.get_cpu_capability()],
        "cuda": [torch.version.cuda, torch.cuda.get_device_name()] if cuda else None,
        "gpusim": sources(),
        "dtype": str(torch.get_default_dtype()),
        "autocast": [
            [torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))]
            for kind in ("cpu", "cuda")
        ],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": [
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ],
        "cudnn": backends.cudnn.enabled,
    }


@functools.cache
def sources() -> str:
    """A digest of gpusim's source files: another version, or an edited one, builds other graphs."""
    root = Path(gpusim.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)} ".encode() + content)
    return digest.hexdigest()


# ---------------------------------------------------------------- graphs as text

NAMESPACES = ("aten", "prims")
OWN = ("gpusim::draw",)
REFUSED = ("aten::from_file",)  # a file of the cache must not name other files
CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)  # str() of each is torch.NAME
LARGEST = 1 << 20  # bytes of a tensor in the text


class Unwritable(Exception):
    """A graph cannot be written as text. The message says why."""


def text_of(module: GraphModule) -> str:
    """A graph of torch's operators as text, a JSON line for each node. Equal texts, equal graphs.

    **Raises**: Unwritable for another function, an argument of another type, or a large constant.
    """
    nodes = {node: number for number, node in enumerate(module.graph.nodes)}

    def encode(value: Any) -> dict[str, Any]:
        if isinstance(value, Node):
            return {"node": nodes[value]}
        if isinstance(value, slice):
            return {"slice": [value.start, value.stop, value.step]}
        if isinstance(value, CONSTANTS):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise Unwritable(f"it has an argument of type {type(value).__name__}")

    lines = (
        [node.op, _described(module, node), _tagged([*node.args]), _tagged([*node.kwargs.items()])]
        for node in nodes
    )
    return "\n".join(json.dumps(line, default=encode) for line in lines)


def _tagged(value: Any) -> Any:
    """Nested lists with tuples as `{"tuple": list}`: JSON does not tell tuples from lists."""
    if not isinstance(value, (tuple, list)):
        return value
    items = [_tagged(item) for item in value]
    return {"tuple": items} if isinstance(value, tuple) else items


def _described(module: GraphModule, node: Node) -> Any:
    """An operator by name, a constant by its dtype, shape, device and bytes."""
    if node.op == "get_attr":
        return _constant(getattr(module, str(node.target), None))
    if node.op != "call_function":
        return None
    target = node.target
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, OpOverload) and _is_known(schema_of(target).name):
        return f"{schema_of(target).name}.{schema_of(target).overload_name or 'default'}"
    raise Unwritable(f"it calls {target}")


def _is_known(name: str) -> bool:
    return name in OWN or (name.split("::")[0] in NAMESPACES and name not in REFUSED)


def _constant(tensor: Any) -> list[Any]:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if not plain or tensor.requires_grad or tensor.numel() * tensor.element_size() > LARGEST:
        raise Unwritable("it has a constant that is not a small plain tensor")
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, [*tensor.shape], str(tensor.device), flat.numpy().tobytes().hex()]


def graph_of(text: str) -> GraphModule:
    """The graph that `text_of` has written.

    **Raises**: one of `DAMAGE` for another text. Whatever the text says, the graph calls operators
    of torch and draws random numbers, and nothing else.
    """
    root, graph = nn.Module(), Graph()
    nodes: list[Node] = []
    readers: dict[str, Callable[[Any], Any]] = {
        "node": lambda number: nodes[number],
        "tuple": tuple,
        "slice": lambda bounds: slice(*bounds),
        "torch": _torch_constant,
        "device": torch.device,
    }

    def decode(value: dict[str, Any]) -> Any:
        ((kind, content),) = value.items()
        return readers[kind](content)

    for number, line in enumerate(text.split("\n")):
        op, described, args, kwargs = json.loads(line, object_hook=decode)
        if op == "call_function":
            node = graph.call_function(_operator(described), tuple(args), dict(kwargs))
        elif op == "get_attr":
            setattr(root, f"constant{number}", _tensor(*described))
            node = graph.get_attr(f"constant{number}")
        elif op == "placeholder":
            node = graph.placeholder(f"input{number}")
        elif op == "output":
            node = graph.output(args[0])
        else:
            raise ValueError(f"a node of the kind {op!r}")
        nodes.append(node)
    return GraphModule(root, graph)


def _operator(described: str) -> Callable[..., Any]:
    if described == "getitem":
        return operator.getitem
    name, _, overload = described.rpartition(".")
    namespace, _, operation = name.partition("::")
    if not _is_known(name):
        raise ValueError(f"an unknown operator {name!r}")
    found = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    if not isinstance(found, OpOverload):
        raise ValueError(f"an unknown operator {described!r}")
    return found


def _torch_constant(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, CONSTANTS):
        raise ValueError(f"torch.{name} is not a constant")
    return found


def _tensor(dtype: str, shape: list[int], device: str, content: str) -> Tensor:
    data = bytearray.fromhex(content)
    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, dtype))
    return flat.reshape(shape).to(device)
